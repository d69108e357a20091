package cache

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// ask is a request of an engine: it loads what is held of the pages from to
// to-1 and stores the others.
func ask(t testing.TB, s *Space, from, to, n int) (held int) {
	t.Helper()
	p, _, err := s.Hold(LeaseRequest{Form: formA, Shards: 1, Hashes: hashes(from, to), TTL: time.Minute, Holders: 1}, nil)
	require.NoError(t, err)
	l, _, _ := p.Lease(to - from)
	if l.Pages > 0 {
		_, err := s.c.Release(l.ID, 0, false)
		require.NoError(t, err)
	}
	for i := from + l.Pages; i < to; i++ {
		put(t, s, i, n)
	}
	return l.Pages
}

// Pages of a prompt leave from its end, so that what stays is of use.
func TestTheEndOfAPromptLeavesFirst(t *testing.T) {
	const n, pages, prompt = 4 << 10, 512, 40
	c := open(t, Config{Budget: n * pages, ExpectedPages: pages})
	s := space(t, c, "a")
	for i := range 100 {
		ask(t, s, 1000*i, 1000*i+prompt, n)
		settled(t, c)
		if i%10 == 0 {
			ask(t, s, 0, prompt, n)
		}
	}
	short := 0
	for i := range 100 {
		here := 0
		for k := range prompt {
			if s.Has(formA, hash(1000*i+k)) {
				require.Equal(t, here, k, "page %d of prompt %d is held without the one before it", k, i)
				here++
			}
		}
		if here > 0 && here < prompt {
			short++
		}
	}
	assert.NotZero(t, short, "of some prompts the end has left")
	assert.Equal(t, prompt, ask(t, s, 0, prompt, n), "what is asked for stays")
	balanced(t, c)
}

// Prompts that begin alike and are never stored, as at a node that only reads,
// are remembered once: what is kept of them is bounded.
func TestWhatIsExpectedIsBounded(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	name := func(hs []kvwire.Hash) {
		p, _, err := s.Hold(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, TTL: time.Minute, Holders: 1}, nil)
		require.NoError(t, err)
		p.Drop()
	}
	kept := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		seen := map[*expected]bool{}
		for _, e := range c.lineage.awaited {
			for ; e != nil && !seen[e]; e = e.prev {
				seen[e] = true
			}
		}
		return len(seen)
	}
	const alike, prompts = 100, 1000
	for i := range prompts {
		name(append(hashes(0, alike), hash(1000+i)))
	}
	assert.Equal(t, alike+prompts, kept(), "each page once")
	for i := range 2 * maxExpected { // each prompt goes on where the last one ended
		name(hashes(10_000+i, 10_002+i))
	}
	assert.LessOrEqual(t, kept(), maxExpected+1)

	last := 10_000 + 2*maxExpected
	put(t, s, last-1, 8)
	put(t, s, last, 8)
	c.mu.Lock()
	defer c.mu.Unlock()
	assert.Same(t, s.pages[hash(last-1)], s.pages[hash(last)].parent, "and of use all the same")
}

// A client may name pages in any order, also in a ring.
func TestPagesInARingDoNoHarm(t *testing.T) {
	const n, pages = 4 << 10, 512
	c := open(t, Config{Budget: n * pages, ExpectedPages: pages})
	s := space(t, c, "a")
	ask(t, s, 0, 3, n)
	for range 3 {
		for _, pair := range [][2]int{{0, 1}, {1, 2}, {2, 0}, {1, 0}, {2, 1}, {0, 2}} {
			hs := append(hashes(pair[0], pair[0]+1), hashes(pair[1], pair[1]+1)...)
			p, _, err := s.Hold(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, TTL: time.Minute, Holders: 1}, nil)
			require.NoError(t, err)
			p.Drop()
		}
	}
	for i := range 2 * pages {
		put(t, s, 100+i, n)
	}
	settled(t, c)
	balanced(t, c)
}

// Pages that come back after the window let them go make it larger, those
// that come back after the policy did make it smaller, both within bounds.
func TestTheWindowFollowsWhatComesBack(t *testing.T) {
	const n, pages = 4 << 10, 512
	c := open(t, Config{Budget: n * pages, ExpectedPages: pages})
	c.mu.Lock()
	defer c.mu.Unlock()
	goal := c.windowGoal
	c.returned(7, n)
	assert.Equal(t, goal, c.windowGoal, "a page that never left")
	for i := range uint64(10 * pages) {
		c.ghosts.put(i, kvwire.ReasonCapacity)
		c.returned(i, n)
	}
	assert.Equal(t, c.windowLeast, c.windowGoal)
	c.ghosts.put(7, kvwire.ReasonRejected)
	c.returned(7, n)
	assert.Equal(t, c.windowLeast+n/2, c.windowGoal)
	for i := range uint64(10 * pages) {
		c.ghosts.put(i, kvwire.ReasonRejected)
		c.returned(i, n)
	}
	assert.Equal(t, c.room, c.windowGoal)
}

// A cache that is too small says so: what was stored, left for want of room and
// is stored again is counted, whether the policy or another size took the room.
func TestPagesThatComeBackAreCounted(t *testing.T) {
	const n, pages = 4 << 10, 1024
	c := open(t, Config{Budget: n * pages, ExpectedPages: 4 * pages})
	s := space(t, c, "a")
	again := func() uint64 {
		before := c.Stats().Returned
		for i := range pages {
			if !s.Has(formA, hash(i)) {
				put(t, s, i, n)
			}
		}
		settled(t, c)
		return c.Stats().Returned - before
	}
	assert.Zero(t, again(), "new pages")
	s.Remove(formA, hash(pages-1))
	put(t, s, pages-1, n)
	assert.Zero(t, c.Stats().Returned, "a page that was deleted")
	for i := range pages {
		put(t, s, pages+i, n)
	}
	settled(t, c)
	assert.Greater(t, again(), uint64(pages/2))
	for i := range 24 {
		put(t, s, 1_000_000+i, 32*n)
	}
	settled(t, c)
	require.NotZero(t, c.Stats().Evacuations)
	assert.Greater(t, again(), uint64(pages/2))
}
