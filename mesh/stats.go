package mesh

import (
	"sync/atomic"

	"membrane/cache"
	"membrane/kvwire"
)

// Stats is a snapshot of the mesh's counters (since start) and gauges.
type Stats struct {
	Fills      uint64             // calls of Fill
	Failures   cache.ReasonCounts // fills that ended before the last page, by reason
	Pulls      uint64             // batch reads sent to peers
	Joined     uint64             // pages that a fill waited for and another had asked for
	Fetched    uint64             // pages that came from peers and were stored
	FetchBytes uint64
	Refused    cache.ReasonCounts // pages that did not come, by reason
	Corrupt    uint64             // objects from peers that failed checksum or authenticator
	Lies       uint64             // answers of peers that broke the protocol
	Follows    uint64             // calls of Follow
	Followed   uint64             // pages that they found at the peer, one by one

	Served      uint64 // pages sent to peers
	ServedBytes uint64
	NotServed   cache.ReasonCounts // pages that peers asked for in vain, by reason

	AuthFailures    uint64 // challenges and address requests that failed, either way
	Refusals        uint64 // connections over the limit of the data port
	BadFrames       uint64 // connections of peers that the data port ended with an error
	DirectoryPulls  uint64 // directory answers received
	DirectoryFull   uint64 // of them, whole filters
	DirectoryServed uint64
	Probes          uint64 // lookups in peers' filters
	FormsAsked      uint64 // times that a peer was asked in what forms it may hold pages
	JoinFailures    uint64
	Rebuilds        uint64 // times that gossip stopped by itself and was started again

	Members        int // alive, this node included
	Peers          int // alive, with a data port
	Down           int // of them, not asked for pages for the moment
	DirectoryBytes int // memory of the peers' filters
	DirectoryPages int // pages that the peers' filters list
	OwnPages       int // pages in this node's own directory
	Unlisted       uint64
	DataConns      int // open connections of peers to us
	Pulling        int // pulls at work now
}

type reasonCounters [kvwire.LastReason + 1]atomic.Uint64

// add counts a reason; one that is not on the list (a peer may be newer)
// counts as peer.
func (r *reasonCounters) add(why kvwire.Reason, n int) {
	switch {
	case why == kvwire.ReasonNone || n <= 0:
	case int(why) >= len(r):
		r[kvwire.ReasonPeer].Add(uint64(n))
	default:
		r[why].Add(uint64(n))
	}
}

func (r *reasonCounters) load() (out cache.ReasonCounts) {
	for i := range r {
		out[i] = r[i].Load()
	}
	return out
}

type counters struct {
	fills, pulls, joined, fetched, fetchBytes, corrupt, lies atomic.Uint64
	follows, followed                                        atomic.Uint64
	served, servedBytes                                      atomic.Uint64
	authFailures, refusals, badFrames                        atomic.Uint64
	directoryPulls, directoryFull, directoryServed           atomic.Uint64
	probes, joinFailures, formsAsked                         atomic.Uint64
	failures, refused, notServed                             reasonCounters
}

// Stats returns the counters and gauges as they are now.
func (m *Mesh) Stats() Stats {
	n := &m.counters
	s := Stats{
		Fills: n.fills.Load(), Failures: n.failures.load(), Pulls: n.pulls.Load(), Joined: n.joined.Load(),
		Fetched: n.fetched.Load(), FetchBytes: n.fetchBytes.Load(), Refused: n.refused.load(),
		Corrupt: n.corrupt.Load(), Lies: n.lies.Load(), Follows: n.follows.Load(), Followed: n.followed.Load(),
		Served: n.served.Load(), ServedBytes: n.servedBytes.Load(), NotServed: n.notServed.load(),
		AuthFailures: n.authFailures.Load(), Refusals: n.refusals.Load(), BadFrames: n.badFrames.Load(),
		DirectoryPulls: n.directoryPulls.Load(), DirectoryFull: n.directoryFull.Load(),
		DirectoryServed: n.directoryServed.Load(), Probes: n.probes.Load(), FormsAsked: n.formsAsked.Load(), JoinFailures: n.joinFailures.Load(),
		Rebuilds: m.gossip.rebuilds.Load(),
	}
	s.OwnPages, s.Unlisted = m.index.pages()
	for _, p := range m.peers.all() {
		s.Peers++
		if p.isDown() {
			s.Down++
		}
		if f := p.directory(); f != nil {
			s.DirectoryBytes += f.bytes()
			s.DirectoryPages += f.len()
		}
	}
	for _, mb := range m.Members() {
		if mb.Status == StatusAlive || mb.Status == StatusSuspect {
			s.Members++
		}
	}
	s.DataConns, s.Pulling = m.data.open(), m.fills.atWork()
	return s
}
