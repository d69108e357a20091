package layout

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"membrane/kvwire"
)

// memory is what the benchmarks copy from and to: a memfd as a sidecar's arena
// is, and private memory as large, both present. Successive copies go on where
// the last one ended, so that the processor's caches do not help.
type memory struct {
	src, dst []byte
	at       int
}

const memoryBytes = 512 << 20

func newMemory(tb testing.TB) *memory {
	tb.Helper()
	fd, err := unix.MemfdCreate("membrane-layout", unix.MFD_CLOEXEC)
	require.NoError(tb, err)
	defer func() { _ = unix.Close(fd) }()
	require.NoError(tb, unix.Ftruncate(fd, memoryBytes))
	const prot = unix.PROT_READ | unix.PROT_WRITE
	src, err := unix.Mmap(fd, 0, memoryBytes, prot, unix.MAP_SHARED|unix.MAP_POPULATE)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = unix.Munmap(src) })
	dst, err := unix.Mmap(-1, 0, memoryBytes, prot, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = unix.Munmap(dst) })
	copy(src, randomBytes(1, 1<<20))
	copy(dst, src)
	return &memory{src: src, dst: dst}
}

// piece returns the next n bytes of each side.
func (m *memory) piece(n int) (dst, src []byte) {
	if m.at+n > memoryBytes {
		m.at = 0
	}
	dst, src = m.dst[m.at:m.at+n], m.src[m.at:m.at+n]
	m.at += n
	return dst, src
}

// speeds are what is measured beside memcpy: pages of a model with 16 layers and
// 8 KV heads of 128.
var speeds = []struct {
	name, dtype        string
	fromLayout, fromBy string
	fromBlock          int
	toLayout, toBy     string
	toBlock            int
	floor              float64
}{
	{"copy whole pages", "bfloat16", "canonical", "", 64, "canonical", "", 64, 0.5},
	{"copy 8 KiB", "bfloat16", "trtllm-hnd", "", 32, "canonical", "", 64, 0.5},
	{"copy 4 KiB", "bfloat16", "canonical", "", 64, "vllm-hnd", "", 16, 0.5},
	{"copy 256 B, NHD to HND", "bfloat16", "sglang-page_first_direct", "", 64, "canonical", "", 64, 0.25},
	{"copy 256 B, HND to NHD", "bfloat16", "canonical", "", 64, "sglang-page_first_direct", "", 64, 0.25},
	{"copy 256 B, packed K|V", "bfloat16", "vllm-lbhnc", "", 16, "canonical", "", 64, 0.25},
	{"copy 256 B, layers inside tokens", "bfloat16", "sglang-page_first", "", 64, "canonical", "", 64, 0.25},
	{"copy 256 B, layers inside heads", "bfloat16", "canonical", "", 64, "sglang-page_head", "", 64, 0.25},
	{"transpose 4 bytes, to vec", "float32", "canonical", "", 64, "vllm-lbhnc", "vec", 32, 0.06},
	{"transpose 2 bytes, to vec", "bfloat16", "canonical", "", 64, "vllm-lbhnc", "vec", 32, 0.06},
	{"transpose 2 bytes, from vec", "bfloat16", "vllm-lbhnc", "vec", 64, "sglang-page_first_direct", "", 64, 0.06},
	{"transpose to amx", "bfloat16", "canonical", "", 64, "vllm-lbhnc", "amx", 32, 0.06},
	{"transpose from amx", "bfloat16", "vllm-lbhnc", "amx", 64, "sglang-page_first", "", 64, 0.06},
	{"transpose vec to amx", "bfloat16", "vllm-lbhnc", "vec", 128, "vllm-lbhnc", "amx", 32, 0.06},
	{"transpose 1 byte", "float8_e4m3fn", "canonical", "", 64, "dims outside tokens", "", 64, 0.06},
}

func speedPlan(tb testing.TB, i int) *Plan {
	tb.Helper()
	s := speeds[i]
	m := kvwire.ModelFacts{WeightsID: "w", DType: s.dtype, RoPE: "base=1", Layers: 16, KVHeads: 8, HeadSize: 128}
	page := max(64, s.fromBlock, s.toBlock)
	make1 := func(layout, packing string, block int) Descriptor {
		w := kvwire.Descriptor{
			Layout: layout, Packing: packing, DType: s.dtype, BlockTokens: block,
			TPSize: 1, PPSize: 1, Layers: [2]int{0, m.Layers}, Heads: [2]int{0, m.KVHeads},
		}
		var err error
		if _, known := entryNamed(layout); known {
			w, err = Sized(m, w)
			require.NoError(tb, err)
		} else {
			size := int64(block * m.HeadSize)
			w.Axes, w.Strides = []string{"layer", "kv", "head", "dim", "token"}, []int64{16 * size, 8 * size, size, int64(block), 1}
			w.BlockBytes = 16 * 16 * size
		}
		d, err := Describe(m, w, page)
		require.NoError(tb, err)
		return d
	}
	p, err := NewPlan(make1(s.toLayout, s.toBy, s.toBlock), make1(s.fromLayout, s.fromBy, s.fromBlock))
	require.NoError(tb, err)
	return p
}

// onCPU returns the time that this thread has run. What else runs on the
// machine counts as little as can be.
func onCPU(b *testing.B) time.Duration {
	b.Helper()
	var ts unix.Timespec
	require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}

// BenchmarkPlan measures each translation between rounds of memcpy over the
// same memory, on one core, and reports both in GB/s of processor time, and
// their ratio. It fails where that is below what is asked of this kind.
func BenchmarkPlan(b *testing.B) {
	m := newMemory(b)
	for i, s := range speeds {
		b.Run(s.name, func(b *testing.B) {
			p := speedPlan(b, i)
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			const round = 64 << 20
			n := p.Bytes()
			b.ReportAllocs()
			var translated, copied time.Duration
			for b.Loop() {
				begin := onCPU(b)
				for range round / n {
					dst, src := m.piece(n)
					copy(dst, src)
				}
				middle := onCPU(b)
				for range round / n {
					dst, src := m.piece(n)
					if err := p.Run(dst, src); err != nil {
						b.Fatal(err)
					}
				}
				copied += middle - begin
				translated += onCPU(b) - middle
			}
			moved := float64(b.N) * float64(round/n*n) / 1e9
			b.ReportMetric(moved/translated.Seconds(), "GB/s")
			b.ReportMetric(moved/copied.Seconds(), "memcpy-GB/s")
			b.ReportMetric(copied.Seconds()/translated.Seconds(), "×memcpy")
			if ratio := copied.Seconds() / translated.Seconds(); ratio < s.floor {
				b.Errorf("%.3f of memcpy is less than %.2f", ratio, s.floor)
			}
		})
	}
}

func TestRunAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for i, s := range speeds {
		p := speedPlan(t, i)
		src, dst := make([]byte, p.Bytes()), make([]byte, p.Bytes())
		assertNoAllocs(t, s.name, func() error { return p.Run(dst, src) })
	}
}

func assertNoAllocs(t *testing.T, name string, do func() error) {
	t.Helper()
	n := testing.AllocsPerRun(2, func() {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	})
	require.Zero(t, n, fmt.Sprintf("allocations of %s", name))
}
