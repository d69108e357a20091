package disagg

import (
	"sync"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// Limits of what is kept for handles. One tenant may have half of each.
const (
	// MaxHandles is the most handles that a node keeps.
	MaxHandles = 4096
	// MaxHandleBytes is the most that their manifests take, in bytes.
	MaxHandleBytes = 64 << 20
)

type handleID struct {
	tenant string
	handle kvwire.Hash
}

// entry is a handle that this node knows.
type entry struct {
	body     []byte // the manifest in wire form
	manifest kvwire.Manifest
	expires  time.Time
	pins     []uint64 // of the pages; none once they were pulled, or in a copy
	fresh    bool     // its name named nothing when it was entered
}

// running reports whether the prefill had not ended when the manifest was made.
func (e *entry) running() bool { return e.manifest.Created == 0 }

// handles are the manifests of this node with the pins of their pages.
type handles struct {
	unpin func(id uint64)

	mu      sync.Mutex
	closed  bool
	entries map[handleID]*entry
	bytes   int64
	tenants map[string]*usage
}

type usage struct {
	handles int
	bytes   int64
}

func newHandles(c *cache.Cache) *handles {
	return &handles{
		unpin:   func(id uint64) { _ = c.Unpin(id) }, // it may have timed out just now
		entries: make(map[handleID]*entry), tenants: make(map[string]*usage),
	}
}

// get returns a handle that has not expired, or nil. It is not to be changed.
func (h *handles) get(id handleID, now time.Time) *entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.entries[id]
	if e == nil || !now.Before(e.expires) {
		return nil
	}
	copied := *e
	return &copied
}

// put enters a handle in place of what it named before, or returns the time
// after which there may be room. The pins of an entry that is refused are the
// caller's.
func (h *handles) put(id handleID, e *entry, now time.Time) (retry time.Duration, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.enter(id, e, now)
}

// enter needs h.mu.
func (h *handles) enter(id handleID, e *entry, now time.Time) (retry time.Duration, ok bool) {
	old := h.entries[id]
	size := int64(len(e.body))
	if old != nil {
		size -= int64(len(old.body))
	}
	u := h.tenants[id.tenant]
	if u == nil {
		u = &usage{}
	}
	more := 1
	if old != nil {
		more = 0
	}
	if h.closed || len(h.entries)+more > MaxHandles || u.handles+more > MaxHandles/2 ||
		h.bytes+size > MaxHandleBytes || u.bytes+size > MaxHandleBytes/2 {
		return h.earliest(now), false
	}
	if old != nil {
		h.drop(old)
	}
	e.fresh = old == nil || !now.Before(old.expires)
	h.entries[id] = e
	h.tenants[id.tenant] = u
	h.bytes += size
	u.bytes += size
	u.handles += more
	return 0, true
}

// putCopy enters a handle that was found at a peer, unless there is no room or
// it was prefilled here meanwhile.
func (h *handles) putCopy(id handleID, e *entry, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if old := h.entries[id]; old == nil || !now.Before(old.expires) {
		h.enter(id, e, now)
	}
}

// drop lets go of an entry's pins. It needs h.mu.
func (h *handles) drop(e *entry) {
	for _, pin := range e.pins {
		h.unpin(pin)
	}
	e.pins = nil
}

// remove forgets a handle and unpins its pages, unless it names another entry
// by now.
func (h *handles) remove(id handleID, e *entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.entries[id] == e {
		h.forget(id)
	}
}

// forget needs h.mu.
func (h *handles) forget(id handleID) {
	e := h.entries[id]
	if e == nil {
		return
	}
	h.drop(e)
	delete(h.entries, id)
	h.bytes -= int64(len(e.body))
	u := h.tenants[id.tenant]
	u.bytes -= int64(len(e.body))
	if u.handles--; u.handles == 0 {
		delete(h.tenants, id.tenant)
	}
}

// pulled unpins the pages of a handle; the handle stays until it expires.
func (h *handles) pulled(id handleID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.entries[id]
	if e == nil || len(e.pins) == 0 {
		return false
	}
	h.drop(e)
	return true
}

// sweep forgets what has expired.
func (h *handles) sweep(now time.Time) (expired int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, e := range h.entries {
		if !now.Before(e.expires) {
			h.forget(id)
			expired++
		}
	}
	return expired
}

// retryAfter returns when the next handle expires.
func (h *handles) retryAfter(now time.Time) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.earliest(now)
}

const (
	minRetry = time.Second
	maxRetry = time.Minute
)

// earliest needs h.mu.
func (h *handles) earliest(now time.Time) time.Duration {
	wait := maxRetry
	for _, e := range h.entries {
		wait = min(wait, e.expires.Sub(now))
	}
	return max(wait, minRetry)
}

// close unpins everything and takes nothing more.
func (h *handles) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for id := range h.entries {
		h.forget(id)
	}
}

// counts returns how many handles there are, how many of them have pins, and
// the bytes of their manifests.
func (h *handles) counts() (all, pinned int, bytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.entries {
		if len(e.pins) > 0 {
			pinned++
		}
	}
	return len(h.entries), pinned, h.bytes
}
