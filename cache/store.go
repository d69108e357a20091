package cache

import (
	"fmt"

	"membrane/kvwire"
)

// PutResult says what became of a store. Exactly one of Stored, Exists and
// Reason (not [kvwire.ReasonNone]) is set.
type PutResult struct {
	// Stored: the bytes are in the arena and can be read.
	Stored bool
	// Exists: the object was here already. The first writer wins.
	Exists bool
	// Reason: why the store was refused.
	Reason kvwire.Reason
	// Sum is the checksum of the resident bytes when Stored or Exists.
	Sum kvwire.Checksum
}

// Put stores bytes that lie elsewhere: it copies them into the arena, then
// computes the checksum over its own copy, signs it and publishes it. So src
// may change meanwhile without harm to what is stored. It fails for a shard
// outside its count and for an empty object; everything else that can go wrong
// is a reason.
func (s *Space) Put(shard kvwire.Shard, form kvwire.Form, h kvwire.Hash, src []byte) (PutResult, error) {
	c := s.c
	c.mu.RLock()
	open := c.enter()
	c.mu.RUnlock()
	if !open {
		return c.refuse(kvwire.ReasonDraining), nil
	}
	defer c.inside.Done()
	sl, res, err := s.Reserve(shard, form, h, int64(len(src)))
	if sl == nil {
		return res, err
	}
	checked := sl.Bytes()
	if !guard.ownCopy() {
		checked = src
	}
	copy(sl.Bytes(), src)
	sum := kvwire.Sum(checked)
	auth := c.auth.Sign(sl.Key(), uint64(len(src)), sum)
	return sl.publish(sum, auth), nil
}

// Slot is room in the arena for one object that is being received. It ends
// with Publish or Abort.
type Slot struct {
	space *Space
	shard kvwire.Shard
	form  kvwire.Form
	hash  kvwire.Hash
	epoch uint64
	at    slot
	b     []byte

	summed bool // sum is that of b
	sum    kvwire.Checksum
}

// Reserve returns room for an object of length bytes, or nil and a result
// that says that the object exists or why it is refused. It waits for room as
// long as Config.AllocWait says. Until Publish nobody can see the object, and
// several goroutines may hold a slot for the same one.
func (s *Space) Reserve(shard kvwire.Shard, form kvwire.Form, h kvwire.Hash, length int64) (*Slot, PutResult, error) {
	return s.reserve(shard, form, h, length, false)
}

// reserve is Reserve, with anew also for an object that is there.
func (s *Space) reserve(shard kvwire.Shard, form kvwire.Form, h kvwire.Hash, length int64, anew bool) (*Slot, PutResult, error) {
	if shard.Count < 1 || shard.Count > kvwire.MaxShards || shard.Index >= shard.Count {
		return nil, PutResult{}, fmt.Errorf("cannot store page %s: shard %s is not one of 1 to %d", h, shard, kvwire.MaxShards)
	}
	if length < 1 {
		return nil, PutResult{}, fmt.Errorf("cannot store page %s: length %d is below 1", h, length)
	}
	c := s.c
	if length > min(kvwire.MaxObject, c.cfg.Budget) {
		return nil, c.refuse(kvwire.ReasonTooLarge), nil
	}
	c.mu.RLock()
	epoch, closed := s.epoch, c.closed
	sum, exists, why := s.find(shard, form, h)
	c.mu.RUnlock()
	switch {
	case closed:
		return nil, c.refuse(kvwire.ReasonDraining), nil
	case exists && !anew:
		c.counters.exists.Add(1)
		return nil, PutResult{Exists: true, Sum: sum}, nil
	case why != kvwire.ReasonNone:
		return nil, c.refuse(why), nil
	}
	at, ok := c.allocate(length)
	if !ok {
		return nil, c.refuse(kvwire.ReasonOverBudget), nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		c.alloc.release(at)
		return nil, c.refuse(kvwire.ReasonDraining), nil
	}
	c.open++
	return &Slot{space: s, shard: shard, form: form, hash: h, epoch: epoch, at: at, b: c.arena.Bytes(at.off, length)}, PutResult{}, nil
}

// find looks for one object. A form that is here with another number of
// shards is a layout mismatch. It needs c.mu, for reading at least.
func (s *Space) find(shard kvwire.Shard, form kvwire.Form, h kvwire.Hash) (kvwire.Checksum, bool, kvwire.Reason) {
	p := s.pages[h]
	if p == nil {
		return 0, false, kvwire.ReasonNone
	}
	f := p.formSet(form)
	if f == nil {
		return 0, false, kvwire.ReasonNone
	}
	if f.count != shard.Count {
		return 0, false, kvwire.ReasonLayout
	}
	if i, ok := f.find(shard.Index); ok {
		return f.objs[i].sum, true, kvwire.ReasonNone
	}
	return 0, false, kvwire.ReasonNone
}

func (c *Cache) refuse(why kvwire.Reason) PutResult {
	c.counters.refused.add(why)
	return PutResult{Reason: why}
}

// Key names the object that the slot is for.
func (sl *Slot) Key() kvwire.ObjectKey {
	return kvwire.ObjectKey{
		PageKey: kvwire.PageKey{Tenant: sl.space.tenant, Namespace: sl.space.ns, Hash: sl.hash},
		Shard:   sl.shard,
		Form:    sl.form,
	}
}

// Bytes returns the room, in place. It holds whatever was there before.
func (sl *Slot) Bytes() []byte { return sl.b }

// Receive fills the room by calls of read, which must fill what they get, and
// takes the checksum of each piece as it comes, while the processor's cache has
// it: Publish then need not read it from memory once more. After an error the
// room is as Reserve gave it.
func (sl *Slot) Receive(read func(piece []byte) error) error {
	var sum kvwire.Summer
	for rest := sl.b; len(rest) > 0; {
		piece := rest[:min(len(rest), PartSize)]
		if err := read(piece); err != nil {
			return err
		}
		sum.Add(piece)
		rest = rest[len(piece):]
	}
	sl.sum, sl.summed = sum.Sum(), true
	return nil
}

// right reports whether the room holds bytes of the given checksum.
func (sl *Slot) right(want kvwire.Checksum) bool {
	if sl.summed {
		return sl.sum == want
	}
	return intact(sl.b, want, false)
}

// Publish checks the received bytes against the checksum and authenticator
// that came with them and makes them visible under their name. Bytes that fail
// are refused with [kvwire.ReasonCorrupt] and their room is freed.
func (sl *Slot) Publish(want kvwire.Checksum, auth kvwire.Auth) PutResult {
	c := sl.space.c
	c.counters.verified.Add(1)
	bad := guard.publishSum() && !sl.right(want)
	if bad || guard.publishAuth() && !c.auth.Verify(sl.Key(), uint64(len(sl.b)), want, auth) {
		sl.Abort()
		return c.refuse(kvwire.ReasonCorrupt)
	}
	return sl.publish(want, auth)
}

// Abort gives the room back. It does nothing after Publish or Abort.
func (sl *Slot) Abort() {
	if sl.b == nil {
		return
	}
	c := sl.space.c
	c.mu.Lock()
	defer c.mu.Unlock()
	c.abort(sl)
}

func (c *Cache) abort(sl *Slot) {
	sl.b = nil
	c.open--
	c.alloc.release(sl.at)
	c.serve()
}

// publish enters the object into the table unless it is there.
func (sl *Slot) publish(sum kvwire.Checksum, auth kvwire.Auth) PutResult {
	return sl.publishIf(object{sum: sum, auth: auth}, IfAbsent, nil)
}

// publishIf enters the object, of which o has the checksum, into the table if
// the condition holds for what is there under its name; over is the page that
// ifSame means.
func (sl *Slot) publishIf(o object, cond Condition, over *page) PutResult {
	s, c := sl.space, sl.space.c
	c.mu.Lock()
	defer c.mu.Unlock()
	had, exists, why := s.find(sl.shard, sl.form, sl.hash)
	switch {
	case c.closed:
		why = kvwire.ReasonDraining
	case !sameEpoch(s, sl.epoch):
		why = kvwire.ReasonReset
	case why != kvwire.ReasonNone:
	case !exists && (cond == IfHeld || cond == ifSame):
		why = kvwire.ReasonAbsent
	case exists && (cond == IfAbsent || cond == ifSame && s.pages[sl.hash] != over):
		c.abort(sl)
		c.counters.exists.Add(1)
		return PutResult{Exists: true, Sum: had}
	case exists && guard.replace():
		// In one step with the new page: nobody finds the name empty.
		c.drop(s.pages[sl.hash], kvwire.ReasonReplaced)
	}
	if why != kvwire.ReasonNone {
		c.abort(sl)
		return c.refuse(why)
	}
	o.slot, o.len, o.shard = sl.at, uint32(len(sl.b)), sl.shard.Index
	c.enterObject(s, sl, o)
	sl.b = nil
	c.open--
	c.counters.puts.Add(1)
	if c.unsettled() {
		c.wake()
	}
	return PutResult{Stored: true, Sum: o.sum}
}

// enterObject adds an object to its page, which then is new in the window or
// stays where it is in it. A page in the policy goes back to the window,
// because its cost changed. It needs c.mu.
func (c *Cache) enterObject(s *Space, sl *Slot, o object) {
	p := s.pages[sl.hash]
	switch {
	case p == nil:
		c.born++
		p = &page{space: s, hash: sl.hash, key: s.key(&sl.hash), born: c.born, place: gone}
		s.enter(p)
		c.returned(p.key, o.slot.size())
		c.pages++
	case p.place == inWindow:
		c.window.bytes += o.slot.size()
	case p.place == inPolicy:
		c.policyBytes -= p.bytes
		c.removed = append(c.removed, p.key)
		p.gen++
		p.place = gone
	}
	f := p.add(sl.form, sl.shard.Count, o)
	p.bytes += o.slot.size()
	if p.pins > 0 {
		c.pinned += o.slot.size()
	}
	if p.place == gone {
		c.pushNewest(p)
	}
	p.adopt(c.lineage.arrived(p))
	c.objects++
	c.resident += o.slot.size()
	if f.complete() && !f.local() {
		c.feed.put(change{page: p, form: f.form, kind: Added})
	}
}
