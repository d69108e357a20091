package cache

import (
	"fmt"

	"membrane/kvwire"
)

// Condition says what must be there under a name for new bytes to take it.
type Condition uint8

// The conditions.
const (
	// IfAbsent: nothing. The first writer wins.
	IfAbsent Condition = iota
	// Always: anything.
	Always
	// IfHeld: some object.
	IfHeld
	// ifSame: the object of one view, see [Slot.CommitOver].
	ifSame
)

// whole is the one shard of a page that can be replaced: a page of several
// would be incomplete in between.
var whole = kvwire.Shard{Count: 1}

// ReserveAnew is [Space.Reserve] for a page of one shard that may be there
// already: [Slot.Commit] says what then happens.
func (s *Space) ReserveAnew(form kvwire.Form, h kvwire.Hash, length int64) (*Slot, PutResult, error) {
	return s.reserve(whole, form, h, length, true)
}

// Commit makes bytes that came without a checksum visible under their name,
// with the one of their parts ([PartSums]) that the caller computed over the
// room itself, which nobody may write any more. Where the condition does not
// hold, the room is given back and the result is Exists or
// [kvwire.ReasonAbsent]. Bytes that are replaced stay for those who view or
// lease them; nobody finds neither. Any condition but IfAbsent needs a slot of
// [Space.ReserveAnew].
func (sl *Slot) Commit(cond Condition, sum kvwire.Checksum) PutResult {
	return sl.commit(cond, nil, object{sum: sum, parts: true})
}

// CommitWhole is Commit for an object that peers may have, too: it computes the
// checksum of all bytes at once, over the room itself, and signs it.
func (sl *Slot) CommitWhole(cond Condition) PutResult {
	sum := kvwire.Sum(sl.b)
	return sl.commit(cond, nil, object{sum: sum, auth: sl.space.c.auth.Sign(sl.Key(), uint64(len(sl.b)), sum)})
}

// CommitOver is Commit on the condition that what is there is still the object
// that v views: else Exists or [kvwire.ReasonAbsent].
func (sl *Slot) CommitOver(v *View, sum kvwire.Checksum) PutResult {
	return sl.commit(ifSame, v.page, object{sum: sum, parts: true})
}

func (sl *Slot) commit(cond Condition, over *page, o object) PutResult {
	c := sl.space.c
	if cond != IfAbsent && sl.shard != whole {
		sl.Abort()
		return c.refuse(kvwire.ReasonLayout)
	}
	return sl.publishIf(o, cond, over)
}

// Remove drops one page, whatever it holds, under [kvwire.ReasonDeleted], and
// reports whether it was complete in the form. Bytes that are leased, pinned
// or viewed stay until they are let go. A store that is under way is not
// stopped: it is then a later one.
func (s *Space) Remove(form kvwire.Form, h kvwire.Hash) bool {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	p := s.pages[h]
	if p == nil || c.closed {
		return false
	}
	_, why := p.held(form)
	c.remove(p)
	return why == kvwire.ReasonNone
}

// Remove drops the page of the view, as [Space.Remove] does, if it is still in
// the table. The view stays.
func (v *View) Remove() {
	v.c.mu.Lock()
	defer v.c.mu.Unlock()
	v.c.remove(v.page)
}

func (c *Cache) remove(p *page) {
	c.drop(p, kvwire.ReasonDeleted)
	c.serve()
	if c.unsettled() {
		c.wake()
	}
}

// Head copies the first bytes of an object into dst and returns how many those
// are and how long the object is, or the reason why it is not here. It is no
// lookup, and the bytes are not checked.
func (s *Space) Head(dst []byte, shard kvwire.Shard, form kvwire.Form, h kvwire.Hash) (n int, length int64, why kvwire.Reason) {
	c := s.c
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return 0, 0, kvwire.ReasonDraining
	}
	objs, why := s.pages[h].held(form)
	if why != kvwire.ReasonNone {
		return 0, 0, why
	}
	if len(objs) != int(shard.Count) || shard.Index >= shard.Count {
		return 0, 0, kvwire.ReasonLayout
	}
	o := &objs[shard.Index]
	length = int64(o.len)
	return copy(dst, c.arena.Bytes(o.slot.off, min(length, int64(len(dst))))), length, kvwire.ReasonNone
}

// Len returns how many pages the space holds, incomplete ones included.
func (s *Space) Len() int {
	s.c.mu.RLock()
	defer s.c.mu.RUnlock()
	return len(s.pages)
}

// Hashes appends to dst the pages that keep says yes to, in no order; keep is
// called under the lock and must be quick. Pages that come or go meanwhile may
// be missed or named; every other page is looked at once. It fails when more
// than most were appended.
func (s *Space) Hashes(dst []kvwire.Hash, most int, keep func(*kvwire.Hash) bool) ([]kvwire.Hash, error) {
	c := s.c
	c.mu.RLock()
	defer c.mu.RUnlock()
	n, found := 0, 0
	for h := range s.pages {
		if n++; n%matchStep == 0 { // let stores in
			c.mu.RUnlock()
			c.mu.RLock()
		}
		if !keep(&h) {
			continue
		}
		if found++; found > most {
			return dst, fmt.Errorf("cannot list pages of tenant %q: more than %d", s.tenant, most)
		}
		dst = append(dst, h)
	}
	return dst, nil
}
