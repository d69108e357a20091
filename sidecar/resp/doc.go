// Package resp is a listener for Redis clients: LMCache's adapters, and any
// other client that stores and reads whole values.
//
// It owns the protocol (RESP2 and RESP3), the commands, which keys are
// immutable, and what one connection may cost. It does not own bytes and their
// lives (package cache), credentials (package auth), or settings (package
// sidecar). docs/protocol.md §8 says what is answered to what.
//
// # Where bytes are
//
// A value is a page of a namespace of its own, with one shard (a half of
// LMCache's pair of keys: one of two), in the arena. Its slot begins with a
// header that holds the key's text and when it expires, so that nothing on the
// Go heap grows with the keys. Values are read from the socket into their slot
// and written to the socket from it.
//
// # Concurrency
//
// A [Server] may be used by several goroutines at once. Each connection has
// one goroutine, which owns all of it but the socket.
package resp
