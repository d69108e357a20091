package cache

import (
	"slices"
	"time"
)

// waiter is a store that waits for a slot.
type waiter struct {
	size  int64
	slot  slot
	ready chan struct{} // closed when slot is set
}

// allocate returns a slot for n bytes; if none is free it asks the owner and
// waits for AllocWait at most.
func (c *Cache) allocate(n int64) (slot, bool) {
	c.mu.Lock()
	at, ok := c.alloc.alloc(n)
	if ok {
		c.mu.Unlock()
		return at, true
	}
	w := &waiter{size: n, ready: make(chan struct{})}
	c.waiting = append(c.waiting, w)
	c.mu.Unlock()
	c.counters.waits.Add(1)
	c.wake()

	timer := time.NewTimer(c.cfg.AllocWait)
	defer timer.Stop()
	select {
	case <-w.ready:
		return w.slot, true
	case <-timer.C:
	case <-c.stop:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.slot.slab != nil {
		return w.slot, true
	}
	i := slices.Index(c.waiting, w)
	c.waiting = slices.Delete(c.waiting, i, i+1)
	return slot{}, false
}

// serve gives waiting stores slots, first come first served for each size. It
// needs c.mu and is called wherever slots may have become free.
func (c *Cache) serve() {
	if len(c.waiting) == 0 {
		return
	}
	rest := c.waiting[:0]
	for _, w := range c.waiting {
		at, ok := c.alloc.alloc(w.size)
		if !ok {
			rest = append(rest, w)
			continue
		}
		w.slot = at
		close(w.ready)
	}
	clear(c.waiting[len(rest):])
	c.waiting = rest
}
