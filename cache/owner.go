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
			c.touches.learn(batch, c.policy.touch)
		case <-c.kick:
			c.balance(&w)
		case <-timer.C:
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

// balance moves the oldest pages of the window into the policy until the
// window has its size, the reserve is free and no store waits. Each page of
// the window moves at most once: those that come back are in use.
func (c *Cache) balance(w *workspace) {
	c.touches.drain(c.policy.touch)
	moves, evacuations := -1, -1
	for {
		c.mu.Lock()
		c.serve()
		if moves < 0 {
			moves, evacuations = c.window.count, len(c.waiting)
		}
		need := c.shortage()
		maxCost := c.takeBatch(w, max(need, c.window.bytes-c.windowGoal), need, min(moves, maxBatch))
		moves -= len(w.batch)
		again := len(w.batch) > 0
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
		c.offer(w, maxCost)
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
		p := c.window.tail
		c.window.remove(p)
		p.place = inPolicy
		p.gen++
		c.policyBytes += p.bytes
		taken += p.bytes
		w.batch = append(w.batch, offer{entry{p, p.gen}, p.key, p.bytes})
	}
	return max(1, min(c.base, c.policyBytes-need))
}

// offer gives w.batch to the policy and carries out what it decides.
func (c *Cache) offer(w *workspace, maxCost int64) {
	w.lost = w.lost[:0]
	c.policy.limit(maxCost)
	for _, o := range w.batch {
		if !c.policy.add(o.key, o.entry, o.cost) {
			w.lost = append(w.lost, o.entry)
		}
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

// carryOut evicts the page that the policy let go of, unless it is in use:
// then it goes back to the window. It needs c.mu.
func (c *Cache) carryOut(v verdict) {
	if !v.current() {
		return
	}
	p := v.page
	c.policyBytes -= p.bytes
	if mayEvict(p) {
		c.forget(p, v.why)
		return
	}
	c.window.pushNewest(p)
	c.counters.reprieves.Add(1)
}

// evacuate empties the run of the arena in which the fewest bytes stand in the
// way of a slot for size bytes. Slots have fixed sizes, so a cache full of one
// size has no room for another until a whole slab is empty. It reports
// whether it made room, and needs c.mu.
func (c *Cache) evacuate(size int64) bool {
	need := roundUp(c.alloc.slotSize(size), pageSize)
	var bestLo, bestHi *extent
	best := int64(math.MaxInt64)
	var bytes, cost int64
	var lo *extent
	for hi := c.alloc.x.head; hi != nil; hi = hi.next {
		n, ok := movable(hi.slab)
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
		return false
	}
	var out []*page
	for e := bestLo; ; e = e.next {
		if e.slab != nil {
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
		c.drop(p, kvwire.ReasonCapacity)
	}
	c.counters.evacuations.Add(1)
	return true
}

// movable returns how many bytes of a slab are in use, and whether all of them
// belong to pages that nobody refers to.
func movable(s *slab) (int64, bool) {
	if s == nil {
		return 0, true
	}
	owned := int32(0)
	for _, p := range s.owner {
		if p == nil {
			continue
		}
		if p.place == gone || !mayFree(p) {
			return 0, false
		}
		owned++
	}
	return int64(owned) * s.class.size, owned == s.used
}
