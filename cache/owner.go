package cache

import (
	"math"
	"time"

	"membrane/kvwire"
)

// run is the owner: it alone talks to the policy, evicts and ends expired
// leases.
func (c *Cache) run() {
	defer close(c.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var w workspace
	for {
		timer.Reset(c.expire(time.Now()))
		select {
		case <-c.stop:
			c.endAll()
			c.policy.close()
			return
		case batch := <-c.touches.full:
			c.touches.learn(batch, c.learn)
		case <-c.kick:
			c.balance(&w)
		case <-timer.C:
		}
	}
}

// learn tells policy and window of lookups.
func (c *Cache) learn(batch []lookup) {
	for i := range batch {
		c.policy.touch(batch[i].key)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tick++
	for i := range batch {
		if p := batch[i].page; p != nil {
			c.use(p)
		}
	}
}

// workspace is the owner's memory between rounds.
type workspace struct {
	batch    []offer
	lost     []entry
	removed  []uint64
	verdicts []verdict
}

// offer is a page on its way from the window to the policy.
type offer struct {
	entry
	key  uint64
	cost int64
}

// unsettled reports whether the owner has something to do; it needs c.mu.
func (c *Cache) unsettled() bool {
	return len(c.waiting) > 0 || len(c.removed) > 0 || c.window.bytes > c.windowGoal || c.alloc.free() < c.reserve
}

// maxBatch bounds how long the owner holds the lock, in pages.
const maxBatch = 512

// maxPressed is how often the policy is asked for room for a waiting store
// although enough bytes are free.
const maxPressed = 4

// crumbs is the part of the budget that may be free beside the reserve and of no
// use to a store that waits, so that the policy is asked for more: where it is
// larger, what the policy lets go of is as useless, and all would go that way.
const crumbs = 1. / 32

// balance moves the oldest pages of the window into the policy until the
// window has its size, the reserve is free and no store waits. Each page of
// the window moves at most once: those that come back are in use.
func (c *Cache) balance(w *workspace) {
	c.touches.drain(c.learn)
	moves, evacuations := -1, -1
	pressed := 0
	held := int64(-1) // what the policy held before it was made to shrink
	for {
		c.mu.Lock()
		c.serve()
		if moves < 0 {
			moves, evacuations = c.window.count+maxBatch, len(c.waiting)
		}
		need, want := c.shortage(), c.window.bytes-c.windowGoal
		if len(c.waiting) > 0 && pressed < maxPressed && c.alloc.free() < c.reserve+c.cfg.part(crumbs) {
			// Some of what is free may be too small for any slot, so that the
			// policy must be asked before a run of the arena is emptied.
			need = max(need, c.alloc.slotSize(c.waiting[0].size))
		}
		shrink := want <= 0 && need > 0 && c.policyBytes > c.room-c.windowGoal && c.policyBytes != held && moves > 0
		held = c.policyBytes
		if want <= 0 && !shrink {
			want = need
		}
		var maxCost int64
		if shrink {
			maxCost = max(1, c.policyBytes-need)
			w.batch = w.batch[:0]
			moves--
		} else {
			maxCost = c.takeBatch(w, want, need, min(moves, maxBatch))
			moves -= len(w.batch)
			held = -1
			pressed++
		}
		again := shrink || len(w.batch) > 0
		if !again && evacuations > 0 && len(c.waiting) > 0 {
			// Enough may be free, but in slots of other sizes.
			evacuations--
			again = c.evacuate(c.waiting[0].size)
			c.serve()
		}
		w.removed, c.removed = c.removed, w.removed[:0]
		c.mu.Unlock()

		for _, key := range w.removed {
			c.policy.del(key)
		}
		if !again {
			return
		}
		c.offer(w, maxCost, shrink)
	}
}

// shortage returns by how many bytes what is free falls short of the reserve
// and the waiting stores; negative when more is free. It needs c.mu.
func (c *Cache) shortage() int64 {
	need := c.reserve - c.alloc.free()
	for _, w := range c.waiting {
		need += c.alloc.slotSize(w.size)
	}
	return need
}

// takeBatch moves up to most pages, of want bytes or a little more, out of
// the window into w.batch, and returns what the policy may then hold so that
// it lets go of need bytes in exchange. It needs c.mu.
func (c *Cache) takeBatch(w *workspace, want, need int64, most int) (maxCost int64) {
	w.batch = w.batch[:0]
	for taken := int64(0); taken < want && len(w.batch) < most && c.window.tail != nil; {
		if taken >= need && c.window.head == c.window.tail {
			break // larger than the window is to be: the policy has no room for it
		}
		p := c.oldest()
		c.window.remove(p)
		p.place = inPolicy
		p.gen++
		c.policyBytes += p.bytes
		taken += p.bytes
		w.batch = append(w.batch, offer{entry{p, p.gen}, p.key, p.bytes})
	}
	return max(1, min(c.room-c.windowGoal, c.policyBytes-need))
}

// offer gives w.batch to the policy and carries out what it decides. With
// shrink it makes the policy keep to its limit without a page to offer.
func (c *Cache) offer(w *workspace, maxCost int64, shrink bool) {
	w.lost = w.lost[:0]
	c.policy.limit(maxCost)
	for _, o := range w.batch {
		if !c.policy.add(o.key, o.entry, o.cost) {
			w.lost = append(w.lost, o.entry)
		}
	}
	if shrink {
		c.policy.shrink()
	}
	c.policy.settle()
	w.verdicts = c.policy.verdicts().take(w.verdicts)

	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range w.lost {
		if e.current() {
			c.counters.lostSets.Add(1)
			c.policyBytes -= e.page.bytes
			c.window.pushOldest(e.page)
		}
	}
	for _, v := range w.verdicts {
		c.carryOut(v)
	}
	if len(w.lost) > 0 {
		c.wake() // nothing else may come that would repeat the offer
	}
	c.serve()
	clear(w.batch)
	clear(w.lost)
	clear(w.verdicts)
}

// current reports whether the page is still in the stay that e names.
func (e entry) current() bool { return e.page.gen == e.gen && e.page.place == inPolicy }

// carryOut evicts the page that the policy let go of, or of those in the policy
// that are of no use without it the last; the page itself is then the next one
// to be offered. If they are in use, or pages in the window need it, it goes
// back to the window. It needs c.mu.
func (c *Cache) carryOut(v verdict) {
	if !v.current() {
		return
	}
	p := v.page
	c.policyBytes -= p.bytes
	last := p
	for {
		k := last.childIn(inPolicy)
		if k == nil {
			if k = last.childIn(inWindow); k == nil {
				break
			}
			if c.needed(last) {
				last = nil
				break
			}
		}
		last = k
	}
	switch {
	case last == nil || !mayEvict(last) || !mayEvict(p):
		c.pushNewest(p)
		c.counters.reprieves.Add(1)
	case last == p:
		c.ghosts.put(p.key, v.why)
		c.forget(p, v.why)
	default:
		c.ghosts.put(last.key, v.why)
		c.drop(last, v.why)
		p.place = inWindow
		c.window.pushOldest(p)
	}
}

// lossBits are the binary places of a byte's loss: few enough for an arena of
// terabytes in an int64, enough for old small pages not to count as nothing.
const lossBits = 16

// evacuate empties the run of the arena whose pages are the least loss of those
// that stand in the way of a slot for size bytes. Slots have fixed sizes, so a
// cache full of one size has no room for another until a whole slab is empty.
// If something in each run is in use, the oldest page of the same size makes
// room. It reports whether there is room, and needs c.mu.
func (c *Cache) evacuate(size int64) bool {
	need := roundUp(c.alloc.slotSize(size), pageSize)
	var bestLo, bestHi *extent
	best := int64(math.MaxInt64)
	var bytes, cost int64
	var lo *extent
	for hi := c.alloc.x.head; hi != nil; hi = hi.next {
		n, ok := c.movable(hi.slab)
		if !ok {
			lo, bytes, cost = nil, 0, 0
			continue
		}
		if lo == nil {
			lo = hi
		}
		hi.cost = n
		bytes += hi.size
		cost += n
		for bytes-lo.size >= need {
			bytes -= lo.size
			cost -= lo.cost
			lo = lo.next
		}
		if bytes >= need && cost < best {
			best, bestLo, bestHi = cost, lo, hi
		}
	}
	if bestLo == nil {
		return c.dropOldest(c.alloc.slotSize(size))
	}
	var out []*page
	var bad []*slab
	for e := bestLo; ; e = e.next {
		if e.slab != nil {
			if e.slab.bad > 0 {
				bad = append(bad, e.slab)
			}
			for _, p := range e.slab.owner {
				if p != nil {
					out = append(out, p)
				}
			}
		}
		if e == bestHi {
			break
		}
	}
	for _, p := range out {
		c.giveWay(p)
	}
	for _, s := range bad {
		c.quarantine.clear(c.alloc, s)
	}
	c.counters.evacuations.Add(1)
	return true
}

// dropOldest drops the oldest page with a slot of the given size, if there is
// one that nobody refers to. It needs c.mu.
func (c *Cache) dropOldest(size int64) bool {
	var old *page
	for e := c.alloc.x.head; e != nil; e = e.next {
		if e.slab == nil || e.slab.class.size != size {
			continue
		}
		for _, p := range e.slab.owner {
			if p != nil && p.place != gone && mayFree(p) && (old == nil || c.turn-p.turn > c.turn-old.turn) {
				old = p
			}
		}
	}
	if old == nil {
		return false
	}
	c.giveWay(old)
	return true
}

// giveWay drops a page for one of another size. It needs c.mu.
func (c *Cache) giveWay(p *page) {
	c.ghosts.set(p.key, ghostRoom)
	c.drop(p, kvwire.ReasonCapacity)
}

// movable returns what would be lost with a slab, and whether all of it belongs
// to pages that nobody refers to or is in quarantine: kept for ever and in every
// slab, few corrupt bytes would else stand in the way of all other sizes. A page
// counts by its bytes over its age: its chance to be asked for again falls about
// as its age grows, and without this the first pages of a new size, alone in
// their slab, would be the next to go. It needs c.mu.
func (c *Cache) movable(s *slab) (int64, bool) {
	if s == nil {
		return 0, true
	}
	owned, loss := int32(0), int64(0)
	for _, p := range s.owner {
		if p == nil {
			continue
		}
		if p.place == gone || !mayFree(p) {
			return 0, false
		}
		owned++
		loss += s.class.size << lossBits / (1 + int64(c.turn-p.turn))
	}
	return loss, owned+s.bad == s.used
}
