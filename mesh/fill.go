package mesh

import (
	"context"
	"sync"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// FillRequest names the pages of one prefix, first page first.
type FillRequest struct {
	// Space is where the pages belong, here and at the peers.
	Space *cache.Space
	// Form is the only form that is asked for.
	Form kvwire.Form
	// Shards is how many shards a page has in that form.
	Shards int
	// ObjectBytes is the length of each shard's object, in bytes, where the
	// caller knows it; nil: all pages must be as long as the first.
	ObjectBytes []int64
	// Hashes are the pages; at most [kvwire.MaxBatch].
	Hashes []kvwire.Hash
	// From names a peer that is known to hold the pages, whatever its directory
	// says: it may have made them a moment ago. "" for none.
	From string
}

// maxStrikes is how often one fill asks a peer again that ran out of time
// while the fill has some left.
const maxStrikes = 3

// maxProbes is how often one fill looks into the directory of one peer.
const maxProbes = 64

// Fill fetches what is missing of a prefix from peers into the local cache. It
// returns how many leading pages were held here when it last looked, by its
// own work, another fill's or before, and why it stopped there:
// [kvwire.ReasonNone] when none is missing. It returns by ctx's deadline, or
// after Config.FillTimeout when ctx has none, and keeps what came before.
//
// Pages that nobody's directory lists cost no message. Two fills of the same
// page share one transfer; it goes on while at least one of them waits.
func (m *Mesh) Fill(ctx context.Context, req FillRequest) (int, kvwire.Reason) {
	m.counters.fills.Add(1)
	n, why := m.fill(ctx, req)
	m.counters.failures.add(why, 1)
	return n, why
}

func (m *Mesh) fill(ctx context.Context, req FillRequest) (int, kvwire.Reason) {
	if req.Shards < 1 || req.Shards > kvwire.MaxShards || req.ObjectBytes != nil && len(req.ObjectBytes) != req.Shards {
		return 0, kvwire.ReasonLayout
	}
	req.Hashes = req.Hashes[:min(len(req.Hashes), kvwire.MaxBatch)]
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, m.cfg.FillTimeout)
		defer cancel()
	}
	if !guard.fillDeadline() {
		until, _ := ctx.Deadline()
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(context.WithoutCancel(ctx), until.Add(time.Second))
		defer cancel()
	}
	c := &call{m: m, req: req, digests: make([]uint64, len(req.Hashes)), pulls: make(map[*pull]struct{}), strikes: make(map[string]int), probes: make(map[string]int)}
	defer c.leave()
	why := kvwire.ReasonAbsent
	for pos := 0; ; {
		for pos < len(req.Hashes) && req.Space.Has(req.Form, req.Hashes[pos]) {
			pos++
		}
		switch {
		case pos == len(req.Hashes):
			return pos, kvwire.ReasonNone
		case m.closing.Load():
			return pos, kvwire.ReasonDraining
		case ctx.Err() != nil:
			return pos, kvwire.ReasonDeadline
		}
		deadline, _ := ctx.Deadline()
		flights := c.plan(pos, deadline)
		if len(flights) == 0 {
			return pos, why
		}
		for _, f := range flights {
			if f != nil { // else it was held when the plan was made
				select {
				case <-f.done:
				case <-ctx.Done():
					return pos, kvwire.ReasonDeadline
				}
				if f.why != kvwire.ReasonNone {
					why = f.why
					if f.local {
						return pos, why // no other peer would change it
					}
					c.strike(f)
					break
				}
			}
			pos++
		}
	}
}

// call is one Fill at work.
type call struct {
	m       *Mesh
	req     FillRequest
	digests []uint64 // 0: not computed yet
	pulls   map[*pull]struct{}
	strikes map[string]int // by peer; maxStrikes excludes it from this call
	probes  map[string]int // by peer, so far
}

func (c *call) strike(f *flight) {
	if f.why == kvwire.ReasonDeadline {
		c.strikes[f.pull.peer.name]++ // it had its request's deadline, not ours
		return
	}
	c.strikes[f.pull.peer.name] = maxStrikes
}

func (c *call) digest(i int) uint64 {
	if c.digests[i] == 0 {
		key := kvwire.PageKey{Tenant: c.req.Space.Tenant(), Namespace: c.req.Space.Namespace(), Hash: c.req.Hashes[i]}
		c.digests[i] = kvwire.DirectoryDigest(key, c.req.Form)
	}
	return c.digests[i]
}

// candidate returns the peer that seems to hold the longest run of pages from
// pos on, that run, and whether another could stand in for the first page.
func (c *call) candidate(pos int) (best *peer, run int, another bool) {
	for _, p := range c.m.peers.all() {
		if c.strikes[p.name] >= maxStrikes || p.isDown() {
			continue
		}
		n := c.run(p, pos)
		if n == 0 {
			continue
		}
		another = another || best != nil
		if n > run || n == run && p.pulls.Load() < best.pulls.Load() {
			best, run = p, n
		}
	}
	return best, run, another
}

// run returns how many pages from pos on the peer seems to hold.
func (c *call) run(p *peer, pos int) int {
	if p.name == c.req.From {
		return len(c.req.Hashes) - pos
	}
	f := p.directory()
	if f == nil {
		return 0
	}
	n, probes := gallop(f.has, c.digest, pos, len(c.req.Hashes), maxProbes-c.probes[p.name])
	c.probes[p.name] += probes
	c.m.counters.probes.Add(uint64(probes))
	return n
}

// gallop returns how many digests from pos on, up to end, are listed, as far
// as doubling steps and then halving ones tell: about 2 log2(end-pos) probes.
// When the budget of probes is spent, it returns what it knows.
func gallop(has func(uint64) bool, digest func(int) uint64, pos, end, budget int) (run, probes int) {
	probe := func(i int) bool {
		probes++
		return has(digest(pos + i))
	}
	if pos >= end || budget < 1 || !probe(0) {
		return 0, probes
	}
	held, missing := 0, end-pos // offsets: known to be listed, first known not to be
	for step := 1; held+step < missing && probes < budget; step *= 2 {
		if !probe(held + step) {
			missing = held + step
			break
		}
		held += step
	}
	for held+1 < missing && probes < budget {
		if mid := (held + missing) / 2; probe(mid) {
			held = mid
		} else {
			missing = mid
		}
	}
	return held + 1, probes
}

// plan returns a flight for each page from pos on that is under way or is
// asked for now, nil for those that are held. It is empty when nobody is known
// to hold the page at pos.
func (c *call) plan(pos int, deadline time.Time) []*flight {
	best, run, another := c.candidate(pos)
	fs := c.m.fills
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.closed {
		return nil
	}
	var flights []*flight
	var mine *pull
	for i := pos; i < len(c.req.Hashes); i++ {
		key := flightKey{c.req.Space, c.req.Form, c.req.Hashes[i]}
		if f := fs.flights[key]; f != nil {
			c.join(f.pull, deadline)
			c.m.counters.joined.Add(1)
			flights = append(flights, f)
			continue
		}
		if i-pos >= run {
			break
		}
		// A page is entered into the cache before its flight ends, so one of
		// the two knows of it.
		if c.req.Space.Has(c.req.Form, c.req.Hashes[i]) {
			flights = append(flights, nil)
			continue
		}
		if mine == nil {
			mine = newPull(fs, c.req, best, deadline)
			c.join(mine, deadline)
		}
		f := &flight{done: make(chan struct{}), pull: mine}
		fs.flights[key] = f
		mine.flights = append(mine.flights, f)
		mine.hashes = append(mine.hashes, c.req.Hashes[i])
		flights = append(flights, f)
	}
	if mine != nil {
		if another {
			mine.stall = max(time.Until(deadline)/2, time.Millisecond)
		}
		fs.atWorkNow++
		fs.wg.Go(mine.run)
	}
	return flights
}

// join makes the call a waiter of p, once. It needs fills.mu.
func (c *call) join(p *pull, deadline time.Time) {
	if _, ok := c.pulls[p]; ok || p.ended {
		return
	}
	c.pulls[p] = struct{}{}
	p.waiters++
	if deadline.After(p.deadline) {
		p.deadline = deadline
	}
}

// leave ends the call's waiting; a pull that nobody waits for is cancelled.
func (c *call) leave() {
	fs := c.m.fills
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for p := range c.pulls {
		if p.waiters--; p.waiters > 0 || p.landed || p.ended {
			continue
		}
		if time.Now().Before(p.deadline) {
			p.cancel(errAbandoned)
		} else {
			p.cancel(errPullDeadline)
		}
	}
}

// fills is the transfers at work.
type fills struct {
	m    *Mesh
	room chan struct{} // one token for each pull that may talk to a peer
	wg   sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	flights   map[flightKey]*flight
	atWorkNow int
}

type flightKey struct {
	space *cache.Space
	form  kvwire.Form
	hash  kvwire.Hash
}

// flight is one page on its way.
type flight struct {
	pull *pull
	done chan struct{} // closed when why and local are set
	why  kvwire.Reason
	// local: it was refused here, whoever sent it.
	local bool
}

func newFills(m *Mesh) *fills {
	return &fills{m: m, room: make(chan struct{}, m.cfg.MaxFills), flights: make(map[flightKey]*flight)}
}

func (fs *fills) atWork() int {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.atWorkNow
}

// close waits for the pulls, which the end of their peers has cancelled.
func (fs *fills) close() {
	fs.mu.Lock()
	fs.closed = true
	fs.mu.Unlock()
	fs.wg.Wait()
}
