package cache

import "membrane/kvwire"

// ghosts remembers by a few bits of their keys which pages left not long ago,
// and why: each has one place, which a later one takes over. It is guarded by
// Cache.mu.
type ghosts struct {
	slots []uint32 // the key's upper bits, and in the lowest two a fate
}

// What became of a page that left.
const (
	ghostNone   = iota
	ghostWindow // refused on leaving the window: a larger window had kept it
	ghostPolicy // evicted by the policy: a smaller window had kept it
	ghostRoom   // made room for another size: no window had kept it
)

func (g *ghosts) init(pages int64) {
	n := 1 << 10
	for int64(n) < pages {
		n *= 2
	}
	g.slots = make([]uint32, n)
}

func (g *ghosts) at(key uint64) *uint32 { return &g.slots[key&uint64(len(g.slots)-1)] }

func tag(key uint64) uint32 { return uint32(key>>32) &^ 3 }

func (g *ghosts) put(key uint64, why kvwire.Reason) {
	if why == kvwire.ReasonRejected {
		g.set(key, ghostWindow)
		return
	}
	g.set(key, ghostPolicy)
}

func (g *ghosts) set(key uint64, fate uint32) { *g.at(key) = tag(key) | fate }

// take returns the fate of a page that came back, and forgets it.
func (g *ghosts) take(key uint64) uint32 {
	s := g.at(key)
	fate := *s & 3
	if fate == ghostNone || *s&^3 != tag(key) {
		return ghostNone
	}
	*s = ghostNone
	return fate
}

// returned notes that a page comes back that had left, and moves the bound between window and policy when a page of so many bytes
// comes back that had left: to where that page would have stayed, as ARC does
// (Megiddo and Modha, 2003), but by half of its size and whatever the odds: with
// ARC's own steps the bound swung about on traces of a few cache sizes. It
// needs c.mu.
func (c *Cache) returned(key uint64, bytes int64) {
	fate := c.ghosts.take(key)
	if fate == ghostNone {
		return
	}
	c.counters.returned.Add(1)
	if fate == ghostRoom || !c.adaptive {
		return
	}
	step := bytes / 2
	if fate == ghostPolicy {
		step = -step
	}
	c.windowGoal = min(max(c.windowGoal+step, c.windowLeast), c.room)
}
