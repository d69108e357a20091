package cache

import (
	"slices"

	"membrane/kvwire"
)

// quarantine keeps the slots of corrupt objects for inspection, up to a limit
// and oldest first out. It is guarded by Cache.mu.
type quarantine struct {
	limit int64
	bytes int64
	slots []slot
}

func (q *quarantine) put(a *allocator, s slot) {
	if guard.quarantineCap() && s.size() > q.limit {
		a.release(s)
		return
	}
	for guard.quarantineCap() && len(q.slots) > 0 && q.bytes+s.size() > q.limit {
		q.release(a, q.slots[0])
		q.slots = q.slots[1:]
	}
	q.bytes += s.size()
	s.slab.bad++
	q.slots = append(q.slots, s)
}

// release gives a slot back that is kept.
func (q *quarantine) release(a *allocator, s slot) {
	q.bytes -= s.size()
	s.slab.bad--
	a.release(s)
}

// clear gives back what is kept of a slab.
func (q *quarantine) clear(a *allocator, of *slab) {
	q.slots = slices.DeleteFunc(q.slots, func(s slot) bool {
		if s.slab != of {
			return false
		}
		q.release(a, s)
		return true
	})
}

// condemn takes a page whose object failed its checksum out of the table and
// marks the object. It needs c.mu and a reference on p.
func (c *Cache) condemn(p *page, form kvwire.Form, shard int) {
	f := p.formSet(form)
	if f.objs[shard].bad {
		return
	}
	f.objs[shard].bad = true
	c.counters.corrupt.Add(1)
	c.drop(p, kvwire.ReasonCorrupt)
}
