package cache

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestExactSize(t *testing.T) {
	for n, want := range map[int64]int64{1: 256, 256: 256, 257: 512, 3841: 4096, 4095: 4096, 4096: 4096, 4097: 4352, 64<<10 + 64: 64<<10 + 512, 512<<10 + 1: 516 << 10, 2 << 20: 2 << 20, 2<<20 + 1: 2<<20 + 4096} {
		assert.Equal(t, want, exactSize(n), n)
	}
}

func TestStepSizeWastesAtMostAnEighth(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := exactSize(rapid.Int64Range(1, 256<<20).Draw(t, "n"))
		s := stepSize(n)
		assert.GreaterOrEqual(t, s, n)
		assert.LessOrEqual(t, s, exactSize(n+n/8))
		assert.Equal(t, s, stepSize(s))
	})
}

// Slots never overlap, lie in the arena, are aligned; what is freed comes
// back as one extent.
func TestAllocatorNeverOverlaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int64{1 << 20, 8 << 20, 64 << 20, 512 << 20}).Draw(t, "arena")
		a := newAllocator(size)
		type piece struct {
			slot
			n int64
		}
		var held []piece
		sizes := rapid.OneOf(
			rapid.Int64Range(1, 4096),
			rapid.Int64Range(1, size/8),
			rapid.SampledFrom([]int64{100, 4096, 64 << 10, 2 << 20, 5 << 20}),
		)
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			if len(held) > 0 && rapid.Bool().Draw(t, "free") {
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				a.release(held[i].slot)
				held[i] = held[len(held)-1]
				held = held[:len(held)-1]
			} else {
				n := sizes.Draw(t, "size")
				if s, ok := a.alloc(n); ok {
					held = append(held, piece{s, n})
				}
			}
			var used int64
			for i, p := range held {
				used += p.size()
				if p.size() < p.n || p.off < 0 || p.off+p.size() > size || p.off%64 != 0 {
					t.Fatalf("slot of %d bytes for %d at %d", p.size(), p.n, p.off)
				}
				for _, q := range held[:i] {
					if p.off < q.off+q.size() && q.off < p.off+p.size() {
						t.Fatalf("[%d,+%d) and [%d,+%d) overlap", p.off, p.size(), q.off, q.size())
					}
				}
			}
			if used != a.used {
				t.Fatalf("%d bytes used, %d counted", used, a.used)
			}
			checkExtents(t, a)
		}
		for _, p := range held {
			a.release(p.slot)
		}
		if e := a.x.head; e.size != size || e.next != nil || a.x.free != e || e.fnext != nil || len(a.classes) != 0 {
			t.Fatalf("not one extent after all was freed")
		}
	})
}

// checkExtents checks that extents cover the arena without gaps, in order,
// and that exactly the free ones are in the free list and no two of them touch.
func checkExtents(t *rapid.T, a *allocator) {
	free := map[*extent]bool{}
	for e := a.x.free; e != nil; e = e.fnext {
		free[e] = true
	}
	var off int64
	for e := a.x.head; e != nil; e = e.next {
		if e.off != off || e.size <= 0 || free[e] != (e.slab == nil) || (e.next != nil && e.next.prev != e) {
			t.Fatalf("extent at %d of %d: expected at %d", e.off, e.size, off)
		}
		if e.slab == nil && e.next != nil && e.next.slab == nil {
			t.Fatalf("free extents at %d not joined", e.off)
		}
		off += e.size
		delete(free, e)
	}
	if off != a.total || len(free) != 0 {
		t.Fatalf("extents cover %d of %d", off, a.total)
	}
}

func TestAllocatorReusesLastFreedSlot(t *testing.T) {
	a := newAllocator(64 << 20)
	var slots []slot
	for range 10 {
		s, ok := a.alloc(1000)
		require.True(t, ok)
		slots = append(slots, s)
	}
	a.release(slots[3])
	a.release(slots[7])
	s, _ := a.alloc(1000)
	assert.Equal(t, slots[7].off, s.off)
	s, _ = a.alloc(1000)
	assert.Equal(t, slots[3].off, s.off)
}

func TestAllocatorBoundsClasses(t *testing.T) {
	a := newAllocator(4 << 30)
	for i := range int64(5000) {
		_, ok := a.alloc((i + 1) * pageSize)
		if !ok {
			break
		}
	}
	assert.LessOrEqual(t, len(a.classes), maxExact+8*20)
	assert.Greater(t, len(a.classes), maxExact)
}

func TestAllocatorFillsSmallArenaWithOneClass(t *testing.T) {
	a := newAllocator(1 << 20)
	n := 0
	for ; ; n++ {
		if _, ok := a.alloc(100 << 10); !ok {
			break
		}
	}
	assert.Equal(t, 10, n)
	_, ok := a.alloc(4096)
	assert.True(t, ok, "the rest is free for a smaller class")
	assert.False(t, func() bool { _, ok := a.alloc(2 << 20); return ok }())
}

func BenchmarkAlloc(b *testing.B) {
	a := newAllocator(4 << 30)
	var ring [256]slot
	for i := range ring {
		ring[i], _ = a.alloc(2 << 20)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		at := &ring[i*7%len(ring)]
		a.release(*at)
		*at, _ = a.alloc(2 << 20)
	}
}
