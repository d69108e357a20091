package mesh

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/kvwire"
)

func TestFilterListsWhatWasAdded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 1))
		in := randomDigests(r, rapid.IntRange(0, 3000).Draw(rt, "n"))
		f := newFilter(slices.Clone(in))
		added := randomDigests(r, rapid.IntRange(0, 500).Draw(rt, "added"))
		removed := in[:rapid.IntRange(0, len(in)).Draw(rt, "removed")]
		// Over the wire, as a peer gets it.
		a, err := kvwire.ParseDirectoryAnswer(kvwire.AppendDirectoryAnswer(nil, kvwire.DirectoryAnswer{Full: true, Filter: f.DirectoryFilter, Added: added, Removed: removed}))
		require.NoError(rt, err)
		g := receiveFilter(a.Filter)
		for _, d := range in {
			require.True(rt, g.has(d))
		}
		g = g.apply(a.Added, a.Removed)
		require.Equal(rt, len(in)+len(added)-len(removed), g.len())
		for _, d := range append(slices.Clone(in[len(removed):]), added...) {
			require.True(rt, g.has(d))
		}
		again := g.values(nil)
		require.True(rt, slices.IsSorted(again))
		require.Equal(rt, g, packFilter(g.Buckets, again))
	})
}

func TestFilterForgetsWhatWasRemoved(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	in := randomDigests(r, 8192)
	f := newFilter(slices.Clone(in)).apply(nil, in[:4096])
	wrong := 0
	for _, d := range in[:4096] {
		if f.has(d) {
			wrong++
		}
	}
	require.Less(t, wrong, 5, "a removed digest is found only by accident")
	require.Equal(t, 0, f.apply(nil, in[4096:]).len())
}

func TestFilterSeldomErrs(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	f := newFilter(randomDigests(r, 8192))
	wrong := 0
	for range 1 << 20 {
		if f.has(r.Uint64()) {
			wrong++
		}
	}
	require.Less(t, wrong, 64, "about 16 of 2^20 at one fingerprint a bucket")
}

// 1,000 peers with 8,192 pages each fit 20 MiB, measured on the heap.
func TestDirectoryMemory(t *testing.T) {
	const peers, pages = 1000, 8192
	r := rand.New(rand.NewPCG(5, 6))
	base := newFilter(randomDigests(r, pages)).DirectoryFilter
	wire := kvwire.AppendDirectoryAnswer(nil, kvwire.DirectoryAnswer{Full: true, Filter: base})
	more, less := randomDigests(r, 100), randomDigests(r, 100)
	list := make([]*filter, peers)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range list {
		a, err := kvwire.ParseDirectoryAnswer(wire)
		require.NoError(t, err)
		list[i] = receiveFilter(a.Filter)
		if i%2 == 1 {
			list[i] = list[i].apply(more, nil).apply(less, more)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	heap := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	sum := 0
	for _, f := range list {
		sum += f.bytes()
	}
	t.Logf("heap %.2f MiB, lists %.2f MiB", float64(heap)/(1<<20), float64(sum)/(1<<20))
	require.LessOrEqual(t, heap, int64(20<<20))
	require.LessOrEqual(t, sum, 20<<20)
}

func TestGallop(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		end := rapid.IntRange(1, kvwire.MaxBatch).Draw(rt, "end")
		pos := rapid.IntRange(0, end).Draw(rt, "pos")
		held := rapid.IntRange(0, end-pos).Draw(rt, "held")
		run, probes := gallop(func(d uint64) bool { return int(d) < pos+held }, func(i int) uint64 { return uint64(i) }, pos, end, maxProbes)
		require.Equal(rt, held, run)
		require.LessOrEqual(rt, probes, 64)
	})
}

func TestGallopKeepsItsBudget(t *testing.T) {
	t.Parallel()
	for budget := range 40 {
		run, probes := gallop(func(d uint64) bool { return d < 777 }, func(i int) uint64 { return uint64(i) }, 0, 5000, budget)
		require.LessOrEqual(t, probes, budget)
		require.LessOrEqual(t, run, 777, "never more than is listed")
		if budget > 30 {
			require.Equal(t, 777, run)
		}
	}
}

func TestLooksIntoDirectoriesDoNotAllocate(t *testing.T) {
	if raceOn {
		t.Skip("the race detector allocates")
	}
	r := rand.New(rand.NewPCG(11, 12))
	in := randomDigests(r, 8192)
	f := newFilter(slices.Clone(in))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		gallop(f.has, func(i int) uint64 { return in[i] }, 0, len(in), maxProbes)
	}))
}

// The most probes that any chain can cost.
func TestGallopNeverProbesMoreThan64(t *testing.T) {
	t.Parallel()
	most := 0
	for held := 0; held <= kvwire.MaxBatch; held++ {
		_, probes := gallop(func(d uint64) bool { return int(d) < held }, func(i int) uint64 { return uint64(i) }, 0, kvwire.MaxBatch, 1<<20)
		most = max(most, probes)
	}
	t.Logf("at most %d probes", most)
	require.LessOrEqual(t, most, 64)
}

// Whatever filter the parser lets through can be searched and changed.
func FuzzReceivedFilter(f *testing.F) {
	r := rand.New(rand.NewPCG(13, 14))
	for _, n := range []int{0, 1, 63, 64, 300} {
		f.Add(kvwire.AppendDirectoryAnswer(nil, kvwire.DirectoryAnswer{Full: true, Filter: newFilter(randomDigests(r, n)).DirectoryFilter, Added: randomDigests(r, 3)}))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := kvwire.ParseDirectoryAnswer(b)
		if err != nil || !a.Full {
			return
		}
		g := receiveFilter(a.Filter)
		for i := range uint64(64) {
			g.has(i << 58)
			g.has(i * 0x9E3779B97F4A7C15)
		}
		g = g.apply(a.Added, a.Removed)
		for _, v := range g.values(nil) {
			require.True(t, g.has(v<<(64-g.Buckets-fingerprintBits)))
		}
	})
}

func randomDigests(r *rand.Rand, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = r.Uint64()
	}
	return out
}

func BenchmarkFilterMiss(b *testing.B) {
	r := rand.New(rand.NewPCG(7, 8))
	f := newFilter(randomDigests(r, 8192))
	d := randomDigests(r, 1024)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		f.has(d[i%len(d)])
	}
}

func BenchmarkFilterApply(b *testing.B) {
	r := rand.New(rand.NewPCG(9, 10))
	f := newFilter(randomDigests(r, 8192))
	more := randomDigests(r, 64)
	b.ReportAllocs()
	for b.Loop() {
		f.apply(more, nil)
	}
}
