// Package forms knows in which forms pages of each namespace may be laid out,
// and how a page in one of them is made in the form that an engine reads.
//
// It owns the descriptors that engines here have registered and that peers have
// told of, and for each reader the plans that make its shards out of those of
// another form, or the reason by name why there is none. It does not own the
// arithmetic of layouts (package engines/layout), bytes (package cache), what
// travels (package kvwire) or when pages are translated (package
// sidecar/engineport).
//
// # Concurrency
//
// A [Registry] and its [Reader]s may be used by several goroutines at once.
package forms
