// Package doctor looks at a sidecar as an engine does and says what is wrong.
//
// It owns the self-test of `membrane doctor --engine`: an engine of its own, in
// a namespace of its own, that stores and reads one page through shared memory,
// inline and in another layout, and the reading of what the sidecar says of the
// engines that are attached. It does not own the protocol (package kvwire), the
// layouts (package engines/layout) or the command line.
package doctor
