package cache

import "membrane/kvwire"

// A page is of use only after all pages before it in its prompt. The cache
// learns from requests which those are: a request names its pages in their
// order. So of a prompt the last pages leave first, whoever is asked who leaves.

// adopt notes that p follows parent; it needs c.mu.
func (p *page) adopt(parent *page) {
	if p.parent != nil || parent == nil || parent == p || parent.place == gone || p.place == gone {
		return
	}
	if p.child != nil {
		// A client may name pages in any order; a ring would have no last page.
		for a := parent; a != nil; a = a.parent {
			if a == p {
				return
			}
		}
	}
	p.parent, p.younger = parent, parent.child
	if p.younger != nil {
		p.younger.elder = p
	}
	parent.child = p
}

// orphan takes p out of its prompt, as it leaves the table.
func (p *page) orphan() {
	switch {
	case p.elder != nil:
		p.elder.younger = p.younger
	case p.parent != nil:
		p.parent.child = p.younger
	}
	if p.younger != nil {
		p.younger.elder = p.elder
	}
	p.parent, p.elder, p.younger = nil, nil, nil
	for k := p.child; k != nil; {
		next := k.younger
		k.parent, k.elder, k.younger = nil, nil, nil
		k = next
	}
	p.child = nil
}

// maxKin bounds how many pages after the same page are looked at.
const maxKin = 64

// childIn returns a page after p that is in the given place, or nil.
func (p *page) childIn(place uint8) *page {
	n := 0
	for k := p.child; k != nil && n < maxKin; k = k.younger {
		if k.place == place {
			return k
		}
		n++
	}
	return nil
}

// expected is a page that a request named and that was not here.
type expected struct {
	prev *expected // the one before it, if that was not here either
	page *page     // it, once it was stored; or the page before it, without a key
}

// maxExpected bounds how many such pages are remembered (some 80 bytes each).
const maxExpected = 1 << 15

// lineage remembers who comes before pages that are not here yet.
type lineage struct {
	awaited map[uint64]*expected
	ring    []uint64
	next    int
}

func (g *lineage) init() { g.awaited = make(map[uint64]*expected) }

// await remembers that the page of key comes after prev. There is one entry of
// each key, which all requests share: with one of each request, prompts that
// begin alike would keep that beginning as often as there are of them.
func (g *lineage) await(key uint64, prev *expected) *expected {
	e := g.awaited[key]
	if e == nil {
		e = new(expected)
		g.remember(key)
		g.awaited[key] = e
	}
	if prev != nil {
		e.prev = prev
	}
	return e
}

// remember puts key into the ring, where the oldest one may have to leave.
func (g *lineage) remember(key uint64) {
	if len(g.ring) < maxExpected {
		g.ring = append(g.ring, key)
		return
	}
	if old := g.awaited[g.ring[g.next]]; old != nil {
		old.prev = nil // later ones refer to it
		delete(g.awaited, g.ring[g.next])
	}
	g.ring[g.next] = key
	g.next = (g.next + 1) % maxExpected
}

// arrived returns the page before one that is here now, or nil.
func (g *lineage) arrived(p *page) *page {
	e := g.awaited[p.key]
	if e == nil {
		return nil
	}
	delete(g.awaited, p.key)
	e.page = p
	before := e.prev
	e.prev = nil
	if before == nil {
		return nil
	}
	return before.page
}

// trail is how far a request's pages were told to the window.
type trail struct {
	last *expected
	page *page
}

// asked tells of one page that a request named after those of the trail, and
// of its key where it is not here. It needs c.mu.
func (c *Cache) asked(t *trail, p *page, key uint64) {
	if p != nil {
		c.use(p)
		p.adopt(t.page)
		t.page, t.last = p, nil
		return
	}
	if t.last == nil && t.page != nil {
		t.last = &expected{page: t.page}
	}
	t.last = c.lineage.await(key, t.last)
	t.page = nil
}

// askedRest is asked for pages of which at least the first is not here.
func (c *Cache) askedRest(s *Space, t *trail, hashes []kvwire.Hash, keys []uint64) {
	for i := range hashes {
		c.asked(t, s.pages[hashes[i]], keys[i])
	}
}
