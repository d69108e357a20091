package cache

import "math/bits"

const (
	slabBytes = 4 << 20
	// leastSlab is the first slab of a class, about.
	leastSlab = 64 << 10
	// maxExact is how many classes may have exactly the size that was asked
	// for. Later ones are rounded up to an eighth of a power of two, so that
	// odd sizes cannot cut the arena into classes without end.
	maxExact = 64
	// smallStep is the finest granularity of sizes.
	smallStep = 256
)

// slab is an extent cut into slots of one class.
type slab struct {
	ext   *extent
	class *class
	slots int32
	fresh int32 // slots from here on were never used
	used  int32
	bad   int32   // of these in quarantine
	freed []int32 // used before and free now, last freed last
	owner []*page // per slot: the page whose object it holds, nil if none

	prev, next *slab // among the slabs of the class with a free slot
	listed     bool
}

// class is all slabs of one slot size.
type class struct {
	size  int64
	slabs int
	bytes int64 // of its slabs
	avail *slab // slabs with a free slot, last freed first
}

// slot is one allocation. The zero slot is none.
type slot struct {
	slab *slab
	off  int64
}

func (s slot) index() int32 { return int32((s.off - s.slab.ext.off) / s.slab.class.size) }

// size returns how many bytes the slot takes from the arena.
func (s slot) size() int64 { return s.slab.class.size }

// own records whose object the slot holds, for evacuation.
func (s slot) own(p *page) { s.slab.owner[s.index()] = p }

// allocator hands out slots of the arena. It is not safe for concurrent use.
type allocator struct {
	total    int64
	used     int64 // bytes in slots that are handed out
	slabGoal int64
	x        *extents
	classes  map[int64]*class
}

func newAllocator(size int64) *allocator {
	return &allocator{
		total: size,
		// A small arena would be eaten by a few whole slabs.
		slabGoal: min(slabBytes, max(size/64, pageSize)),
		x:        newExtents(size),
		classes:  make(map[int64]*class),
	}
}

// free returns the bytes that are in no slot.
func (a *allocator) free() int64 { return a.total - a.used }

// slotSize returns the class size that an object of n bytes would get now.
func (a *allocator) slotSize(n int64) int64 {
	exact := exactSize(n)
	if a.classes[exact] != nil || len(a.classes) < maxExact {
		return exact
	}
	step := stepSize(exact)
	best := step
	for size := range a.classes {
		if size >= exact && size < best {
			best = size
		}
	}
	return best
}

// alloc returns a slot for n bytes, and false when no slot and no room for a
// new slab is free.
func (a *allocator) alloc(n int64) (slot, bool) {
	size := a.slotSize(n)
	c := a.classes[size]
	if c == nil {
		c = &class{size: size}
		a.classes[size] = c
	}
	if c.avail == nil && !a.grow(c) {
		if c.slabs == 0 {
			delete(a.classes, size)
		}
		return slot{}, false
	}
	s := c.avail
	var i int32
	if k := len(s.freed); k > 0 {
		i = s.freed[k-1]
		s.freed = s.freed[:k-1]
	} else {
		i = s.fresh
		s.fresh++
	}
	s.used++
	if s.used == s.slots {
		c.unlist(s)
	}
	a.used += size
	return slot{s, s.ext.off + int64(i)*size}, true
}

// grow adds a slab to c, of about a 32nd of what c has: what is free in the
// slabs of a size is of no use to others, and a hundred sizes with a whole slab
// each would leave most of the arena so.
func (a *allocator) grow(c *class) bool {
	n := max(1, min(a.slabGoal, max(leastSlab, c.bytes/32))/c.size)
	ext := a.x.take(n*c.size, c.size, c.size)
	if ext == nil {
		return false
	}
	s := &slab{ext: ext, class: c, slots: int32(ext.size / c.size)}
	s.owner = make([]*page, s.slots)
	ext.slab = s
	c.slabs++
	c.bytes += ext.size
	c.list(s)
	return true
}

// release gives a slot back.
func (a *allocator) release(at slot) {
	s, c := at.slab, at.slab.class
	i := at.index()
	s.owner[i] = nil
	s.used--
	a.used -= c.size
	if s.used == 0 {
		c.unlist(s)
		c.slabs--
		c.bytes -= s.ext.size
		if c.slabs == 0 {
			delete(a.classes, c.size)
		}
		a.x.give(s.ext)
		return
	}
	s.freed = append(s.freed, i)
	c.unlist(s)
	c.list(s)
}

func (c *class) list(s *slab) {
	s.prev, s.next, s.listed = nil, c.avail, true
	if c.avail != nil {
		c.avail.prev = s
	}
	c.avail = s
}

func (c *class) unlist(s *slab) {
	if !s.listed {
		return
	}
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		c.avail = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	}
	s.prev, s.next, s.listed = nil, nil, false
}

// exactSize rounds n up by less than one part in 128, but to at least a
// multiple of 256 bytes, to which slots are therefore aligned, and from half a
// mebibyte on to whole pages of memory. A value with a short header behind a
// power of two would else lose a twentieth of the arena.
func exactSize(n int64) int64 {
	n = max(n, 1)
	step := int64(1) << max(0, bits.Len64(uint64(n-1))-8)
	return roundUp(n, min(max(step, smallStep), pageSize))
}

// stepSize rounds n up to the next eighth of its power of two.
func stepSize(n int64) int64 {
	step := int64(1) << max(0, bits.Len64(uint64(n-1))-4)
	return exactSize(roundUp(n, step))
}
