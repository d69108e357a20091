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
	full  chan []lookup
	free  chan []lookup
	parts []touchPart
}

// touchPart is the lookups under one stripe of Cache.mu that are no batch yet.
type touchPart struct {
	mu   sync.Mutex
	now  []lookup
	lost uint64
	_    [216]byte // processors fetch cache lines in pairs
}

func (t *touches) init(parts int) {
	t.full = make(chan []lookup, 64)
	t.free = make(chan []lookup, 64)
	t.parts = make([]touchPart, parts)
	for i := range t.parts {
		t.parts[i].now = make([]lookup, 0, touchBatch)
	}
}

// addKeys is add for lookups of which the window knows.
func (t *touches) addKeys(part int, keys []uint64) {
	p := &t.parts[part]
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range keys {
		if p.now = append(p.now, lookup{key, nil}); len(p.now) == touchBatch {
			t.flush(p)
		}
	}
}

func (t *touches) add(part int, list []lookup) {
	p := &t.parts[part]
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(list) > 0 {
		n := min(len(list), touchBatch-len(p.now))
		p.now = append(p.now, list[:n]...)
		list = list[n:]
		if len(p.now) == touchBatch {
			t.flush(p)
		}
	}
}

// flush hands the current batch over, or drops it; it needs p.mu.
func (t *touches) flush(p *touchPart) {
	select {
	case t.full <- p.now:
	default:
		p.lost += uint64(len(p.now))
		clear(p.now)
		p.now = p.now[:0]
		return
	}
	select {
	case p.now = <-t.free:
	default:
		p.now = make([]lookup, 0, touchBatch)
	}
}

// lost returns how many lookups were dropped.
func (t *touches) lost() (n uint64) {
	for i := range t.parts {
		p := &t.parts[i]
		p.mu.Lock()
		n += p.lost
		p.mu.Unlock()
	}
	return n
}

// drain calls fn for all lookups that are waiting, a batch at a time.
func (t *touches) drain(fn func([]lookup)) {
	for i := range t.parts {
		p := &t.parts[i]
		p.mu.Lock()
		if len(p.now) > 0 {
			t.flush(p)
		}
		p.mu.Unlock()
	}
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
