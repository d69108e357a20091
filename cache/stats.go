package cache

import (
	"sync/atomic"

	"membrane/kvwire"
)

// ReasonCounts is a counter for each [kvwire.Reason], indexed by it.
type ReasonCounts [kvwire.LastReason + 1]uint64

// Total returns the sum over all reasons.
func (r *ReasonCounts) Total() (n uint64) {
	for _, v := range r {
		n += v
	}
	return n
}

// Stats is a snapshot of the cache's counters (since start) and gauges.
type Stats struct {
	Lookups   uint64       // hashes asked for by Match
	Hits      uint64       // of them, leading ones that were held
	Misses    ReasonCounts // matches, leases, pins and views that were cut short
	Puts      uint64       // objects stored
	Returned  uint64       // pages stored that had made room for others not long before
	Exists    uint64       // stores that moved nothing or were discarded: first writer wins
	Refused   ReasonCounts // stores refused
	Evictions ReasonCounts // pages that left the table, corrupt and dropped ones included
	Corrupt   uint64       // resident objects that failed their checksum
	Verified  uint64       // checksums computed to check bytes
	Views     uint64
	Granted   uint64 // leases granted
	Expired   uint64 // leases and pins that reached their end

	Waits       uint64 // stores that had to wait for a slot
	Reprieves   uint64 // victims that were in use and went back to the window
	LostSets    uint64 // offers that the policy dropped under load
	LostTouches uint64 // lookups that the policy was not told about
	Evacuations uint64 // runs of the arena emptied for an object of another size

	Pages           int64
	Objects         int64
	ResidentBytes   int64 // slots of pages in the table
	WindowBytes     int64
	PolicyBytes     int64
	PinnedBytes     int64 // pages under leases and pins
	QuarantineBytes int64
	FreeBytes       int64 // in no slot
	Leases          int64
	Pins            int64
	Held            int64 // views and slots that callers hold
	Spaces          int64
	GoalBytes       int64 // what the window may hold before it gives to the policy
}

type reasonCounters [kvwire.LastReason + 1]atomic.Uint64

// add counts a reason; ReasonNone is not one.
func (r *reasonCounters) add(why kvwire.Reason) {
	if why != kvwire.ReasonNone {
		r[why].Add(1)
	}
}

func (r *reasonCounters) load() (out ReasonCounts) {
	for i := range r {
		out[i] = r[i].Load()
	}
	return out
}

type counters struct {
	lookups, hits, puts, exists, corrupt, verified, views, granted, expired atomic.Uint64
	waits, reprieves, lostSets, evacuations, returned                       atomic.Uint64
	misses, refused, evictions                                              reasonCounters
}

// Stats returns the counters and gauges as they are now.
func (c *Cache) Stats() Stats {
	n := &c.counters
	s := Stats{
		Lookups: n.lookups.Load(), Hits: n.hits.Load(), Misses: n.misses.load(),
		Puts: n.puts.Load(), Returned: n.returned.Load(), Exists: n.exists.Load(), Refused: n.refused.load(),
		Evictions: n.evictions.load(), Corrupt: n.corrupt.Load(), Verified: n.verified.Load(),
		Views: n.views.Load(), Granted: n.granted.Load(), Expired: n.expired.Load(),
		Waits: n.waits.Load(), Reprieves: n.reprieves.Load(), LostSets: n.lostSets.Load(),
		Evacuations: n.evacuations.Load(),
	}
	s.LostTouches = c.touches.lost()
	for i := range c.mu.stripes {
		s.Lookups += c.mu.stripes[i].lookups.Load()
		s.Hits += c.mu.stripes[i].hits.Load()
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	s.Pages, s.Objects, s.ResidentBytes = c.pages, c.objects, c.resident
	s.WindowBytes, s.PolicyBytes, s.PinnedBytes = c.window.bytes, c.policyBytes, c.pinned
	s.QuarantineBytes, s.FreeBytes = c.quarantine.bytes, c.alloc.free()
	s.GoalBytes = c.windowGoal
	s.Pins = int64(c.leases.pins)
	s.Leases = int64(len(c.leases.live)) - s.Pins
	s.Held, s.Spaces = int64(c.open), int64(len(c.spaces))
	return s
}
