package cache

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func hold(t testing.TB, s *Space, hs []kvwire.Hash) (Prefix, kvwire.Reason) {
	t.Helper()
	p, why, err := s.Hold(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, Client: 1, TTL: time.Minute, Holders: 1}, nil)
	require.NoError(t, err)
	return p, why
}

func TestPrefixIsPinnedWhileTheRestComes(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 600 { // more than two steps
		put(t, s, i, 1000)
	}
	p, why := hold(t, s, hashes(0, 610))
	assert.Equal(t, 600, p.Pages())
	assert.Equal(t, kvwire.ReasonAbsent, why)
	assert.EqualValues(t, 600*1024, c.Stats().PinnedBytes)
	assert.Zero(t, c.Stats().Leases, "nobody has it yet")
	assert.EqualValues(t, 610, c.Stats().Lookups)
	assert.EqualValues(t, 600, c.Stats().Hits)
	assert.Zero(t, c.EndClient(1))

	for i := range 5 {
		put(t, s, 600+i, 1000)
	}
	assert.Equal(t, kvwire.ReasonAbsent, p.Extend(hashes(600, 610)))
	assert.Equal(t, 605, p.Pages())
	assert.Equal(t, 5, p.Fresh())
	l, locs, why := p.Lease(605)
	assert.Equal(t, 605, l.Pages)
	assert.Equal(t, kvwire.ReasonNone, why)
	require.Len(t, locs, 605)
	for i, at := range locs {
		require.Equal(t, content(i, 1000), c.Arena().Bytes(at.Offset, at.Length))
	}
	assert.EqualValues(t, 600*1000, p.Checked(), "the five came and were checked meanwhile")
	p.Drop() // nothing is left to drop
	assert.EqualValues(t, 605*1024, c.Stats().PinnedBytes)
	assert.EqualValues(t, 610, c.Stats().Lookups)
	assert.Equal(t, 1, c.EndClient(1))
	assert.Zero(t, c.Stats().PinnedBytes)
}

func TestPrefixEnds(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 8 {
		put(t, s, i, 1000)
	}
	p, why := hold(t, s, hashes(0, 8))
	assert.Equal(t, kvwire.ReasonNone, why)
	p.Drop()
	p.Drop()
	assert.Zero(t, p.Pages())
	assert.Zero(t, c.Stats().PinnedBytes)
	assert.Equal(t, kvwire.ReasonAbsent, p.Extend(hashes(0, 8)))
	l, locs, _ := p.Lease(8)
	assert.Zero(t, l)
	assert.Empty(t, locs)

	p, _ = hold(t, s, hashes(0, 8))
	l, locs, _ = p.Lease(3)
	assert.Equal(t, 3, l.Pages)
	assert.Len(t, locs, 3)
	assert.EqualValues(t, 3*1024, c.Stats().PinnedBytes)
	require.NoError(t, c.Cancel(l.ID))

	p, _ = hold(t, s, hashes(0, 8))
	l, locs, _ = p.Lease(0)
	assert.Zero(t, l)
	assert.Empty(t, locs)
	assert.Zero(t, c.Stats().PinnedBytes)

	p, _ = hold(t, s, hashes(0, 8))
	assert.Equal(t, 8, s.Reset())
	l, locs, why = p.Lease(8)
	assert.Equal(t, 8, l.Pages, "what is pinned outlives a reset")
	assert.Equal(t, kvwire.ReasonNone, why)
	for i, at := range locs {
		require.Equal(t, content(i, 1000), c.Arena().Bytes(at.Offset, at.Length))
	}
	require.NoError(t, c.Cancel(l.ID))
	assert.Equal(t, c.Arena().Size(), c.Stats().FreeBytes)

	_, _, err := s.Hold(LeaseRequest{Form: formA, Shards: 0, Holders: 1, TTL: time.Second}, nil)
	assert.Error(t, err)
}

// Invariant 1: only pages that came after the request began, and so were
// checked where they are meanwhile, are leased without another check.
func TestOnlyFreshPagesAreNotCheckedAgain(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 6 {
		put(t, s, i, 1000)
	}
	_, locs, _ := grantTo(t, s, 2, hashes(0, 6))
	c.EndClient(2)
	p, _ := hold(t, s, hashes(0, 2))
	for i := 6; i < 8; i++ {
		put(t, s, i, 1000)
	}
	// 2 to 5 were here before the request although it asks for them only now.
	require.Equal(t, kvwire.ReasonNone, p.Extend(hashes(2, 8)))
	assert.Equal(t, 2, p.Fresh())
	c.Arena().Bytes(locs[4].Offset, locs[4].Length)[999] ^= 1
	l, _, why := p.Lease(8)
	assert.Equal(t, 4, l.Pages)
	assert.Equal(t, kvwire.ReasonCorrupt, why)
	assert.EqualValues(t, 5*1000, p.Checked())
	assert.False(t, s.Has(formA, hash(4)))
	require.NoError(t, c.Cancel(l.ID))

	// A page of which one shard is older than the request is not fresh.
	two := func(k, i int) {
		_, err := s.Put(kvwire.Shard{Index: uint16(k), Count: 2}, formA, hash(i), content(i, 1000))
		require.NoError(t, err)
	}
	two(0, 20)
	p, why, err := s.Hold(LeaseRequest{Form: formA, Shards: 2, Hashes: hashes(20, 21), Client: 1, TTL: time.Minute, Holders: 2}, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.ReasonIncomplete, why)
	two(1, 20)
	require.Equal(t, kvwire.ReasonNone, p.Extend(hashes(20, 21)))
	assert.Zero(t, p.Fresh())
	l, _, _ = p.Lease(1)
	assert.Equal(t, 1, l.Pages)
	assert.EqualValues(t, 2000, p.Checked())
}

// Invariant 4: what is held on the way to a lease counts against the caps.
func TestPrefixIsCapped(t *testing.T) {
	c := open(t, Config{Budget: 8 << 20})
	s := space(t, c, "a")
	const n = 64 << 10 // 128 in the budget
	for i := range 90 {
		put(t, s, i, n)
	}
	p, why := hold(t, s, hashes(0, 90))
	assert.Equal(t, 32, p.Pages(), "a quarter")
	assert.Equal(t, kvwire.ReasonPinned, why)
	assert.Equal(t, kvwire.ReasonPinned, p.Extend(hashes(32, 33)))
	l, _, _ := p.Lease(90)
	assert.Equal(t, 32, l.Pages)
	p, why = hold(t, s, hashes(40, 50))
	assert.Zero(t, p.Pages())
	assert.Equal(t, kvwire.ReasonPinned, why)
	p.Drop()
	assert.EqualValues(t, 32*n, c.Stats().PinnedBytes)
}

func TestPrefixOfAClosedCache(t *testing.T) {
	c, err := New(Config{Budget: 8 << 20})
	require.NoError(t, err)
	s := space(t, c, "a")
	put(t, s, 0, 1000)
	p, _ := hold(t, s, hashes(0, 1))
	require.NoError(t, c.Close())
	l, _, why := p.Lease(1)
	assert.Zero(t, l)
	assert.Equal(t, kvwire.ReasonDraining, why)
	p, why = hold(t, s, hashes(0, 1))
	assert.Zero(t, p.Pages())
	assert.Equal(t, kvwire.ReasonDraining, why)
	p.Drop()
}

func TestHoldAllocatesNothingPerPage(t *testing.T) {
	if raceOn {
		t.Skip("the race detector allocates")
	}
	const n = 1000
	c := openWith(t, Config{Budget: 64 << 20}, (&scripted{}).make)
	s := space(t, c, "a")
	for i := range n {
		put(t, s, i, 256)
	}
	hs := hashes(0, n)
	dst := make([]Location, 0, n)
	got := testing.AllocsPerRun(100, func() {
		p, _, err := s.Hold(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, TTL: time.Minute, Holders: 1}, dst)
		l, _, _ := p.Lease(n)
		if err != nil || l.Pages != n {
			t.Error(l, err)
		}
		if _, err := c.Release(l.ID, 0, false); err != nil {
			t.Error(err)
		}
	})
	assert.LessOrEqual(t, got, 4.0)
}

// BenchmarkHold is what a match does with a prompt of 6,250 pages once it has
// their hashes.
func BenchmarkHold(b *testing.B) {
	c, s := filled(b, 100_000, 256)
	hs := hashes(40_000, 46_250)
	dst := make([]Location, 0, len(hs))
	b.ReportAllocs()
	for b.Loop() {
		p, _, _ := s.Hold(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, TTL: time.Minute, Holders: 1}, dst)
		l, _, _ := p.Lease(len(hs))
		if l.Pages != len(hs) {
			b.Fatal(l.Pages)
		}
		c.Release(l.ID, 0, false)
	}
}
