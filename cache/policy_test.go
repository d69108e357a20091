package cache

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// settled waits until the owner has nothing to do.
func settled(t testing.TB, c *Cache) {
	t.Helper()
	for range 3 { // of which the second is taken, so the first done, before the third is there
		c.kick <- struct{}{}
	}
	require.Eventually(t, func() bool {
		c.mu.RLock()
		defer c.mu.RUnlock()
		return !c.unsettled()
	}, settleTime, settleStep)
}

// balanced checks that every byte is accounted for, in a cache without slots
// in flight.
func balanced(t testing.TB, c *Cache) {
	t.Helper()
	c.mu.RLock()
	defer c.mu.RUnlock()
	var pages, objects, bytes, window, policy int64
	inList := 0
	for p := c.window.tail; p != nil; p = p.prev {
		inList++
	}
	for _, s := range c.spaces {
		for h, p := range s.pages {
			require.Equal(t, h, p.hash)
			pages++
			bytes += p.bytes
			var own int64
			p.forms(func(f *formSet) {
				objects += int64(len(f.objs))
				for i := range f.objs {
					own += f.objs[i].slot.size()
				}
			})
			require.Equal(t, own, p.bytes)
			switch p.place {
			case inWindow:
				window += p.bytes
				inList--
			case inPolicy:
				policy += p.bytes
			default:
				t.Fatal("a page in the table is gone")
			}
		}
	}
	require.Zero(t, inList)
	require.Equal(t, []int64{pages, objects, bytes, window, policy},
		[]int64{c.pages, c.objects, c.resident, c.window.bytes, c.policyBytes})
}

// Invariant 3: an acknowledged store can be read until it is evicted for a
// reason that is counted, also when ten times the budget is stored.
func TestAcknowledgedStoresAreHereOrCountedOut(t *testing.T) {
	c := open(t, Config{Budget: 16 << 20})
	s := space(t, c, "a")
	const n = 32 << 10
	const stores = 10 * (16 << 20) / n
	refused := uint64(0)
	acked := map[int]bool{}
	for i := range stores {
		res, err := s.Put(one, formA, hash(i), content(i, n))
		require.NoError(t, err)
		if !res.Stored {
			require.Equal(t, kvwire.ReasonOverBudget, res.Reason)
			refused++
			continue
		}
		acked[i] = true
		require.True(t, s.Has(formA, hash(i)), "a new page is in the window")
	}
	settled(t, c)
	here := 0
	for i := range acked {
		v, why := s.View(one, formA, hash(i), true)
		if v == nil {
			require.Equal(t, kvwire.ReasonAbsent, why)
			continue
		}
		require.Equal(t, content(i, n), v.Bytes())
		v.Close()
		here++
	}
	st := c.Stats()
	assert.Less(t, refused, uint64(stores/20), "nearly all stores are taken")
	assert.EqualValues(t, len(acked), st.Puts)
	assert.EqualValues(t, here, st.Pages)
	assert.EqualValues(t, len(acked)-here, st.Evictions[kvwire.ReasonRejected]+st.Evictions[kvwire.ReasonCapacity])
	assert.Equal(t, st.Evictions.Total(), st.Evictions[kvwire.ReasonRejected]+st.Evictions[kvwire.ReasonCapacity])
	assert.Equal(t, refused, st.Refused.Total())
	assert.GreaterOrEqual(t, st.FreeBytes, c.reserve)
	assert.Greater(t, st.ResidentBytes, int64(14<<20), "the budget is used")
	balanced(t, c)
	t.Logf("refused %d, waits %d, evacuations %d, window %d, policy %d", refused, st.Waits, st.Evacuations, st.WindowBytes, st.PolicyBytes)
}

// replay asks for one page after another, stores what is missing, and returns
// which share of the requests found their page.
func replay(t *testing.T, c *Cache, trace []int, n int) float64 {
	t.Helper()
	s := space(t, c, "a")
	b := make([]byte, n)
	hits := 0
	for _, i := range trace {
		if got, _ := s.Match(formA, []kvwire.Hash{hash(i)}); got == 1 {
			hits++
			continue
		}
		_, err := s.Put(one, formA, hash(i), b)
		require.NoError(t, err)
	}
	return float64(hits) / float64(len(trace))
}

// zipfWithScans is requests for popular pages, broken by long runs of pages
// that nobody asks for again.
func zipfWithScans(requests int) []int {
	r := rand.New(rand.NewPCG(1, 2))
	z := rand.NewZipf(r, 1.1, 1, 4000)
	var trace []int
	once := 1 << 20
	for len(trace) < requests {
		for range 300 {
			trace = append(trace, int(z.Uint64()))
		}
		for range 600 {
			trace = append(trace, once)
			once++
		}
	}
	return trace
}

// fifoHits is what a first-in first-out cache of so many pages makes of a trace.
func fifoHits(trace []int, pages int) float64 {
	in := map[int]bool{}
	var queue []int
	hits := 0
	for _, i := range trace {
		if in[i] {
			hits++
			continue
		}
		in[i] = true
		if queue = append(queue, i); len(queue) > pages {
			delete(in, queue[0])
			queue = queue[1:]
		}
	}
	return float64(hits) / float64(len(trace))
}

// bestHits is what a cache that knows the most popular pages beforehand makes
// of a trace.
func bestHits(trace []int, pages int) float64 {
	count := map[int]int{}
	for _, i := range trace {
		count[i]++
	}
	all := slices.Sorted(maps.Values(count))
	hits := 0
	for _, n := range all[len(all)-pages:] {
		hits += n - 1
	}
	return float64(hits) / float64(len(trace))
}

// Invariant 3: popular pages survive scans. Without ristretto (build tag
// noristretto) the cache is first-in first-out and this test fails.
func TestPopularPagesSurviveScans(t *testing.T) {
	if raceOn {
		t.Skip("sync.Pool drops at random under the race detector, and with it what ristretto learns")
	}
	const n, pages = 4 << 10, 512
	c := open(t, Config{Budget: n * pages, ExpectedPages: pages})
	trace := zipfWithScans(120_000)
	got, fifo := replay(t, c, trace, n), fifoHits(trace, pages)
	t.Logf("hit ratio %.3f, first-in first-out %.3f, best in hindsight %.3f", got, fifo, bestHits(trace, pages))
	assert.Greater(t, got, fifo*1.15)
}

// Invariant 3: a new page is in the window, which admission does not see, and
// so outlasts the next stores however popular the pages are that fill the cache.
func TestNewPagesAreSafeFromAdmission(t *testing.T) {
	const n, pages = 4 << 10, 512
	c := open(t, Config{Budget: n * pages, ExpectedPages: pages})
	s := space(t, c, "a")
	for i := range 2 * pages {
		put(t, s, i, n)
	}
	for range 20 {
		for i := range 2 * pages {
			s.Match(formA, hashes(i, i+1))
		}
		settled(t, c)
	}
	settled(t, c)
	const fresh = pages / 10 // half of the window
	for i := range fresh {
		put(t, s, 10_000+i, n)
		settled(t, c)
	}
	lost := 0
	for i := range fresh {
		if !s.Has(formA, hash(10_000+i)) {
			lost++
		}
	}
	assert.Zero(t, lost, "of %d new pages", fresh)
}
