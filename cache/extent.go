package cache

// extent is a run of the arena: free, or one slab. All extents form one list
// in the order of their addresses without gaps, so that neighbours can be
// joined; the free ones form a second list, newest first.
type extent struct {
	off, size    int64
	prev, next   *extent // by address
	fprev, fnext *extent // among the free
	slab         *slab   // nil when free
	cost         int64   // scratch of evacuate
}

// extents hands out runs of the arena, first fit.
type extents struct {
	head *extent // by address
	free *extent
}

func newExtents(size int64) *extents {
	e := &extent{size: size}
	return &extents{head: e, free: e}
}

// take returns an extent of exactly n bytes, or of as many bytes as the
// first free one of at least least bytes has, rounded down to a multiple of
// step. It returns nil when no free extent has least bytes.
func (x *extents) take(n, least, step int64) *extent {
	var fit *extent
	for e := x.free; e != nil; e = e.fnext {
		if e.size >= n {
			fit = e
			break
		}
		if e.size >= least && fit == nil {
			fit = e
		}
	}
	if fit == nil {
		return nil
	}
	if n > fit.size {
		n = least + (fit.size-least)/step*step
	}
	n = roundUp(n, pageSize)
	x.unlinkFree(fit)
	if fit.size > n {
		rest := &extent{off: fit.off + n, size: fit.size - n, prev: fit, next: fit.next}
		if rest.next != nil {
			rest.next.prev = rest
		}
		fit.next, fit.size = rest, n
		x.linkFree(rest)
	}
	return fit
}

// give frees an extent and joins it with free neighbours.
func (x *extents) give(e *extent) {
	e.slab = nil
	if n := e.next; n != nil && n.slab == nil {
		x.unlinkFree(n)
		x.join(e, n)
	}
	if p := e.prev; p != nil && p.slab == nil {
		x.unlinkFree(p)
		x.join(p, e)
		e = p
	}
	x.linkFree(e)
}

func (x *extents) join(a, b *extent) {
	a.size += b.size
	a.next = b.next
	if b.next != nil {
		b.next.prev = a
	}
}

func (x *extents) linkFree(e *extent) {
	e.fprev, e.fnext = nil, x.free
	if x.free != nil {
		x.free.fprev = e
	}
	x.free = e
}

func (x *extents) unlinkFree(e *extent) {
	if e.fprev != nil {
		e.fprev.fnext = e.fnext
	} else {
		x.free = e.fnext
	}
	if e.fnext != nil {
		e.fnext.fprev = e.fprev
	}
	e.fprev, e.fnext = nil, nil
}
