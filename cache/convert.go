package cache

import "membrane/kvwire"

// Recipe says how a page that is here in one form is made in another. It is not
// changed while a Convert may use it, and may be used by several at once.
type Recipe struct {
	// From is the form that is read, and Shards how many a page has in it.
	From   kvwire.Form
	Shards int
	// Needs are the shards that are read, in the order in which Make takes
	// them, and Bytes how long the object of each of those must be.
	Needs []int
	Bytes []int64
	// Make fills dst, the objects of all shards of the new form, from the
	// objects that Needs names. It must not keep or change src.
	Make func(dst, src [][]byte) error
	// Drop says whether nobody here needs the form From any more.
	Drop func() bool
}

// Workbench is what Convert keeps between calls, so that it allocates nothing of
// its own. It belongs to one goroutine at a time; the zero value is ready.
type Workbench struct {
	from     []Location
	slots    []slot
	sums     []kvwire.Checksum
	auths    []kvwire.Auth
	src, dst [][]byte
}

// Converted says what became of a page.
type Converted struct {
	// Recipe is the one that was used, nil where nothing was made.
	Recipe *Recipe
	// Bytes is the size of the new objects together.
	Bytes int64
	// Dropped: the form that was read is not here any more.
	Dropped bool
}

// Convert makes a page that is here in another form in the form to, whose
// shards have the given sizes, by the first recipe of whose form all shards are
// here. The bytes that are read are checked before, wrong ones are quarantined
// and the page is [kvwire.ReasonCorrupt]. The new objects are signed, all appear
// at once and belong to the same page: it is evicted as one. The reason is
// [kvwire.ReasonNone] when the page is complete in the form now or was before;
// [kvwire.ReasonLayout] when no recipe fits, [kvwire.ReasonIncomplete] when one
// would but for a shard that is not here; [kvwire.ReasonPinned] when there is
// no room. It is no lookup.
func (s *Space) Convert(w *Workbench, to kvwire.Form, sizes []int64, h kvwire.Hash, recipes []*Recipe) (Converted, kvwire.Reason) {
	c := s.c
	if n := len(sizes); n < 1 || n > kvwire.MaxShards {
		return Converted{}, kvwire.ReasonLayout
	}
	c.mu.Lock()
	if !c.enter() {
		c.mu.Unlock()
		return Converted{}, kvwire.ReasonDraining
	}
	defer c.inside.Done()
	p, epoch := s.pages[h], s.epoch
	_, why := p.held(to)
	if p == nil || why == kvwire.ReasonNone {
		c.mu.Unlock()
		return Converted{}, why
	}
	r, part := w.choose(p, recipes)
	if r == nil {
		c.mu.Unlock()
		if part {
			why = kvwire.ReasonIncomplete
		}
		return Converted{}, why
	}
	c.ref(p)
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.unref(p)
	}()
	if bad := c.wrongSource(w); bad >= 0 {
		c.mu.Lock()
		c.condemn(p, r.From, r.Needs[bad])
		c.mu.Unlock()
		return Converted{}, c.miss(kvwire.ReasonCorrupt)
	}
	if !c.makeRoom(w, sizes) {
		return Converted{}, kvwire.ReasonPinned
	}
	if err := r.Make(w.dst, w.src); err != nil {
		c.giveRoom(w)
		return Converted{}, kvwire.ReasonLayout
	}
	key := kvwire.ObjectKey{PageKey: p.name(), Form: to}
	w.sums, w.auths = w.sums[:0], w.auths[:0]
	for i, b := range w.dst {
		key.Shard = kvwire.Shard{Index: uint16(i), Count: uint16(len(sizes))}
		sum := kvwire.Sum(b)
		w.sums, w.auths = append(w.sums, sum), append(w.auths, c.auth.Sign(key, uint64(len(b)), sum))
	}
	return c.enterMade(w, p, epoch, to, r)
}

// choose returns the first recipe of which all shards are here, with their
// places, or whether some shards are of one. It needs c.mu.
func (w *Workbench) choose(p *page, recipes []*Recipe) (_ *Recipe, part bool) {
next:
	for _, r := range recipes {
		objs, why := p.held(r.From)
		part = part || why == kvwire.ReasonIncomplete
		if why != kvwire.ReasonNone || len(objs) != r.Shards || objs[0].parts {
			continue
		}
		w.from = w.from[:0]
		for i, n := range r.Needs {
			if int64(objs[n].len) != r.Bytes[i] {
				continue next
			}
			w.from = append(w.from, objs[n].location())
		}
		return r, false
	}
	return nil, part
}

// wrongSource returns the index of the first object whose bytes are not what
// was stored, or -1, and notes the bytes.
func (c *Cache) wrongSource(w *Workbench) int {
	if guard.convertSum() {
		if bad, _ := c.firstCorrupt(w.from, nil); bad >= 0 {
			return bad
		}
	}
	w.src = w.src[:0]
	for _, at := range w.from {
		w.src = append(w.src, c.arena.Bytes(at.Offset, at.Length))
	}
	return -1
}

// makeRoom allocates the new objects, all or none.
func (c *Cache) makeRoom(w *Workbench, sizes []int64) bool {
	w.slots, w.dst = w.slots[:0], w.dst[:0]
	for _, n := range sizes {
		at, ok := slot{}, false
		if n > 0 && n <= min(kvwire.MaxObject, c.cfg.Budget) {
			at, ok = c.allocate(n)
		}
		if !ok {
			c.giveRoom(w)
			return false
		}
		w.slots, w.dst = append(w.slots, at), append(w.dst, c.arena.Bytes(at.off, n))
	}
	return true
}

func (c *Cache) giveRoom(w *Workbench) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.giveRoomLocked(w)
}

// giveRoomLocked needs c.mu.
func (c *Cache) giveRoomLocked(w *Workbench) {
	for _, at := range w.slots {
		c.alloc.release(at)
	}
	c.serve()
}

// enterMade enters the new objects into their page, unless it is gone or was
// reset meanwhile; those that somebody else has stored stay.
func (c *Cache) enterMade(w *Workbench, p *page, epoch uint64, to kvwire.Form, r *Recipe) (Converted, kvwire.Reason) {
	s := p.space
	c.mu.Lock()
	defer c.mu.Unlock()
	why := kvwire.ReasonNone
	f := p.formSet(to)
	switch {
	case c.closed:
		why = kvwire.ReasonDraining
	case !sameEpoch(s, epoch) || p.place == gone || s.pages[p.hash] != p:
		why = kvwire.ReasonAbsent
	case f != nil && int(f.count) != len(w.slots):
		why = kvwire.ReasonLayout
	}
	if why != kvwire.ReasonNone {
		c.giveRoomLocked(w)
		return Converted{}, why
	}
	made := Converted{Recipe: r}
	sl := Slot{space: s, form: to, hash: p.hash}
	for i, at := range w.slots {
		sl.shard = kvwire.Shard{Index: uint16(i), Count: uint16(len(w.slots))}
		if f := p.formSet(to); f != nil {
			if _, there := f.find(sl.shard.Index); there {
				c.alloc.release(at)
				continue
			}
		}
		sl.at = at
		c.enterObject(s, &sl, object{sum: w.sums[i], auth: w.auths[i], slot: at, len: uint32(len(w.dst[i])), shard: sl.shard.Index})
		made.Bytes += int64(len(w.dst[i]))
	}
	// Our own reference aside, nobody reads the form that was read.
	if r.Drop != nil && p.refs == 1 && r.Drop() {
		c.dropForm(p, r.From)
		made.Dropped = true
	}
	c.serve()
	if c.unsettled() {
		c.wake()
	}
	return made, kvwire.ReasonNone
}

// dropForm frees the objects of one of a page's forms, which nobody refers to.
// The page stays with the others, of which there must be one. It needs c.mu.
func (c *Cache) dropForm(p *page, form kvwire.Form) {
	f := p.formSet(form)
	was := *f
	if f == &p.first {
		p.first = (*p.more)[0]
		f = &(*p.more)[0]
	}
	last := len(*p.more) - 1
	*f = (*p.more)[last]
	(*p.more)[last] = formSet{}
	if *p.more = (*p.more)[:last]; last == 0 {
		p.more = nil
	}
	freed := int64(0)
	for i := range was.objs {
		freed += was.objs[i].slot.size()
		c.alloc.release(was.objs[i].slot)
	}
	switch p.place {
	case inWindow:
		c.window.bytes -= freed
	case inPolicy:
		c.policyBytes -= freed
	}
	p.bytes -= freed
	c.resident -= freed
	c.objects -= int64(len(was.objs))
	if was.complete() && !was.local() {
		c.feed.put(change{page: p, form: form, kind: Removed, reason: kvwire.ReasonReplaced})
	}
}

// Forms appends the forms in which a page is here, complete or not.
func (s *Space) Forms(dst []kvwire.Form, h kvwire.Hash) []kvwire.Form {
	s.c.mu.RLock()
	defer s.c.mu.RUnlock()
	if p := s.pages[h]; p != nil {
		p.forms(func(f *formSet) { dst = append(dst, f.form) })
	}
	return dst
}

// maxElsewhere bounds what a miss costs whoever has very many spaces.
const maxElsewhere = 256

// Elsewhere reports whether a page of the same hash is in another space of the
// same tenant: the same tokens, computed by a model of other facts. It looks at
// the tenant's first 256 spaces.
func (s *Space) Elsewhere(h kvwire.Hash) bool {
	c := s.c
	c.mu.RLock()
	defer c.mu.RUnlock()
	all := c.tenants[s.tenant]
	for _, other := range all[:min(len(all), maxElsewhere)] {
		if other != s && other.pages[h] != nil {
			return true
		}
	}
	return false
}
