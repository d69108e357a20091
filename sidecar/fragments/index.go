package fragments

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

type pageID struct {
	key  kvwire.PageKey
	form kvwire.Form
}

type payloadID struct{ tenant, hash string }

// index finds fragments by payload hash. It follows the cache: what has left
// there is forgotten here.
type index struct {
	held func(pageID) bool

	mu     sync.Mutex
	byPage map[pageID]*entry
	byHash map[payloadID]pageID
}

// entry is a fragment and when its bytes were last found to be right.
type entry struct {
	Fragment
	checked atomic.Int64 // Unix nanoseconds
}

// recheckAfter is how old a check may be when an answer says that a fragment is
// here. Whoever reads the bytes has them checked in any case.
const recheckAfter = time.Second

// stale reports whether the bytes need a look at now.
func (e *entry) stale(now time.Time) bool {
	return now.UnixNano()-e.checked.Load() >= int64(recheckAfter)
}

func newIndex(held func(pageID) bool) *index {
	return &index{held: held, byPage: make(map[pageID]*entry), byHash: make(map[payloadID]pageID)}
}

// follow takes a change of the cache. News may be old: a page that left and
// came back is still held.
func (x *index) follow(e cache.Event) {
	switch e.Kind {
	case cache.Removed:
		x.recheck(pageID{e.Key, e.Form})
	case cache.Lost:
		x.mu.Lock()
		all := make([]pageID, 0, len(x.byPage))
		for id := range x.byPage {
			all = append(all, id)
		}
		x.mu.Unlock()
		for _, id := range all {
			x.recheck(id)
		}
	}
}

// recheck forgets a page that is not held.
func (x *index) recheck(id pageID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f, known := x.byPage[id]
	if !known || x.held(id) {
		return
	}
	delete(x.byPage, id)
	payload := payloadID{f.Tenant, f.PayloadRef}
	if x.byHash[payload] == id {
		delete(x.byHash, payload)
	}
}

// add enters a fragment that was held a moment ago.
func (x *index) add(id pageID, f Fragment) {
	x.mu.Lock()
	x.byPage[id] = &entry{Fragment: f}
	x.byHash[payloadID{f.Tenant, f.PayloadRef}] = id
	x.mu.Unlock()
	x.recheck(id) // it may have left before it was entered
}

// page returns what is known of a page.
func (x *index) page(id pageID) (Fragment, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e, ok := x.byPage[id]
	if !ok {
		return Fragment{}, false
	}
	return e.Fragment, true
}

// payload returns the page with a payload hash; its entry is nil if there is
// none.
func (x *index) payload(tenant, hash string) (pageID, *entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	id, ok := x.byHash[payloadID{tenant, hash}]
	if !ok {
		return pageID{}, nil
	}
	return id, x.byPage[id]
}

func (x *index) len() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.byPage)
}

// list returns a tenant's fragments whose storage key is above after, by
// storage key, at most limit of them, and whether there are more.
func (x *index) list(tenant, after string, limit int) ([]Fragment, bool) {
	x.mu.Lock()
	var all []Fragment
	for payload, id := range x.byHash {
		if payload.tenant == tenant {
			if e := x.byPage[id]; e.StorageKey() > after {
				all = append(all, e.Fragment)
			}
		}
	}
	x.mu.Unlock()
	slices.SortFunc(all, func(a, b Fragment) int { return strings.Compare(a.StorageKey(), b.StorageKey()) })
	if limit > 0 && len(all) > limit {
		return all[:limit], true
	}
	return all, false
}
