package cache

import "membrane/kvwire"

// View is one resident object, held in place until Close.
type View struct {
	c    *Cache
	page *page
	b    []byte
	sum  kvwire.Checksum
	auth kvwire.Auth
}

// View returns an object of a page that is held complete in the given form,
// or nil and the reason of the miss. With verify the bytes are checked first;
// bytes that fail are quarantined and the miss is [kvwire.ReasonCorrupt]. A
// view of shard 0 counts as a lookup of its page.
func (s *Space) View(shard kvwire.Shard, form kvwire.Form, h kvwire.Hash, verify bool) (*View, kvwire.Reason) {
	c := s.c
	if shard.Index == 0 {
		c.touches.addKeys(0, []uint64{s.key(&h)})
	}
	c.mu.Lock()
	if !c.enter() {
		c.mu.Unlock()
		return nil, c.miss(kvwire.ReasonDraining)
	}
	defer c.inside.Done()
	p := s.pages[h]
	objs, why := p.held(form)
	if why == kvwire.ReasonNone && (len(objs) != int(shard.Count) || shard.Index >= shard.Count) {
		why = kvwire.ReasonLayout
	}
	if why != kvwire.ReasonNone {
		c.mu.Unlock()
		return nil, c.miss(why)
	}
	o := &objs[shard.Index]
	v := &View{c: c, page: p, b: c.arena.Bytes(o.slot.off, int64(o.len)), sum: o.sum, auth: o.auth}
	c.ref(p)
	if shard.Index == 0 {
		c.use(p)
	}
	c.open++
	c.mu.Unlock()
	if verify {
		c.counters.verified.Add(1)
		if !intact(v.b, v.sum) {
			c.mu.Lock()
			c.condemn(p, form, int(shard.Index))
			c.mu.Unlock()
			v.Close()
			return nil, c.miss(kvwire.ReasonCorrupt)
		}
	}
	c.counters.views.Add(1)
	return v, kvwire.ReasonNone
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

// Close lets go of the object. It does nothing the second time.
func (v *View) Close() {
	if v.page == nil {
		return
	}
	v.c.mu.Lock()
	defer v.c.mu.Unlock()
	v.c.open--
	v.c.unref(v.page)
	v.page, v.b = nil, nil
}
