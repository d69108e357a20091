package sidecar

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/engineport"
	"membrane/sidecar/httpapi"
)

// peers describes the members of the mesh for people.
func (n *Sidecar) peers() httpapi.Peers {
	out := httpapi.Peers{Peers: []httpapi.Peer{}}
	for _, m := range n.mesh.Members() {
		p := describe(m)
		if m.Self {
			n.describeRole(&p)
			out.Self = p
		} else {
			if q, ok := n.queues.of(m.Name); ok {
				p.Queues = &httpapi.Queues{Prefill: q.Prefill, Decode: q.Decode}
			}
			out.Peers = append(out.Peers, p)
		}
	}
	return out
}

func describe(m mesh.Member) httpapi.Peer {
	host, port, _ := net.SplitHostPort(m.HTTPAddr)
	number, _ := strconv.Atoi(port)
	id := m.Tags[tagNodeID]
	if id == "" {
		id = m.Name
	}
	p := httpapi.Peer{
		NodeID: id, Host: host, Port: number, Healthy: m.Status == mesh.StatusAlive && !m.Down,
		Suspect: m.Status == mesh.StatusSuspect, Status: string(m.Status), Name: m.Name, Gossip: m.GossipAddr, Data: m.DataAddr,
		Role: m.Role, Version: m.Version, RTTMS: float64(m.RTT.Microseconds()) / 1000, Pages: m.Pages,
	}
	p.RoleAuto, p.RoleWhy = m.Tags[tagAuto] != "", m.Tags[tagRoleWhy]
	if s, err := strconv.ParseInt(m.Tags[tagRoleSince], 10, 64); err == nil {
		p.RoleSince = time.Unix(s, 0).UTC().Format(time.RFC3339)
	}
	return p
}

// status is the answer of /statusz.
func (n *Sidecar) status() any {
	return map[string]any{
		"node_id": n.settings.NodeID, "name": n.mesh.Name(), "version": n.version, "uptime_s": int(time.Since(n.started).Seconds()),
		"addresses": n.Addresses(), "in_flight": n.inFlight(), "role": n.roleStatus(),
		"engines": n.engines.Status(), "served": n.engines.Counts(),
		"cache":     engineport.CacheCounts(n.cache),
		"fragments": n.fragments.Len(),
		"mesh":      map[string]any{"members": n.peers(), "counters": meshCounts(n.mesh.Stats())},
		"settings":  map[string]any{"memory": n.settings.Memory.String(), "page_tokens": n.settings.PageTokens, "from": n.settings.Sources()},
	}
}

// summary is the answer of /metrics.json, which is the predecessor's.
func (n *Sidecar) summary() any {
	s := n.cache.Stats()
	limit := n.cache.Arena().Size()
	return map[string]any{
		"node_id": n.settings.NodeID, "memory_used_bytes": s.ResidentBytes, "memory_limit_bytes": limit,
		"fragment_count": n.fragments.Len(), "primary_count": n.fragments.Len(), "load": float64(s.ResidentBytes) / float64(limit),
		"backend_name": "llama",
	}
}

// number is one metric without labels.
type number struct {
	name  string
	value uint64
}

func gauge(w io.Writer, list ...number) {
	for _, g := range list {
		metrics.WriteGaugeUint64(w, g.name, g.value)
	}
}

func counter(w io.Writer, list ...number) {
	for _, c := range list {
		metrics.WriteCounterUint64(w, c.name, c.value)
	}
}

// byReason writes a counter for each reason that can occur there, zeros too.
func byReason(w io.Writer, name string, counts cache.ReasonCounts, from, to kvwire.Reason) {
	for _, r := range kvwire.Reasons() {
		if v := counts[r]; r >= from && r < to || v > 0 {
			metrics.WriteCounterUint64(w, fmt.Sprintf(`%s{reason=%q}`, name, r), v)
		}
	}
}

func (n *Sidecar) writeCacheMetrics(w io.Writer) {
	s := n.cache.Stats()
	arena := uint64(n.cache.Arena().Size())
	gauge(w,
		number{"membrane_cache_pages", uint64(s.Pages)}, number{"membrane_cache_objects", uint64(s.Objects)},
		number{"membrane_cache_arena_bytes", arena}, number{"membrane_cache_prefaulted_bytes", uint64(n.cache.Arena().Prefaulted())},
		number{"membrane_cache_resident_bytes", uint64(s.ResidentBytes)}, number{"membrane_cache_free_bytes", uint64(s.FreeBytes)},
		number{"membrane_cache_window_bytes", uint64(s.WindowBytes)}, number{"membrane_cache_policy_bytes", uint64(s.PolicyBytes)},
		number{"membrane_cache_pinned_bytes", uint64(s.PinnedBytes)}, number{"membrane_cache_quarantine_bytes", uint64(s.QuarantineBytes)},
		number{"membrane_cache_leases", uint64(s.Leases)}, number{"membrane_cache_pins", uint64(s.Pins)},
		number{"membrane_memory_used_bytes", uint64(s.ResidentBytes)}, number{"membrane_memory_limit_bytes", arena},
	)
	counter(w,
		number{"membrane_cache_lookups_total", s.Lookups}, number{"membrane_cache_hits_total", s.Hits},
		number{"membrane_cache_puts_total", s.Puts}, number{"membrane_cache_returned_pages_total", s.Returned}, number{"membrane_cache_exists_total", s.Exists},
		number{"membrane_cache_verified_total", s.Verified}, number{"membrane_cache_leases_granted_total", s.Granted},
		number{"membrane_cache_leases_expired_total", s.Expired}, number{"membrane_cache_waits_total", s.Waits},
		number{`membrane_corrupt_total{where="arena"}`, s.Corrupt}, number{`membrane_corrupt_total{where="peer"}`, n.mesh.Stats().Corrupt},
	)
	byReason(w, "membrane_cache_misses_total", s.Misses, kvwire.ReasonAbsent, kvwire.ReasonOverBudget)
	byReason(w, "membrane_cache_refused_total", s.Refused, kvwire.ReasonOverBudget, kvwire.ReasonRejected)
	byReason(w, "membrane_evictions_total", s.Evictions, kvwire.ReasonRejected, kvwire.LastReason+1)
}

// meshCounts are the mesh's counters and gauges by the names of their metrics.
func meshCounts(s mesh.Stats) map[string]uint64 {
	out := make(map[string]uint64)
	gauges, counters := meshNumbers(s)
	for _, n := range append(gauges, counters...) {
		out[n.name] = n.value
	}
	return out
}

func meshNumbers(s mesh.Stats) (gauges, counters []number) {
	gauges = []number{
		{"membrane_mesh_members", uint64(s.Members)},
		{"membrane_peers_total", uint64(s.Peers)},
		{"membrane_peers_healthy", uint64(s.Peers - s.Down)},
		{"membrane_directory_pages", uint64(s.DirectoryPages)},
		{"membrane_directory_bytes", uint64(s.DirectoryBytes)},
		{"membrane_directory_own_pages", uint64(s.OwnPages)},
		{"membrane_peer_connections", uint64(s.DataConns)},
		{"membrane_peer_pulls", uint64(s.Pulling)},
	}
	counters = []number{
		{"membrane_fills_total", s.Fills},
		{"membrane_peer_pulls_total", s.Pulls},
		{"membrane_peer_pulls_joined_total", s.Joined},
		{"membrane_peer_fetched_pages_total", s.Fetched},
		{"membrane_peer_fetched_bytes_total", s.FetchBytes},
		{"membrane_follows_total", s.Follows},
		{"membrane_followed_pages_total", s.Followed},
		{"membrane_peer_served_pages_total", s.Served},
		{"membrane_peer_served_bytes_total", s.ServedBytes},
		{"membrane_peer_lies_total", s.Lies},
		{"membrane_peer_auth_failures_total", s.AuthFailures},
		{"membrane_peer_connections_refused_total", s.Refusals},
		{"membrane_peer_bad_frames_total", s.BadFrames},
		{"membrane_directory_pulls_total", s.DirectoryPulls},
		{"membrane_directory_full_pulls_total", s.DirectoryFull},
		{"membrane_directory_served_total", s.DirectoryServed},
		{"membrane_directory_probes_total", s.Probes},
		{"membrane_peer_forms_asked_total", s.FormsAsked},
		{"membrane_join_failures_total", s.JoinFailures},
		{"membrane_gossip_rebuilds_total", s.Rebuilds},
	}
	return gauges, counters
}

func (n *Sidecar) writeMeshMetrics(w io.Writer) {
	s := n.mesh.Stats()
	gauges, counters := meshNumbers(s)
	gauge(w, gauges...)
	counter(w, counters...)
	byReason(w, "membrane_fill_misses_total", s.Failures, kvwire.ReasonAbsent, kvwire.ReasonOverBudget)
	byReason(w, "membrane_peer_refused_pages_total", s.Refused, kvwire.ReasonAbsent, kvwire.ReasonOverBudget)
	byReason(w, "membrane_peer_not_served_pages_total", s.NotServed, kvwire.ReasonAbsent, kvwire.ReasonOverBudget)
}
