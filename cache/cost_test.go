package cache

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// Invariant 4: a resident page costs at most 512 bytes of heap, its place in
// the policy included.
func TestHeapPerPage(t *testing.T) {
	if raceOn {
		t.Skip("the race detector has its own costs")
	}
	const pages = 100_000
	before := heap()
	c := open(t, Config{Budget: 256 * pages * 108 / 100, ExpectedPages: pages})
	s := space(t, c, "a")
	b := make([]byte, 256)
	for i := range pages {
		_, err := s.Put(one, formA, hash(i), b)
		require.NoError(t, err)
	}
	settled(t, c)
	n := c.Stats().Pages
	per := (heap() - before) / n
	t.Logf("%d bytes of heap per page, %d pages, %d in the policy", per, n, c.Stats().PolicyBytes/256)
	assert.Greater(t, n, int64(pages*9/10))
	assert.LessOrEqual(t, per, int64(512))
	runtime.KeepAlive(c)
}

// heap returns the bytes of the heap that are in use.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse)
}

// Nor does the heap grow when many models or tenants fill the cache one after the
// other: what they once had costs nothing.
func TestHeapPerPageAfterOtherSpaces(t *testing.T) {
	if raceOn {
		t.Skip("the race detector has its own costs")
	}
	const pages = 40_000
	before := heap()
	c := open(t, Config{Budget: 256 * pages, ExpectedPages: pages})
	b := make([]byte, 256)
	var per [8]int64
	for k := range per {
		s, err := c.Space("a", kvwire.Namespace{byte(k)})
		require.NoError(t, err)
		for i := range pages * 5 / 4 {
			_, err := s.Put(one, formA, hash(i), b)
			require.NoError(t, err)
		}
		settled(t, c)
		per[k] = (heap() - before) / c.Stats().Pages
	}
	t.Logf("bytes of heap per page: %d", per)
	assert.Less(t, per[len(per)-1], per[0]*5/4)
	balanced(t, c)
	runtime.KeepAlive(c)
}

// filled is a cache that holds n pages of size bytes, all fitting.
func filled(tb testing.TB, n, size int) (*Cache, *Space) {
	tb.Helper()
	budget := max(int64(n)*exactSize(int64(size))*2, 8<<20)
	c := open(tb, Config{Budget: budget, ExpectedPages: int64(n), PinFraction: 0.9, ClientPinFraction: 0.9})
	s := space(tb, c, "a")
	b := make([]byte, size)
	for i := range n {
		res, err := s.Put(one, formA, hash(i), b)
		require.NoError(tb, err)
		require.True(tb, res.Stored)
	}
	require.Eventually(tb, func() bool { return c.arena.Prefaulted() == c.arena.Size() }, time.Minute, settleStep)
	settled(tb, c)
	return c, s
}

func TestMatchAndLeaseAllocateNothingPerPage(t *testing.T) {
	if raceOn {
		t.Skip("the race detector allocates")
	}
	const n = 1000
	c := openWith(t, Config{Budget: 64 << 20, PinFraction: 0.9, ClientPinFraction: 0.9}, (&scripted{}).make)
	s := space(t, c, "a")
	for i := range n {
		put(t, s, i, 256)
	}
	hs := hashes(0, n)
	dst := make([]Location, 0, n)
	assert.LessOrEqual(t, testing.AllocsPerRun(100, func() { s.Match(formA, hs) }), 1.0, "match")
	assert.LessOrEqual(t, testing.AllocsPerRun(100, func() { s.Has(formA, hs[0]) }), 0.0, "has")
	for _, verify := range []bool{false, true} {
		got := testing.AllocsPerRun(100, func() {
			l, _, _, err := s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, TTL: time.Minute, Holders: 1}, dst)
			if err != nil || l.Pages != n {
				t.Error(l, err)
			}
			if _, err := c.Release(l.ID, 0, verify); err != nil {
				t.Error(err)
			}
		})
		assert.LessOrEqual(t, got, 3.0, "lease and release of %d pages, verify %v", n, verify)
	}
}

func BenchmarkMatch(b *testing.B) {
	_, s := filled(b, 100_000, 256)
	hs := hashes(40_000, 46_250)
	b.ReportAllocs()
	for b.Loop() {
		s.Match(formA, hs)
	}
}

func BenchmarkLeaseRelease(b *testing.B) {
	for _, size := range []int{256, 64 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c, s := filled(b, 1000, size)
			hs := hashes(100, 164)
			dst := make([]Location, 0, 64)
			b.SetBytes(int64(64 * size))
			b.ReportAllocs()
			for b.Loop() {
				l, _, _, _ := s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, TTL: time.Minute, Holders: 1, Matched: true}, dst)
				c.Release(l.ID, 0, false)
			}
		})
	}
}

// BenchmarkPut stores into a full cache. Compare with BenchmarkPutFloor, which
// does only what cannot be avoided.
func BenchmarkPut(b *testing.B) {
	for _, size := range []int{4 << 10, 64 << 10, 2 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c := open(b, Config{Budget: 256 << 20})
			require.Eventually(b, func() bool { return c.arena.Prefaulted() == c.arena.Size() }, time.Minute, settleStep)
			s := space(b, c, "a")
			src := make([]byte, size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := s.Put(one, formA, hash(i), src); err != nil {
					b.Fatal(err)
				}
			}
			st := c.Stats()
			b.ReportMetric(float64(st.Refused.Total())/float64(b.N), "refused/op")
			b.ReportMetric(float64(st.Waits)/float64(b.N), "waits/op")
		})
	}
}

func BenchmarkPutFloor(b *testing.B) {
	for _, size := range []int{4 << 10, 64 << 10, 2 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c := open(b, Config{Budget: 256 << 20})
			require.Eventually(b, func() bool { return c.arena.Prefaulted() == c.arena.Size() }, time.Minute, settleStep)
			src := make([]byte, size)
			b.SetBytes(int64(size))
			for i := 0; b.Loop(); i++ {
				at := c.arena.Bytes(int64(i*size%(256<<20)), int64(size))
				copy(at, src)
				kvwire.Sum(at)
			}
		})
	}
}

func BenchmarkView(b *testing.B) {
	_, s := filled(b, 1000, 64<<10)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		v, _ := s.View(one, formA, hash(i%1000), false)
		v.Close()
	}
}
