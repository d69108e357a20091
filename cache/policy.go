package cache

import (
	"sync"

	"membrane/kvwire"
)

// policy is asked who leaves. All methods but those of its verdicts are
// called by the cache's owner goroutine only, without Cache.mu. There are two:
// ristretto, and one without admission (build tag noristretto) that shows by
// failing a test what ristretto is for.
type policy interface {
	// touch tells that a page was looked up, found or not.
	touch(key uint64)
	// add offers a page. False means that the offer was lost under load and
	// must be repeated; true, that a verdict may follow, also on other pages.
	add(key uint64, e entry, cost int64) bool
	// del forgets a page that was added.
	del(key uint64)
	// limit sets the most that the pages in the policy may cost together.
	limit(cost int64)
	// shrink makes the policy let go of pages until it keeps to its limit. It
	// may fail to.
	shrink()
	// settle waits until all verdicts on what was added are queued.
	settle()
	// windowOnly reports that the policy keeps nothing itself.
	windowOnly() bool
	// close ends the policy. No method may be called after it.
	close()
	// verdicts returns the queue of what was decided.
	verdicts() *verdicts
}

// policyMaker makes a policy that expects the given number of pages, may hold
// limit bytes and queues what it decides.
type policyMaker func(pages, limit int64) (policy, error)

// entry is a stay of a page in the policy: a verdict on an earlier stay must
// not hit a later one.
type entry struct {
	page *page
	gen  uint32
}

// verdict says that the policy let go of a page.
type verdict struct {
	entry
	why kvwire.Reason
}

// verdicts is the queue between the policy's goroutine, which only appends,
// and the owner. Its length is bounded by the pages in the policy.
type verdicts struct {
	mu   sync.Mutex
	list []verdict
}

func (v *verdicts) put(e entry, why kvwire.Reason) {
	if e.page == nil { // deleted by us before the policy got to it
		return
	}
	v.mu.Lock()
	v.list = append(v.list, verdict{e, why})
	v.mu.Unlock()
}

// take returns what is queued and leaves spare as the empty queue.
func (v *verdicts) take(spare []verdict) []verdict {
	v.mu.Lock()
	defer v.mu.Unlock()
	list := v.list
	v.list = spare[:0]
	return list
}

// lookup is one page that was asked for. The page is nil where it was not found, or where the
// window knows already.
type lookup struct {
	key  uint64
	page *page
}

// touchBatch is how many lookups go to the policy at a time.
const touchBatch = 512

// touches carries lookups to the owner, in batches and lossily: a lookup never
// waits for the policy.
type touches struct {
	full chan []lookup
	free chan []lookup

	mu   sync.Mutex
	now  []lookup
	lost uint64
}

func (t *touches) init() {
	t.full = make(chan []lookup, 64)
	t.free = make(chan []lookup, 64)
	t.now = make([]lookup, 0, touchBatch)
}

// addKeys is add for lookups of which the window knows.
func (t *touches) addKeys(keys []uint64) {
	var list [touchBatch]lookup
	for len(keys) > 0 {
		n := min(len(keys), len(list))
		for i, key := range keys[:n] {
			list[i].key = key
		}
		t.add(list[:n])
		keys = keys[n:]
	}
}

func (t *touches) add(keys []lookup) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(keys) > 0 {
		n := min(len(keys), touchBatch-len(t.now))
		t.now = append(t.now, keys[:n]...)
		keys = keys[n:]
		if len(t.now) == touchBatch {
			t.flush()
		}
	}
}

// flush hands the current batch over, or drops it; it needs t.mu.
func (t *touches) flush() {
	select {
	case t.full <- t.now:
	default:
		t.lost += uint64(len(t.now))
		t.now = t.now[:0]
		return
	}
	select {
	case t.now = <-t.free:
	default:
		t.now = make([]lookup, 0, touchBatch)
	}
}

// drain calls fn for all lookups that are waiting, a batch at a time.
func (t *touches) drain(fn func([]lookup)) {
	t.mu.Lock()
	if len(t.now) > 0 {
		t.flush()
	}
	t.mu.Unlock()
	for {
		select {
		case batch := <-t.full:
			t.learn(batch, fn)
		default:
			return
		}
	}
}

// learn calls fn for one batch and recycles it.
func (t *touches) learn(batch []lookup, fn func([]lookup)) {
	fn(batch)
	clear(batch) // it must not keep pages
	select {
	case t.free <- batch[:0]:
	default:
	}
}
