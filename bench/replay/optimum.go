package replay

import (
	"cmp"
	"container/heap"
)

// never is the next use of a block that is not asked for again.
const never = int32(1<<31 - 1)

// optimum is Belady's MIN with bypass, which knows the trace: among what it
// holds and what was just asked for, it keeps the blocks whose next use is
// nearest. A block's next use is never before that of a block in front of it,
// and of equals the later block of the prompt leaves first, so the rest is
// always closed under prefixes and each block that it holds is a hit.
type optimum struct {
	capacity int
	next     [][]int32 // per request and block, the next request with it
	now      int
	held     map[uint64]*future
	order    futures
	gone     uint64
}

// future is a block that is held.
type future struct {
	block uint64
	next  int32
	depth int32
	index int // in the heap
}

func newOptimum(t *Trace, capacity int) *optimum {
	o := &optimum{capacity: capacity, held: make(map[uint64]*future), next: make([][]int32, len(t.Requests))}
	last := make(map[uint64]int32)
	for i := len(t.Requests) - 1; i >= 0; i-- {
		blocks := t.Requests[i].Blocks
		next := make([]int32, len(blocks))
		for k, b := range blocks {
			next[k] = never
			if at, ok := last[b]; ok {
				next[k] = at
			}
		}
		for _, b := range blocks {
			last[b] = int32(i)
		}
		o.next[i] = next
	}
	return o
}

func (o *optimum) request(blocks []uint64) (held int, err error) {
	for held < len(blocks) && o.held[blocks[held]] != nil {
		held++
	}
	for k, b := range blocks {
		next := o.next[o.now][k]
		f := o.held[b]
		switch {
		case f == nil:
			f = &future{block: b, next: next, depth: int32(k)}
			o.held[b] = f
			heap.Push(&o.order, f)
		default:
			f.next = next
			heap.Fix(&o.order, f.index)
		}
	}
	o.now++
	for len(o.order) > o.capacity {
		delete(o.held, heap.Pop(&o.order).(*future).block)
		o.gone++
	}
	return held, nil
}

func (o *optimum) evictions() uint64 { return o.gone }
func (o *optimum) close() error      { return nil }

// futures is a heap, the first to leave in front.
type futures []*future

func (h futures) Len() int { return len(h) }
func (h futures) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h[j].next, h[i].next), cmp.Compare(h[j].depth, h[i].depth), cmp.Compare(h[i].block, h[j].block)) < 0
}

func (h futures) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements [heap.Interface].
func (h *futures) Push(x any) {
	f := x.(*future)
	f.index = len(*h)
	*h = append(*h, f)
}

// Pop implements [heap.Interface].
func (h *futures) Pop() any {
	old := *h
	f := old[len(old)-1]
	*h = old[:len(old)-1]
	return f
}
