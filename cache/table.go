package cache

import (
	"hash/maphash"
	"maps"
	"slices"

	"membrane/kvwire"
)

// Location is where an object lies in the arena.
type Location struct {
	Offset int64
	Length int64
	Sum    kvwire.Checksum
	parts  bool
}

// object is the bytes of one shard in one form.
type object struct {
	sum   kvwire.Checksum
	auth  kvwire.Auth
	slot  slot
	len   uint32
	shard uint16
	parts bool // sum is of parts
	bad   bool // failed its checksum: goes to quarantine, not back to the allocator
}

func (o *object) location() Location {
	return Location{Offset: o.slot.off, Length: int64(o.len), Sum: o.sum, parts: o.parts}
}

// formSet is the shards of a page that are here in one form, in the order of
// their indices. Once complete it never changes.
type formSet struct {
	form  kvwire.Form
	count uint16
	objs  []object
}

func (f *formSet) complete() bool { return f.count > 0 && len(f.objs) == int(f.count) }

// local reports whether the page is this node's alone: its checksums are of
// parts, which peers and their directories do not know.
func (f *formSet) local() bool { return f.objs[0].parts }

func (f *formSet) find(shard uint16) (int, bool) {
	return slices.BinarySearchFunc(f.objs, shard, func(o object, i uint16) int { return int(o.shard) - int(i) })
}

// Places of a page.
const (
	inWindow = iota
	inPolicy
	gone // no longer in the table; its slots live until nobody refers to it
)

// page is one entry of the table. All fields but space, hash and key are
// guarded by Cache.mu. Nearly all pages have one form, which is held inline
// (a resident page may cost 512 bytes of heap in all).
type page struct {
	space *Space
	hash  kvwire.Hash
	key   uint64 // its name for the policy

	prev, next *page // in the window

	parent, child  *page // the page before it in its prompt, and one after it
	elder, younger *page // other pages after its parent

	first formSet
	more  *[]formSet

	bytes int64  // of its slots
	born  uint64 // when it came into the table, see Cache.born; never changes
	refs  int32  // leases, pins, views and checks in progress
	pins  int32  // the leases and pins among them, which are capped
	gen   uint32 // of its stay in the policy; answers about an earlier one are stale
	used  uint32 // when it was asked for or came, see Cache.tick
	turn  uint32 // when it was last the newest of the window, see Cache.turn
	place uint8
}

func (p *page) formSet(form kvwire.Form) *formSet {
	if p.first.count > 0 && p.first.form == form {
		return &p.first
	}
	if p.more == nil {
		return nil
	}
	for i := range *p.more {
		if f := &(*p.more)[i]; f.form == form {
			return f
		}
	}
	return nil
}

// held returns the shards of p in the given form if all are here, and else
// the reason of the miss. p may be nil.
func (p *page) held(form kvwire.Form) ([]object, kvwire.Reason) {
	if p == nil {
		return nil, kvwire.ReasonAbsent
	}
	f := p.formSet(form)
	if f == nil {
		return nil, kvwire.ReasonLayout
	}
	if !f.complete() {
		return nil, kvwire.ReasonIncomplete
	}
	return f.objs, kvwire.ReasonNone
}

// add puts an object into its form set, which it makes if there is none.
// The caller has checked that the shard is not there.
func (p *page) add(form kvwire.Form, count uint16, o object) *formSet {
	f := p.formSet(form)
	switch {
	case f != nil:
	case p.first.count == 0:
		f = &p.first
	default:
		if p.more == nil {
			p.more = new([]formSet)
		}
		*p.more = append(*p.more, formSet{})
		f = &(*p.more)[len(*p.more)-1]
	}
	f.form, f.count = form, count
	i, _ := f.find(o.shard)
	f.objs = slices.Insert(f.objs, i, o)
	o.slot.own(p)
	return f
}

// forms calls fn for each form set.
func (p *page) forms(fn func(*formSet)) {
	if p.first.count > 0 {
		fn(&p.first)
	}
	if p.more == nil {
		return
	}
	for i := range *p.more {
		fn(&(*p.more)[i])
	}
}

func (p *page) name() kvwire.PageKey {
	return kvwire.PageKey{Tenant: p.space.tenant, Namespace: p.space.ns, Hash: p.hash}
}

// Space is the pages of one tenant in one namespace.
type Space struct {
	c      *Cache
	tenant string
	ns     kvwire.Namespace
	salt   uint64

	// Guarded by Cache.mu.
	pages map[kvwire.Hash]*page
	most  int    // pages since the map was made
	epoch uint64 // counts resets
}

// enter puts a page into the map. It needs c.mu.
func (s *Space) enter(p *page) {
	s.pages[p.hash] = p
	s.most = max(s.most, len(s.pages))
}

const (
	// leastMap is how many pages a map has held that is worth making smaller.
	leastMap = 1 << 10
	// mostCopied bounds how long that takes: some 10 ms.
	mostCopied = 1 << 15
)

// leave takes a page out of the map. A map never gives memory back, and spaces
// may fill the cache one after the other, so one that is nearly empty is copied.
// It needs c.mu.
func (s *Space) leave(p *page) {
	if s.pages[p.hash] != p {
		return
	}
	delete(s.pages, p.hash)
	if s.most < leastMap || len(s.pages) > min(s.most/8, mostCopied) {
		return
	}
	s.most = len(s.pages)
	old := s.pages
	s.pages = make(map[kvwire.Hash]*page, len(old))
	maps.Copy(s.pages, old)
}

// Tenant returns the tenant's name.
func (s *Space) Tenant() string { return s.tenant }

// Namespace returns the namespace.
func (s *Space) Namespace() kvwire.Namespace { return s.ns }

// key names a page for the policy. The hash is seeded per process: who
// chooses content hashes cannot make two pages share a key.
func (s *Space) key(h *kvwire.Hash) uint64 { return maphash.Bytes(s.c.seed, h[:]) ^ s.salt }

// matchStep bounds how long Match holds the lock at a time, in hashes.
const matchStep = 256

// Match returns how many leading hashes are held complete in the given form,
// and why the next one is not ([kvwire.ReasonNone] when all are). Nothing is
// pinned: the answer may be out of date when it arrives. Every hash counts as
// looked up for the policy, found or not, so one request is one Match.
func (s *Space) Match(form kvwire.Form, hashes []kvwire.Hash) (n int, why kvwire.Reason) {
	if len(hashes) > fewHashes {
		return s.matchMany(form, hashes)
	}
	var keys [fewHashes]lookup
	return s.match(form, hashes, keys[:])
}

// fewHashes are matched without the memory that many need, whose clearing
// alone would take longer.
const fewHashes = 8

func (s *Space) matchMany(form kvwire.Form, hashes []kvwire.Hash) (int, kvwire.Reason) {
	var keys [matchStep]lookup
	return s.match(form, hashes, keys[:])
}

func (s *Space) match(form kvwire.Form, hashes []kvwire.Hash, keys []lookup) (n int, why kvwire.Reason) {
	c := s.c
	own := c.mu.reader()
	for rest := hashes; len(rest) > 0; {
		step := rest[:min(len(keys), len(rest))]
		rest = rest[len(step):]
		i := 0
		if why == kvwire.ReasonNone {
			own.RLock()
			for ; i < len(step); i++ {
				p := s.pages[step[i]]
				if _, why = p.held(form); why != kvwire.ReasonNone {
					break
				}
				keys[i] = lookup{p.key, p}
			}
			own.RUnlock()
			n += i
		}
		for ; i < len(step); i++ {
			keys[i] = lookup{s.key(&step[i]), nil}
		}
		c.touches.add(own.index, keys[:len(step)])
	}
	own.lookups.Add(uint64(len(hashes)))
	own.hits.Add(uint64(n))
	c.mu.leave(own)
	c.counters.misses.add(why)
	return n, why
}

// Has reports whether one page is held complete in the given form. It does
// not count as a lookup.
func (s *Space) Has(form kvwire.Form, h kvwire.Hash) bool {
	own := s.c.mu.reader()
	own.RLock()
	_, why := s.pages[h].held(form)
	own.RUnlock()
	s.c.mu.leave(own)
	return why == kvwire.ReasonNone
}

// Reset drops every page of the space and returns how many those were. Bytes
// that are leased, pinned or viewed stay until they are let go. A store that
// began before the reset and ends after it is refused with
// [kvwire.ReasonReset].
func (s *Space) Reset() int {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0
	}
	s.epoch++
	old := s.pages
	s.pages, s.most = make(map[kvwire.Hash]*page), 0
	n := 0
	for _, p := range old {
		c.drop(p, kvwire.ReasonDropped)
		if n++; n%matchStep == 0 { // nobody can find them any more: let others in
			c.mu.Unlock()
			c.mu.Lock()
		}
	}
	c.serve()
	c.wake()
	return n
}

// Range calls fn for every page that is held complete, once for each form, in
// no order and without any lock, until fn returns false. Pages that come or
// go meanwhile may be missed or named; subscribe first to see those.
func (c *Cache) Range(fn func(kvwire.PageKey, kvwire.Form) bool) {
	c.mu.RLock()
	spaces := make([]*Space, 0, len(c.spaces))
	for _, s := range c.spaces {
		spaces = append(spaces, s)
	}
	c.mu.RUnlock()
	type entry struct {
		hash kvwire.Hash
		form kvwire.Form
	}
	var list []entry
	for _, s := range spaces {
		list = list[:0]
		c.mu.RLock()
		for h, p := range s.pages {
			p.forms(func(f *formSet) {
				if f.complete() && !f.local() {
					list = append(list, entry{h, f.form})
				}
			})
		}
		c.mu.RUnlock()
		for _, e := range list {
			if !fn(kvwire.PageKey{Tenant: s.tenant, Namespace: s.ns, Hash: e.hash}, e.form) {
				return
			}
		}
	}
}

// drop takes a page out of the table. Its slots are freed now or when the
// last reference goes. It needs c.mu.
func (c *Cache) drop(p *page, why kvwire.Reason) {
	switch p.place {
	case inWindow:
		c.window.remove(p)
	case inPolicy:
		c.policyBytes -= p.bytes
		c.removed = append(c.removed, p.key)
	case gone:
		return
	}
	c.forget(p, why)
}

// forget is drop for a page that is in neither window nor policy any more.
func (c *Cache) forget(p *page, why kvwire.Reason) {
	p.place = gone
	p.gen++
	p.orphan()
	p.space.leave(p)
	c.pages--
	c.resident -= p.bytes
	p.forms(func(f *formSet) {
		c.objects -= int64(len(f.objs))
		if f.complete() && !f.local() {
			c.feed.put(change{page: p, form: f.form, kind: Removed, reason: why})
		}
	})
	if guard.evictionCount() {
		c.counters.evictions.add(why)
	}
	if mayFree(p) {
		c.freeSlots(p)
	}
}

func (c *Cache) ref(p *page) { p.refs++ }

// unref lets go of one reference; it needs c.mu.
func (c *Cache) unref(p *page) {
	p.refs--
	if p.place == gone && mayFree(p) {
		c.freeSlots(p)
		c.serve()
	}
}

func (c *Cache) pin(p *page) {
	if p.pins++; p.pins == 1 {
		c.pinned += p.bytes
	}
	c.ref(p)
}

func (c *Cache) unpin(p *page) {
	if p.pins--; p.pins == 0 {
		c.pinned -= p.bytes
	}
	c.unref(p)
}

// freeSlots gives the slots of a page that left the table back.
func (c *Cache) freeSlots(p *page) {
	p.forms(func(f *formSet) {
		for i := range f.objs {
			if o := &f.objs[i]; o.bad {
				o.slot.own(nil)
				c.quarantine.put(c.alloc, o.slot)
			} else {
				c.alloc.release(o.slot)
			}
		}
		f.objs = nil
	})
	p.first.count, p.more = 0, nil
}
