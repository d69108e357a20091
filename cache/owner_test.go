package cache

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// scripted is a policy that does what a test says.
type scripted struct {
	queue   verdicts
	onAdd   func(q *verdicts, key uint64, e entry) bool
	touched atomic.Int64
	deleted atomic.Int64
}

func (p *scripted) touch(uint64) { p.touched.Add(1) }
func (p *scripted) add(key uint64, e entry, _ int64) bool {
	return p.onAdd == nil || p.onAdd(&p.queue, key, e)
}
func (p *scripted) del(uint64)          { p.deleted.Add(1) }
func (p *scripted) limit(int64)         {}
func (p *scripted) shrink()             {}
func (p *scripted) settle()             {}
func (p *scripted) windowOnly() bool    { return false }
func (p *scripted) close()              {}
func (p *scripted) verdicts() *verdicts { return &p.queue }

func (p *scripted) make(_, _ int64) (policy, error) { return p, nil }

const kib64 = 64 << 10

// An offer that the policy drops under load leaves the page in the window.
func TestLostOffersAreRepeated(t *testing.T) {
	var n atomic.Int64
	p := &scripted{onAdd: func(*verdicts, uint64, entry) bool { return n.Add(1)%3 == 0 }}
	c := openWith(t, Config{Budget: 4 << 20}, p.make) // the window is 60 pages
	s := space(t, c, "a")
	for i := range 63 {
		put(t, s, i, kib64)
	}
	settled(t, c)
	for i := range 63 {
		assert.True(t, s.Has(formA, hash(i)))
	}
	assert.NotZero(t, c.Stats().LostSets)
	assert.LessOrEqual(t, c.Stats().WindowBytes, c.windowGoal)
	balanced(t, c)
}

// Invariants 3 and 4: a victim in use goes back to the window.
func TestVictimsInUseAreSpared(t *testing.T) {
	p := &scripted{onAdd: func(q *verdicts, _ uint64, e entry) bool {
		q.put(e, kvwire.ReasonRejected)
		return true
	}}
	c := openWith(t, Config{Budget: 4 << 20}, p.make)
	s := space(t, c, "a")
	for i := range 3 {
		put(t, s, i, kib64)
	}
	l, locs, _ := grantTo(t, s, 1, hashes(0, 2))
	v, why := s.View(one, formA, hash(2), false)
	require.Equal(t, kvwire.ReasonNone, why)
	for i := range 200 {
		put(t, s, 100+i, kib64)
	}
	settled(t, c)
	for i := range 3 {
		require.True(t, s.Has(formA, hash(i)))
	}
	for i, at := range locs {
		require.Equal(t, content(i, kib64), c.Arena().Bytes(at.Offset, at.Length))
	}
	assert.NotZero(t, c.Stats().Reprieves)
	balanced(t, c)

	v.Close()
	_, err := c.Release(l.ID, 0, true)
	require.NoError(t, err)
	for i := range 200 {
		put(t, s, 1000+i, kib64)
	}
	settled(t, c)
	for i := range 3 {
		assert.False(t, s.Has(formA, hash(i)))
	}
	balanced(t, c)
}

// A verdict on a stay that is over must not hit the page's next one.
func TestStaleVerdictsAreIgnored(t *testing.T) {
	var mu sync.Mutex // offers are made without the cache's lock
	var held []entry
	p := &scripted{onAdd: func(_ *verdicts, _ uint64, e entry) bool {
		mu.Lock()
		defer mu.Unlock()
		held = append(held, e)
		return true
	}}
	c := openWith(t, Config{Budget: 4 << 20}, p.make)
	s := space(t, c, "a")
	part := func(i, k int) {
		res, err := s.Put(kvwire.Shard{Index: uint16(k), Count: 2}, formA, hash(i), content(i, kib64))
		require.NoError(t, err)
		require.True(t, res.Stored)
	}
	for i := range 62 {
		part(i, 0)
	}
	settled(t, c)
	mu.Lock()
	require.NotEmpty(t, held)
	first := held[0]
	mu.Unlock()
	c.mu.Lock()
	require.EqualValues(t, 0, first.page.place-inPolicy)
	c.mu.Unlock()
	part(0, 1) // grows: back to the window, so that its cost is right
	settled(t, c)
	require.Eventually(t, func() bool { return p.deleted.Load() != 0 }, 10*time.Second, time.Millisecond)
	c.mu.Lock()
	p.queue.put(first, kvwire.ReasonCapacity)
	for _, v := range p.queue.take(nil) {
		c.carryOut(v)
	}
	c.mu.Unlock()
	assert.True(t, s.Has(formA, hash(0)))
	balanced(t, c)
}

// A cache full of one size makes room for another.
func TestOtherSizesFindRoom(t *testing.T) {
	c := open(t, Config{Budget: 32 << 20, AllocWait: 10 * time.Second})
	s := space(t, c, "a")
	i := 0
	for _, n := range []int{4 << 10, 3 << 20, 100, 1 << 20, 96 << 10, 6 << 20, 4 << 10} {
		refused := 0
		for range max(8, 2*(32<<20)/max(n, 32<<10)) {
			i++
			res, err := s.Put(one, formA, hash(i), content(i, n))
			require.NoError(t, err)
			if !res.Stored {
				refused++
				break
			}
		}
		require.Zero(t, refused, "of size %d; %+v", n, c.Stats())
	}
	settled(t, c)
	balanced(t, c)
}

// A cache whose pages are pinned here and there has no run for larger ones. It
// does not empty itself for their sake.
func TestStoresThatFindNoRunLeaveTheRest(t *testing.T) {
	const budget, size = 64 << 20, 16 << 10
	c := open(t, Config{Budget: budget})
	s := space(t, c, "a")
	for i := range budget / size {
		put(t, s, i, size)
	}
	settled(t, c)
	for i := 0; i < budget/size; i += 10 {
		_, _, err := s.Pin(formA, hashes(i, i+1), time.Hour)
		require.NoError(t, err)
	}
	c.cfg.AllocWait = time.Millisecond
	b := make([]byte, 256<<10)
	for i := range 300 {
		_, err := s.Put(one, formA, hash(1_000_000+i), b)
		require.NoError(t, err)
	}
	settled(t, c)
	st := c.Stats()
	assert.Less(t, st.FreeBytes, int64(budget/16), "%+v", st)
	balanced(t, c)
}

// Where much is free but of no use to a size, and something in each run is in
// use, the oldest page of that size makes room.
func TestOldestOfItsSizeMakesRoom(t *testing.T) {
	const budget, size, other = 64 << 20, 16 << 10, 20 << 10
	c := open(t, Config{Budget: budget})
	s := space(t, c, "a")
	pages, others := budget*88/100/size, budget/10/other
	pin := func(i int) {
		_, _, err := s.Pin(formA, hashes(i, i+1), time.Hour)
		require.NoError(t, err)
	}
	for i := range others {
		if put(t, s, 1_000_000+i, other); i%3 == 0 {
			pin(1_000_000 + i)
		}
	}
	for i := range pages {
		if put(t, s, i, size); i%4 == 0 {
			pin(i)
		}
	}
	for i := range others {
		if i%3 != 0 {
			s.Remove(formA, hash(1_000_000+i))
		}
	}
	for i := range pages {
		if put(t, s, 2_000_000+i, size); i < 150 { // what no size had until now
			pin(2_000_000 + i)
		}
	}
	assert.Greater(t, c.Stats().FreeBytes, int64(budget/20))
	assert.True(t, s.Has(formA, hash(2_000_000+pages-1)))
	balanced(t, c)
}

// Values of any size, four fifths of the budget together, are all kept: what is
// cut for one size and not used is not missed by the others.
func TestAllSizesShareTheArena(t *testing.T) {
	for name, size := range map[string]func(*rand.Rand) int{
		"even":        func(r *rand.Rand) int { return 1 + r.IntN(256<<10) },
		"logarithmic": func(r *rand.Rand) int { n := 512 << r.IntN(10); return n + r.IntN(n) },
	} {
		t.Run(name, func(t *testing.T) {
			const budget = 64 << 20
			c := open(t, Config{Budget: budget})
			s := space(t, c, "a")
			r := rand.New(rand.NewPCG(1, 2))
			n := 0
			for bytes := 0; bytes < budget*8/10; n++ {
				k := size(r)
				bytes += k
				put(t, s, n, k)
			}
			settled(t, c)
			here := 0
			for i := range n {
				if s.Has(formA, hash(i)) {
					here++
				}
			}
			assert.Equal(t, n, here, "%d bytes are free", c.Stats().FreeBytes)
			balanced(t, c)
		})
	}
}

// Evacuation leaves what is in use alone.
func TestEvacuationSparesWhatIsInUse(t *testing.T) {
	c := openWith(t, Config{Budget: 1 << 20, ReserveFraction: 1e-6, AllocWait: 20 * time.Millisecond}, (&scripted{}).make)
	s := space(t, c, "a")
	for i := range 256 {
		put(t, s, i, 4096)
	}
	require.Zero(t, c.Stats().FreeBytes)
	l, locs, _ := grantTo(t, s, 1, hashes(0, 1))
	require.Equal(t, 1, l.Pages)
	in := locs[0].Offset
	res, err := s.Put(one, formA, hash(1000), content(1, 1<<20))
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonOverBudget, res.Reason)
	assert.EqualValues(t, 256, c.Stats().Pages)
	put(t, s, 1001, 512<<10)
	assert.Equal(t, content(0, 4096), c.Arena().Bytes(in, 4096))
	assert.EqualValues(t, 128+1, c.Stats().Pages, "no more than needed left")
	require.NoError(t, c.Cancel(l.ID))
	put(t, s, 1002, 1<<20)
	assert.EqualValues(t, 1, c.Stats().Pages)
	balanced(t, c)
}

func TestLookupsReachThePolicyWithoutWaiting(t *testing.T) {
	p := &scripted{}
	c := openWith(t, Config{}, p.make)
	s := space(t, c, "a")
	put(t, s, 0, 8)
	s.Match(formA, hashes(0, 1000)) // found or not
	l, _, _, err := s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hashes(0, 1), TTL: MaxTTL, Holders: 1, Matched: true}, nil)
	require.NoError(t, err)
	require.NoError(t, c.Cancel(l.ID))
	l, _, _ = grantTo(t, s, 1, hashes(0, 10))
	require.NoError(t, c.Cancel(l.ID))
	s.View(one, formA, hash(5), false)
	s.Has(formA, hash(0))
	c.wake()
	require.Eventually(t, func() bool { return p.touched.Load() == 1000+10+1 }, settleTime, settleStep)
	assert.EqualValues(t, 1000, c.Stats().Lookups)
	assert.EqualValues(t, 1, c.Stats().Hits)
	assert.Zero(t, c.Stats().LostTouches)
}

func TestLookupsAreDroppedWhenTheOwnerIsBusy(t *testing.T) {
	var ts touches
	ts.init(2)
	keys := make([]lookup, 1000)
	for i := range 100 {
		ts.add(i%2, keys)
	}
	n := uint64(0)
	ts.drain(func(batch []lookup) { n += uint64(len(batch)) })
	assert.EqualValues(t, 100_000, n+ts.lost())
	assert.GreaterOrEqual(t, n, uint64(64*touchBatch))
}

// Pages of two rare sizes in a cache full of a third do not make room for each
// other while older pages are left.
func TestEvacuationTakesOldPages(t *testing.T) {
	c := open(t, Config{Budget: 64 << 20, AllocWait: 10 * time.Second})
	s := space(t, c, "a")
	i := 0
	store := func(n int) int {
		i++
		put(t, s, i, n)
		return i
	}
	for range 2 * (64 << 20) / (64 << 10) {
		store(64 << 10)
	}
	settled(t, c)
	var rare []int
	for range 40 {
		rare = append(rare, store(96<<10), store(80<<10))
	}
	missing := 0
	for _, k := range rare {
		if !s.Has(formA, hash(k)) {
			missing++
		}
	}
	assert.Zero(t, missing, "of %d young pages; %+v", len(rare), c.Stats())
	balanced(t, c)
}
