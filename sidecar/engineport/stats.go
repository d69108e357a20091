package engineport

import (
	"maps"
	"slices"
	"sort"

	"membrane/cache"
	"membrane/kvwire"
)

// EngineStatus describes one attached engine.
type EngineStatus struct {
	Engine      string  `json:"engine"`
	Tenant      string  `json:"tenant"`
	Namespace   string  `json:"namespace"`
	Form        string  `json:"form"`
	Layout      string  `json:"layout"`
	PageTokens  int     `json:"page_tokens"`
	TPSize      int     `json:"tp_size"`
	PPSize      int     `json:"pp_size"`
	ObjectBytes []int64 `json:"object_bytes,omitempty"` // of each shard; 0 until its worker is here
	Problem     string  `json:"problem,omitempty"`
	// Untranslated says by name why pages that were asked for could not be
	// translated for this engine.
	Untranslated []string `json:"untranslated,omitempty"`
	Connections  []string `json:"connections"`
	Workers      int      `json:"workers"` // ranks that load and store
	Scheduler    bool     `json:"scheduler"`
	// What it got, stored and missed since it came, in pages; a page that
	// several ranks store counts once for each. Missed and refused are by
	// reason.
	HitPages      uint64            `json:"hit_pages"`
	StoredPages   uint64            `json:"stored_pages"`
	MissedPages   map[string]uint64 `json:"missed_pages"`
	RefusedStores map[string]uint64 `json:"refused_stores"`
	Handles       int               `json:"handles"`
	Leases        int               `json:"leases"`
}

// Status describes who is attached.
type Status struct {
	Connections int            `json:"connections"`
	Engines     []EngineStatus `json:"engines"`
	InboxFree   int64          `json:"inbox_free_bytes"`
	Reserved    int64          `json:"reserved_slots"` // of all inboxes together
}

// Status returns who is attached now.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{Connections: len(s.conns), Engines: []EngineStatus{}, InboxFree: s.inboxLeft, Reserved: s.slots.Load()}
	for _, e := range s.engines {
		es := EngineStatus{
			Engine: e.key.name, Tenant: e.key.tenant, Namespace: e.space.Namespace().String(), Form: e.form.String(),
			Layout: e.layout, PageTokens: e.pageTokens,
			TPSize: e.tp, PPSize: e.pp, Problem: e.problem(),
			HitPages: e.hits.Load(), StoredPages: e.stored.Load(), MissedPages: e.missed.nonZero(), RefusedStores: e.refused.nonZero(),
		}
		for i := range e.sizes {
			es.ObjectBytes = append(es.ObjectBytes, e.sizes[i].Load())
		}
		for rank, c := range e.ranks {
			if rank.role != kvwire.RoleScheduler {
				es.Workers++
			}
			es.Scheduler = es.Scheduler || rank.role != kvwire.RoleWorker
			es.Connections = append(es.Connections, string(rank.role)+" "+kvwire.Shard{Index: rank.shard, Count: uint16(e.shards)}.String()+" on "+c.name())
		}
		sort.Strings(es.Connections)
		e.mu.Lock()
		e.endExpired()
		es.Handles, es.Leases = len(e.chains), e.live
		es.Untranslated = slices.Sorted(maps.Values(e.named))
		e.mu.Unlock()
		st.Engines = append(st.Engines, es)
	}
	sort.Slice(st.Engines, func(i, k int) bool {
		a, b := st.Engines[i], st.Engines[k]
		return a.Tenant+"\x00"+a.Engine < b.Tenant+"\x00"+b.Engine
	})
	return st
}

// Counts returns the port's counters.
func (s *Server) Counts() Counts { return s.count.snapshot() }

// CacheCounts returns a cache's counters and gauges under stable names.
func CacheCounts(c *cache.Cache) map[string]any {
	s := c.Stats()
	reasons := func(r cache.ReasonCounts) map[string]uint64 {
		out := make(map[string]uint64)
		for i, v := range r {
			if v > 0 {
				out[kvwire.Reason(i).String()] = v
			}
		}
		return out
	}
	return map[string]any{
		"arena_bytes": c.Arena().Size(), "prefaulted_bytes": c.Arena().Prefaulted(),
		"pages": s.Pages, "objects": s.Objects, "resident_bytes": s.ResidentBytes, "free_bytes": s.FreeBytes,
		"window_bytes": s.WindowBytes, "policy_bytes": s.PolicyBytes, "pinned_bytes": s.PinnedBytes,
		"quarantine_bytes": s.QuarantineBytes, "leases": s.Leases, "pins": s.Pins, "held": s.Held, "spaces": s.Spaces,
		"lookups": s.Lookups, "hits": s.Hits, "misses": reasons(s.Misses), "puts": s.Puts, "returned": s.Returned, "exists": s.Exists,
		"refused": reasons(s.Refused), "evictions": reasons(s.Evictions), "corrupt": s.Corrupt,
		"leases_granted": s.Granted, "leases_expired": s.Expired,
	}
}

// maxStatsEngines is of how many engines an answer to stats tells: it has a
// limit.
const maxStatsEngines = 32

func (c *conn) handleStats([]byte) error {
	engines := c.s.Status().Engines
	shown := make([]EngineStatus, 0, min(len(engines), maxStatsEngines))
	for _, e := range engines {
		if e.Tenant != c.identity.Tenant || len(shown) == maxStatsEngines {
			continue
		}
		// The rest can be as long as a registration makes it.
		e.ObjectBytes, e.Layout, e.Problem = nil, clip(e.Layout), cut(e.Problem)
		e.Connections = e.Connections[:min(len(e.Connections), maxStatsEngines)]
		e.Untranslated = e.Untranslated[:min(len(e.Untranslated), 4)]
		for i := range e.Untranslated {
			e.Untranslated[i] = cut(e.Untranslated[i])
		}
		shown = append(shown, e)
	}
	answer := map[string]any{
		"node": c.s.cfg.Node, "engine_port": c.s.Counts(), "cache": CacheCounts(c.s.cfg.Cache), "engines": shown,
	}
	err := c.answerJSON(answer)
	for err != nil && len(shown) > 0 {
		shown = shown[:len(shown)/2]
		answer["engines"] = shown
		err = c.answerJSON(answer)
	}
	return err
}

func cut(s string) string { return s[:min(len(s), 256)] }
