package cache

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// mirror keeps the set of complete pages as events tell it.
type mirror struct {
	mu     sync.Mutex
	held   map[kvwire.PageKey]map[kvwire.Form]bool
	events []Event
}

func (m *mirror) apply(e Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.events = append(m.events, e)
	if m.held == nil {
		m.held = map[kvwire.PageKey]map[kvwire.Form]bool{}
	}
	if m.held[e.Key] == nil {
		m.held[e.Key] = map[kvwire.Form]bool{}
	}
	m.held[e.Key][e.Form] = e.Kind == Added
}

func (m *mirror) count() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, forms := range m.held {
		for _, ok := range forms {
			if ok {
				n++
			}
		}
	}
	return n
}

// is reports whether the mirror has exactly these pages, in formA. Equal counts
// say less: an event of each kind may be on its way.
func (m *mirror) is(pages map[kvwire.PageKey]int) bool {
	if m.count() != len(pages) {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := range pages {
		if !m.held[k][formA] {
			return false
		}
	}
	return true
}

func ranged(c *Cache) map[kvwire.PageKey]int {
	out := map[kvwire.PageKey]int{}
	c.Range(func(k kvwire.PageKey, _ kvwire.Form) bool { out[k]++; return true })
	return out
}

func TestFeedFollowsTheTable(t *testing.T) {
	c := open(t, Config{Budget: 4 << 20})
	s := space(t, c, "a")
	var m mirror
	cancel := c.Subscribe(func(e Event) {
		c.Stats() // no lock is held: this must not deadlock
		m.apply(e)
	})
	half := kvwire.Shard{Index: 0, Count: 2}
	_, err := s.Put(half, formB, hash(1), content(1, 8))
	require.NoError(t, err)
	for i := range 300 {
		put(t, s, i, 32<<10)
	}
	settled(t, c)
	require.Eventually(t, func() bool { return m.is(ranged(c)) }, settleTime, settleStep)
	s.Reset()
	require.Eventually(t, func() bool { return m.count() == 0 }, settleTime, settleStep)
	assert.Empty(t, ranged(c))

	m.mu.Lock()
	for _, e := range m.events {
		assert.Equal(t, e.Kind == Added, e.Reason == kvwire.ReasonNone)
		assert.Equal(t, formA, e.Form, "the other form was never complete")
		assert.Equal(t, "a", e.Key.Tenant)
	}
	n := len(m.events)
	m.mu.Unlock()
	cancel()
	put(t, s, 1, 8)
	var other mirror
	defer c.Subscribe(other.apply)()
	put(t, s, 2, 8)
	require.Eventually(t, func() bool { return other.count() == 1 }, settleTime, settleStep)
	assert.Len(t, m.events, n)
}

func TestFeedDropsRatherThanGrows(t *testing.T) {
	var f feed
	f.init()
	defer f.close()
	block, seen := make(chan struct{}), make(chan Event, maxFeed+10)
	f.subs[0] = func(e Event) { <-block; seen <- e }
	p := &page{space: &Space{}}
	f.put(change{page: p, kind: Added})
	require.Eventually(t, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.queue) == 0 }, settleTime, settleStep)
	for range maxFeed + 1 {
		f.put(change{page: p, kind: Removed})
	}
	assert.Len(t, f.queue, 2)
	close(block)
	assert.Equal(t, Added, (<-seen).Kind)
	assert.Equal(t, Lost, (<-seen).Kind)
	assert.Equal(t, Removed, (<-seen).Kind)
}

func TestRangeStopsWhenTold(t *testing.T) {
	c := open(t, Config{})
	for _, tenant := range []string{"a", "b"} {
		for i := range 5 {
			put(t, space(t, c, tenant), i, 8)
		}
	}
	n := 0
	c.Range(func(kvwire.PageKey, kvwire.Form) bool { n++; return n < 7 })
	assert.Equal(t, 7, n)
	assert.Len(t, ranged(c), 10)
}
