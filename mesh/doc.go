// Package mesh knows the other nodes and fetches pages from them.
//
// It owns membership (serf), the directory (which peer seems to hold which
// page), the data port between sidecars with its mutual challenge, and the
// fill of a missing prefix from peers into the local cache.
//
// It does not own the bytes (package cache), names and frames (package
// kvwire), or the HTTP listener through which peers learn each other's
// addresses (package sidecar, with [Mesh.Address]).
//
// # Trust
//
// Gossip and directories are hints: a wrong one costs a message, never a wrong
// page. Bytes are believed only with a checksum and an authenticator that the
// cache has verified. Holders of the cluster key are inside the trust
// boundary.
//
// # Concurrency
//
// A [Mesh] is started once and closed once, by its owner; every other method
// may be called by several goroutines at once. Each peer has one goroutine
// that follows its directory; each pull has one; the data port has one a
// connection. Close ends them all.
package mesh
