package fragments

import (
	"slices"
	"strings"
	"sync"

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
	byPage map[pageID]Fragment
	byHash map[payloadID]pageID
}

func newIndex(held func(pageID) bool) *index {
	return &index{held: held, byPage: make(map[pageID]Fragment), byHash: make(map[payloadID]pageID)}
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
	x.byPage[id] = f
	x.byHash[payloadID{f.Tenant, f.PayloadRef}] = id
	x.mu.Unlock()
	x.recheck(id) // it may have left before it was entered
}

// page returns what is known of a page.
func (x *index) page(id pageID) (Fragment, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f, ok := x.byPage[id]
	return f, ok
}

// payload returns the page with a payload hash.
func (x *index) payload(tenant, hash string) (pageID, Fragment, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	id, ok := x.byHash[payloadID{tenant, hash}]
	return id, x.byPage[id], ok
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
			if f := x.byPage[id]; f.StorageKey() > after {
				all = append(all, f)
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
