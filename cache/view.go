package cache

import "membrane/kvwire"

// View is one resident object, held in place until Close.
type View struct {
	c    *Cache
	page *page
	b    []byte
	sum  kvwire.Checksum
	auth kvwire.Auth
	form kvwire.Form
	// shard of page.
	shard uint16
	parts bool // sum is of parts
	pin   bool // counts for the cap of leases and pins
}

// View returns an object of a page that is held complete in the given form,
// or nil and the reason of the miss. With verify the bytes are checked first;
// bytes that fail are quarantined and the miss is [kvwire.ReasonCorrupt]. A
// view of shard 0 counts as a lookup of its page.
func (s *Space) View(shard kvwire.Shard, form kvwire.Form, h kvwire.Hash, verify bool) (*View, kvwire.Reason) {
	v := new(View)
	if why := s.view(v, shard, form, h, verify, false); why != kvwire.ReasonNone {
		return nil, why
	}
	return v, kvwire.ReasonNone
}

// Borrow is View for a reader whose pace somebody else decides, into a closed or
// zero v: its page counts for the cap of leases and pins until Close, and
// beyond the cap the miss is [kvwire.ReasonPinned].
func (s *Space) Borrow(v *View, shard kvwire.Shard, form kvwire.Form, h kvwire.Hash, verify bool) kvwire.Reason {
	return s.view(v, shard, form, h, verify, true)
}

func (s *Space) view(v *View, shard kvwire.Shard, form kvwire.Form, h kvwire.Hash, verify, pin bool) kvwire.Reason {
	c := s.c
	if shard.Index == 0 {
		c.touches.addKeys(0, []uint64{s.key(&h)})
	}
	c.mu.Lock()
	if !c.enter() {
		c.mu.Unlock()
		return c.miss(kvwire.ReasonDraining)
	}
	defer c.inside.Done()
	p := s.pages[h]
	objs, why := p.held(form)
	if why == kvwire.ReasonNone && (len(objs) != int(shard.Count) || shard.Index >= shard.Count) {
		why = kvwire.ReasonLayout
	}
	if pin && why == kvwire.ReasonNone && !c.mayPin(p, nil, 0) {
		why = kvwire.ReasonPinned
	}
	if why != kvwire.ReasonNone {
		c.mu.Unlock()
		return c.miss(why)
	}
	o := &objs[shard.Index]
	*v = View{c: c, page: p, b: c.arena.Bytes(o.slot.off, int64(o.len)), sum: o.sum, auth: o.auth, form: form, shard: shard.Index, parts: o.parts, pin: pin}
	if pin {
		c.pin(p)
	} else {
		c.ref(p)
	}
	if shard.Index == 0 {
		c.use(p)
	}
	c.open++
	c.mu.Unlock()
	if verify {
		if !v.judge(intact(v.b, v.sum, v.parts)) {
			v.Close()
			return kvwire.ReasonCorrupt
		}
	}
	c.counters.views.Add(1)
	return kvwire.ReasonNone
}

func (c *Cache) miss(why kvwire.Reason) kvwire.Reason {
	c.counters.misses.add(why)
	return why
}

// Bytes returns the object's bytes, in place and not to be changed.
func (v *View) Bytes() []byte { return v.b }

// Sum returns the checksum with which the object was stored.
func (v *View) Sum() kvwire.Checksum { return v.sum }

// Auth returns the authenticator with which the object was stored.
func (v *View) Auth() kvwire.Auth { return v.auth }

// Local reports whether the object is this node's alone: see [PartSums].
func (v *View) Local() bool { return v.parts }

// Check is for a reader who looks at the bytes anyway and has computed their
// checksum with [PartSums] as he did, if it was stored so. It reports whether
// the bytes are right; wrong ones are quarantined and counted as a miss.
func (v *View) Check(sum kvwire.Checksum) bool { return v.judge(sum == v.sum) }

// judge counts a checksum that was computed, and condemns the object if it was
// wrong.
func (v *View) judge(right bool) bool {
	v.c.counters.verified.Add(1)
	if right {
		return true
	}
	v.c.mu.Lock()
	v.c.condemn(v.page, v.form, int(v.shard))
	v.c.mu.Unlock()
	v.c.miss(kvwire.ReasonCorrupt)
	return false
}

// Close lets go of the object. It does nothing the second time.
func (v *View) Close() {
	if v.page == nil {
		return
	}
	v.c.mu.Lock()
	defer v.c.mu.Unlock()
	v.c.open--
	if v.pin {
		v.c.unpin(v.page)
	} else {
		v.c.unref(v.page)
	}
	v.page, v.b = nil, nil
}
