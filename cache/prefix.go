package cache

import (
	"time"

	"membrane/kvwire"
)

// Prefix is the longest held prefix of some pages on its way to a lease:
// pinned since they were found, so that nobody evicts them while the next ones
// are fetched, and not checked yet. It belongs to one goroutine and ends with
// Lease or Drop.
type Prefix struct {
	s       *Space
	req     LeaseRequest
	l       *lease // nil when it has ended
	locs    []Location
	began   uint64 // pages born after it were checked since the request began
	fresh   int
	sound   int // leading locations that CheckAhead found right
	trail   trail
	trusted [2]int // pages that Trust vouches for
	made    int    // how many of those fresh does not count

	checked int64
}

// Hold pins the longest prefix of the hashes that is held complete in the form
// and says why the next page is not in it: [kvwire.ReasonPinned] if a cap was
// reached. Locations are appended to dst by [Prefix.Lease], whose memory Hold
// uses already. It counts as a Match of all hashes. An error means a malformed
// request.
func (s *Space) Hold(req LeaseRequest, dst []Location) (Prefix, kvwire.Reason, error) {
	if err := req.check(); err != nil {
		return Prefix{}, kvwire.ReasonNone, err
	}
	p, why := s.hold(req, dst, true)
	c := s.c
	c.counters.lookups.Add(uint64(len(req.Hashes)))
	c.counters.hits.Add(uint64(p.Pages()))
	c.counters.misses.add(why)
	return p, why, nil
}

// Follow goes on with hashes that come after those of Hold, as if it had been
// given them, too. why is what Hold or the Follow before said.
func (p *Prefix) Follow(hashes []kvwire.Hash, why kvwire.Reason) kvwire.Reason {
	if p.l == nil || len(p.l.pages)+len(hashes) > kvwire.MaxBatch {
		return kvwire.ReasonAbsent
	}
	c, before := p.s.c, len(p.l.pages)
	now := p.take(hashes, true, why)
	c.counters.lookups.Add(uint64(len(hashes)))
	c.counters.hits.Add(uint64(len(p.l.pages) - before))
	if why == kvwire.ReasonNone {
		c.counters.misses.add(now)
	}
	return now
}

// CheckAhead checks the pages that are held so far, so that Lease has less to
// check. At a wrong one it stops: Lease will come to it.
func (p *Prefix) CheckAhead() {
	if p.l == nil || !guard.leaseSum() {
		return
	}
	locs := p.locs[len(p.locs)-len(p.l.pages)*p.req.Shards:]
	if bad, _ := p.s.c.firstCorrupt(locs[p.sound:], nil); bad >= 0 {
		p.sound += bad
		return
	}
	p.sound = len(locs)
}

// Sound returns how many leading pages CheckAhead has checked.
func (p *Prefix) Sound() int { return p.sound / max(p.req.Shards, 1) }

// hold is Hold without its counters. With touch it tells the policy of all
// hashes.
func (s *Space) hold(req LeaseRequest, dst []Location, touch bool) (Prefix, kvwire.Reason) {
	c := s.c
	p := Prefix{s: s, req: req, locs: dst}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return p, kvwire.ReasonDraining
	}
	p.l = c.leases.get()
	p.l.form, p.l.shards, p.l.holders, p.l.left = req.Form, req.Shards, req.Holders, req.Holders
	p.began = c.born
	c.tick++
	c.mu.Unlock()
	why := p.take(req.Hashes, touch, kvwire.ReasonNone)
	return p, why
}

// take pins pages as far as they are held and the caps allow, a step at a time
// so that others get the lock in between. It pins none if why says that one
// before them is missing.
func (p *Prefix) take(hashes []kvwire.Hash, touch bool, why kvwire.Reason) kvwire.Reason {
	s, c := p.s, p.s.c
	var keys [matchStep]uint64
	for len(hashes) > 0 && (touch || why == kvwire.ReasonNone) {
		step := hashes[:min(matchStep, len(hashes))]
		hashes = hashes[len(step):]
		n := 0
		c.mu.Lock()
		if why == kvwire.ReasonNone {
			first := len(p.l.pages)
			cl := c.leases.clients[p.req.Client]
			if cl == nil { // it has no other lease
				cl = &client{}
			}
			p.locs, why = s.grant(p.l, cl, step, p.locs)
			for _, pg := range p.l.pages[first:] {
				keys[n] = pg.key
				n++
				if pg.born > p.began {
					p.fresh++
				}
				c.asked(&p.trail, pg, pg.key)
			}
		}
		held := n
		if touch {
			for ; n < len(step); n++ {
				keys[n] = s.key(&step[n])
			}
			c.askedRest(s, &p.trail, step[held:], keys[held:n])
		}
		c.mu.Unlock()
		if touch {
			c.touches.addKeys(0, keys[:n])
		}
	}
	return why
}

// Pages returns how many pages are held.
func (p *Prefix) Pages() int {
	if p.l == nil {
		return 0
	}
	return len(p.l.pages)
}

// Fresh returns how many of them came into the cache after Hold began, or were
// made there: their bytes were checked in place as they came, and Lease does
// not check them once more.
func (p *Prefix) Fresh() int { return p.fresh + p.made }

// Trust says that the pages from one index up to another, which Extend has
// added, were made by [Space.Convert] since Hold began, so that Lease does not
// check them once more. It holds for one run of pages: one that does not follow
// the last replaces it.
func (p *Prefix) Trust(from, to int) {
	if to > p.Pages() || from >= to {
		return
	}
	if from != p.trusted[1] || p.made == 0 {
		p.trusted, p.made = [2]int{from, from}, 0
	}
	p.trusted[1] = to
	for _, pg := range p.l.pages[from:to] {
		if pg.born <= p.began {
			p.made++
		}
	}
}

// Checked returns how many bytes Lease checked.
func (p *Prefix) Checked() int64 { return p.checked }

// Extend goes on with further hashes, the next ones after the pages that are
// held, and says why it stopped, as Hold does. It counts no lookup.
func (p *Prefix) Extend(hashes []kvwire.Hash) kvwire.Reason {
	if p.l == nil || len(p.l.pages)+len(hashes) > kvwire.MaxBatch {
		return kvwire.ReasonAbsent
	}
	return p.take(hashes, false, kvwire.ReasonNone)
}

// Drop lets go of the pages. It does nothing after Lease or Drop.
func (p *Prefix) Drop() {
	if p.l == nil {
		return
	}
	c := p.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	p.locs = p.locs[:len(p.locs)-len(p.l.pages)*p.req.Shards]
	c.discard(p.l)
	p.l = nil
}

// discard lets go of the pages of a lease that nobody heard of; it needs c.mu.
func (c *Cache) discard(l *lease) {
	c.shorten(l, 0)
	c.leases.put(l)
	if c.unsettled() {
		c.wake()
	}
}

// Lease checks the first pages, at most so many, makes a lease of them and
// ends the prefix. The reason is [kvwire.ReasonCorrupt] when a page failed its
// checksum and the lease ends before it, and [kvwire.ReasonNone] otherwise.
// Without any page there is no lease and its ID is 0. See [Space.Lease].
func (p *Prefix) Lease(most int) (Lease, []Location, kvwire.Reason) {
	if p.l == nil {
		return Lease{}, p.locs, kvwire.ReasonNone
	}
	c, l := p.s.c, p.l
	base := len(p.locs) - len(l.pages)*p.req.Shards
	dst := p.locs
	p.l = nil

	c.mu.Lock()
	if n := max(most, 0); n < len(l.pages) {
		c.shorten(l, n)
		dst = dst[:base+n*p.req.Shards]
	}
	if len(l.pages) == 0 || !c.enter() {
		why := kvwire.ReasonNone
		if c.closed {
			why = c.miss(kvwire.ReasonDraining)
		}
		c.discard(l)
		c.mu.Unlock()
		return Lease{}, dst[:base], why
	}
	defer c.inside.Done()
	l.expires = time.Now().Add(p.req.TTL)
	c.register(l, c.leases.client(p.req.Client))
	l.busy++
	c.mu.Unlock()

	why := kvwire.ReasonNone
	var fresh func(int) bool
	if p.fresh > 0 || p.sound > 0 || p.trusted[1] > 0 {
		fresh = func(i int) bool {
			page := i / p.req.Shards
			return i < p.sound || p.trusted[0] <= page && page < p.trusted[1] || l.pages[page].born > p.began
		}
	}
	bad := -1
	if guard.leaseSum() {
		bad, p.checked = c.firstCorrupt(dst[base:], fresh)
	}
	if bad >= 0 {
		why = kvwire.ReasonCorrupt
		c.mu.Lock()
		n := bad / p.req.Shards
		c.condemn(l.pages[n], p.req.Form, bad%p.req.Shards)
		c.shorten(l, n)
		dst = dst[:base+n*p.req.Shards]
	} else {
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	out := Lease{ID: l.id, Pages: len(l.pages), Expires: l.expires}
	if out.Pages == 0 {
		c.end(l, endedEmpty)
	}
	ended := l.ended
	c.idle(l)
	switch {
	case out.Pages == 0:
		out = Lease{}
	case ended != live:
		out, dst, why = Lease{}, dst[:base], kvwire.ReasonExpired
	default:
		c.counters.granted.Add(1)
	}
	return out, dst, c.miss(why)
}
