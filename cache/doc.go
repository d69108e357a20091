// Package cache holds the bytes of KV pages and decides how long they live.
//
// It owns the arena (sealed shared memory that engines read in place), the
// slots in it, the table of pages, the policy that picks who leaves, leases
// and pins, quarantine, and the feed of changes that indices follow.
//
// It does not own names and frames (package kvwire), other nodes (package
// mesh), or sockets, tenants and time limits of requests (package sidecar).
//
// # The life of a page
//
// A page is every shard of one run of tokens, in every form that somebody
// stored. It is one unit of eviction and of cost, and it is offered in a form
// only when all shards of that form are here. The table is the truth of what
// is here. A new page enters the recency window; the oldest pages of the
// window are offered to the admission policy (ristretto), which keeps them,
// refuses them or names others to leave. Whatever leaves is counted under a
// reason. A page that is leased, pinned or viewed is never freed: it returns
// to the window instead.
//
// # Concurrency
//
// All methods of [Cache], [Space] and [Arena] may be called by several
// goroutines at once. A [Slot] and a [View] belong to one goroutine at a time.
// One goroutine of the cache's own moves pages between window and policy,
// evicts, and ends expired leases; a second one delivers the change feed.
// Checksums are computed and bytes are copied outside every lock.
package cache
