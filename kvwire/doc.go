// Package kvwire says what KV pages are called and how they travel.
//
// It owns the names (namespace, content-hash chain, descriptor and form,
// object key), the checksum and the authenticator of a page, the frames that
// cross every membrane socket, their limits, and the Go client of the engine
// protocol. docs/protocol.md describes the same bytes for other languages.
//
// It does not own where bytes live (package cache), which node holds them
// (package mesh) or what an engine's layout means (package engines).
//
// # Concurrency
//
// Names are plain values. Encoders append to a slice of the caller's and
// decoders return views of their input: a decoded message is valid for as long
// as the bytes it came from. [Conn] and [Client] say for each method what may
// run at the same time.
package kvwire
