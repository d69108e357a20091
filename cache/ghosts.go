package cache

import "membrane/kvwire"

// ghosts remembers by a few bits of their keys which pages left not long ago,
// and why: each has one place, which a later one takes over. It is guarded by
// Cache.mu.
type ghosts struct {
	slots []uint32 // the key's upper bits, and in the lowest two a fate
	count [3]int   // of each fate
}

// What became of a page that left.
const (
	ghostNone   = iota
	ghostWindow // refused on leaving the window: a larger window had kept it
	ghostPolicy // evicted by the policy: a smaller window had kept it
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
	fate := uint32(ghostPolicy)
	if why == kvwire.ReasonRejected {
		fate = ghostWindow
	}
	s := g.at(key)
	g.count[*s&3]--
	*s = tag(key) | fate
	g.count[fate]++
}

// take returns the fate of a page that came back, and forgets it.
func (g *ghosts) take(key uint64) uint32 {
	s := g.at(key)
	fate := *s & 3
	if fate == ghostNone || *s&^3 != tag(key) {
		return ghostNone
	}
	g.count[fate]--
	*s = ghostNone
	return fate
}

// maxStep bounds how far one page that came back moves the window's bound, in
// pages of its size.
const maxStep = 16

// adapt moves the bound between window and policy when a page of so many bytes
// comes back that had left: to where that page would have stayed, and by more
// the rarer such pages are (as ARC does; Megiddo and Modha, 2003). It needs c.mu.
func (c *Cache) adapt(key uint64, bytes int64) {
	fate := c.ghosts.take(key)
	window, policy := max(c.ghosts.count[ghostWindow], 1), max(c.ghosts.count[ghostPolicy], 1)
	switch {
	case fate == ghostNone || !c.adaptive:
		return
	case fate == ghostWindow:
		c.windowGoal += bytes * int64(min(max(policy/window, 1), maxStep))
	default:
		c.windowGoal -= bytes * int64(min(max(window/policy, 1), maxStep))
	}
	c.windowGoal = min(max(c.windowGoal, c.windowLeast), c.room)
}
