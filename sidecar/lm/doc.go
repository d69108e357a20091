// Package lm is a listener for clients of LMCache's own cache server: what
// LMCache's lm:// connector speaks.
//
// It owns the protocol and what one connection may cost. It does not own bytes
// and their lives (package cache), sockets (package listener) or settings
// (package sidecar). docs/protocol.md §9 says what is answered to what.
//
// The protocol has no credential: whoever reaches the listener reads and
// writes the values of the one tenant that it was made for.
//
// # Where bytes are
//
// A value is a page of a namespace of its own with one shard. Its slot begins
// with a header that holds the key and what the client said of the value's
// format. Values are read from the socket into their slot and written to the
// socket from it. The first value of a key stays.
//
// # Concurrency
//
// A [Server] may be used by several goroutines at once. Each connection has
// one goroutine, which owns all of it but the socket.
package lm
