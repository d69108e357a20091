// Package fragments is the public fragment API over the embedded engine: the
// KV of a prompt in windows of 128 tokens, each found by the SHA-256 of its
// bytes.
//
// It owns the windows and their names, prefilling what no node holds, the
// index from payload hash to page, and the fragment's public description. It
// does not own HTTP (package httpapi), the arithmetic (package llama), where
// bytes live (package cache) or how they come from peers (package mesh).
//
// A window is a page of its own namespace with 128 tokens; the last window of
// a prompt may be shorter and has a name of its own. Its hash covers all tokens
// before it, so a window is only ever used behind the prefix that it was
// computed behind.
//
// All methods of [Service] may be called by several goroutines at once. Prompts
// are prefilled one at a time, with all cores; the others wait.
package fragments
