// Package listener is what the listeners for clients that store and read whole
// values have in common: accepting them, within limits, and moving values
// between their sockets and the arena.
//
// It owns no protocol, no commands and no credentials: packages resp and lm do.
//
// A [Listener] may be used by several goroutines at once. A [Sock], a [Reader]
// and what they read into belong to one goroutine; [Sock.Shut] may be called
// by others.
package listener
