package mesh

import (
	"math/rand/v2"
	"sync"

	"membrane/cache"
	"membrane/kvwire"
)

// index is this node's own directory: the digests of the pages that are
// complete here, and what changed lately. It follows the cache's feed.
type index struct {
	epoch uint64
	limit int // pages that are listed at most

	mu       sync.Mutex
	set      map[uint64]struct{}
	unlisted uint64   // pages beyond limit
	version  uint64   // counts changes, from 1
	log      []change // changes after logFrom, up to version
	logFrom  uint64
	changed  chan struct{} // closed at the next change; nil while nobody waits

	baseMu sync.Mutex // makes one filter at a time
	base   *base
}

type change struct {
	digest uint64
	added  bool
}

// base is a filter that was made at some version.
type base struct {
	version uint64
	filter  *filter
}

const (
	minLog = 4 << 10
	maxLog = kvwire.MaxDirectoryDelta
)

func newIndex() *index {
	return &index{
		epoch:   rand.Uint64() | 1,
		limit:   kvwire.MaxDirectoryPages,
		set:     make(map[uint64]struct{}),
		version: 1, logFrom: 1,
	}
}

// follow fills the index from the store and keeps it up to date until cancel.
func (ix *index) follow(s Store) (cancel func()) {
	// Events that come while the pages are listed wait for the lock and are
	// applied on top: whatever the list missed or named too late is put right.
	ix.mu.Lock()
	defer ix.mu.Unlock()
	cancel = s.Subscribe(func(e cache.Event) {
		var now map[uint64]struct{}
		if e.Kind == cache.Lost { // peers need not wait, and no event comes before this one is done
			now = list(s)
		}
		ix.mu.Lock()
		defer ix.mu.Unlock()
		switch e.Kind {
		case cache.Added:
			ix.add(kvwire.DirectoryDigest(e.Key, e.Form))
		case cache.Removed:
			ix.remove(kvwire.DirectoryDigest(e.Key, e.Form))
		case cache.Lost:
			ix.replace(now)
		}
	})
	ix.replace(list(s))
	return cancel
}

// list returns the digests of all pages in the store.
func list(s Store) map[uint64]struct{} {
	now := make(map[uint64]struct{})
	s.Range(func(k kvwire.PageKey, f kvwire.Form) bool {
		now[kvwire.DirectoryDigest(k, f)] = struct{}{}
		return true
	})
	return now
}

// replace makes the list another one. It needs ix.mu.
func (ix *index) replace(now map[uint64]struct{}) {
	for d := range ix.set {
		if _, ok := now[d]; !ok {
			ix.remove(d)
		}
	}
	for d := range now {
		ix.add(d)
	}
}

// add lists a digest. It needs ix.mu.
func (ix *index) add(d uint64) {
	if _, ok := ix.set[d]; ok {
		return
	}
	if len(ix.set) >= ix.limit {
		ix.unlisted++
		return
	}
	ix.set[d] = struct{}{}
	ix.record(change{d, true})
}

// remove takes a digest off the list. It needs ix.mu.
func (ix *index) remove(d uint64) {
	if _, ok := ix.set[d]; !ok {
		return
	}
	delete(ix.set, d)
	ix.record(change{d, false})
}

func (ix *index) record(c change) {
	ix.version++
	ix.log = append(ix.log, c)
	keep := min(max(minLog, len(ix.set)/4), maxLog)
	if len(ix.log) >= 2*keep { // seldom, so that the copy costs little a change
		drop := len(ix.log) - keep
		ix.logFrom += uint64(drop)
		ix.log = append([]change(nil), ix.log[drop:]...)
	}
	if ix.changed != nil {
		close(ix.changed)
		ix.changed = nil
	}
}

// now returns the version, and a channel that is closed when there is a newer
// one.
func (ix *index) now() (version uint64, changed <-chan struct{}) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	if ix.changed == nil {
		ix.changed = make(chan struct{})
	}
	return ix.version, ix.changed
}

// pages returns how many pages are listed and how many were not for want of
// room.
func (ix *index) pages() (listed int, unlisted uint64) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	return len(ix.set), ix.unlisted
}

// answer returns what brings a peer from the given version to this one: the
// changes since, or a whole filter where they are not known or not shorter.
func (ix *index) answer(epoch, version uint64) kvwire.DirectoryAnswer {
	ix.mu.Lock()
	if epoch == ix.epoch && version >= ix.logFrom && version <= ix.version {
		since := ix.log[version-ix.logFrom:]
		if len(since) <= ix.share(minLog) {
			defer ix.mu.Unlock()
			return ix.delta(since)
		}
	}
	ix.mu.Unlock()
	return ix.full()
}

// share returns how many changes are worth telling apart from a whole filter,
// at least least. It needs ix.mu.
func (ix *index) share(least int) int {
	return min(max(least, len(ix.set)/8), kvwire.MaxDirectoryDelta)
}

// full returns a whole filter and what changed since it was made.
func (ix *index) full() kvwire.DirectoryAnswer {
	ix.baseMu.Lock()
	defer ix.baseMu.Unlock()
	ix.mu.Lock()
	defer ix.mu.Unlock()
	// A crowded one with its changes would be asked for again at once.
	if b := ix.base; b == nil || b.version < ix.logFrom || ix.version-b.version > uint64(ix.share(minLog/4)) || b.filter.crowdedBy(len(ix.set)) {
		digests := make([]uint64, 0, len(ix.set))
		for d := range ix.set {
			digests = append(digests, d)
		}
		version := ix.version
		ix.mu.Unlock() // stores go on while the filter is made
		f := newFilter(digests)
		ix.mu.Lock()
		if version < ix.logFrom {
			// More changed meanwhile than the log holds. The asker gets the
			// picture of that version, and the rest when it asks again.
			return kvwire.DirectoryAnswer{Epoch: ix.epoch, Version: version, Full: true, Filter: f.DirectoryFilter}
		}
		ix.base = &base{version, f}
	}
	a := ix.delta(ix.log[ix.base.version-ix.logFrom:])
	a.Full, a.Filter = true, ix.base.filter.DirectoryFilter
	return a
}

// delta nets changes. It needs ix.mu.
func (ix *index) delta(since []change) kvwire.DirectoryAnswer {
	a := kvwire.DirectoryAnswer{Epoch: ix.epoch, Version: ix.version}
	// Adds and removes of one digest alternate, so only an odd number of them
	// leaves a change, and the last says which.
	last := make(map[uint64]int, len(since))
	for _, c := range since {
		last[c.digest]++
	}
	for i := len(since) - 1; i >= 0; i-- {
		c := since[i]
		if last[c.digest]%2 == 1 {
			if c.added {
				a.Added = append(a.Added, c.digest)
			} else {
				a.Removed = append(a.Removed, c.digest)
			}
		}
		last[c.digest] = 0
	}
	return a
}
