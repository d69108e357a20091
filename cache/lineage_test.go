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
	c.adapt(7, n)
	assert.Equal(t, goal, c.windowGoal, "a page that never left")
	for i := range uint64(10 * pages) {
		c.ghosts.put(i, kvwire.ReasonCapacity)
		c.adapt(i, n)
	}
	assert.Equal(t, c.windowLeast, c.windowGoal)
	c.ghosts.put(7, kvwire.ReasonRejected)
	c.adapt(7, n)
	assert.Equal(t, c.windowLeast+n/2, c.windowGoal)
	for i := range uint64(10 * pages) {
		c.ghosts.put(i, kvwire.ReasonRejected)
		c.adapt(i, n)
	}
	assert.Equal(t, c.room, c.windowGoal)
}
