// Package engineport is where engines meet their sidecar: the engine socket
// with shared memory, and the same frames with pages inline on a localhost
// port.
//
// It owns listeners and who may connect, registered engines with their chains,
// leases, inboxes and reservations, and the counters of what was served and
// stored. It does not own bytes (package cache), other nodes (package mesh) or
// the frames themselves (package kvwire, docs/protocol.md).
//
// # Concurrency
//
// Each connection has one goroutine that reads a request, acts and writes the
// answer. Connections of one engine share its chains and leases under the
// engine's lock; an inbox and its reservations belong to their connection.
// Locks are taken in the order server, engine; neither is held while bytes are
// copied, checked or sent, or while a fill waits.
//
// Whatever a connection took ends with it.
package engineport
