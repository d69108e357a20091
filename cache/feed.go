package cache

import (
	"sync"

	"membrane/kvwire"
)

// Kind says what happened to a page.
type Kind uint8

// The kinds of events.
const (
	// Added: the page became complete in a form.
	Added Kind = iota + 1
	// Removed: a page that was complete in a form left the table.
	Removed
	// Lost: events were dropped because subscribers did not keep up. Only
	// Kind is set. The receiver's picture is out of date: see [Cache.Range].
	Lost
)

// Event is one change to the set of complete pages.
type Event struct {
	Kind   Kind
	Key    kvwire.PageKey
	Form   kvwire.Form
	Reason kvwire.Reason // why a page was removed
}

// change is an event in the queue.
type change struct {
	page   *page
	form   kvwire.Form
	kind   Kind
	reason kvwire.Reason
}

// maxFeed bounds the events that wait for subscribers.
const maxFeed = 1 << 17

// feed delivers events in their order, on a goroutine of its own that runs
// while there are subscribers or until close.
type feed struct {
	mu      sync.Mutex
	queue   []change
	spare   []change
	subs    map[int]func(Event)
	nextSub int
	kick    chan struct{}
	stop    chan struct{}
	wg      sync.WaitGroup
}

func (f *feed) init() {
	f.subs = make(map[int]func(Event))
	f.kick = make(chan struct{}, 1)
	f.stop = make(chan struct{})
	f.wg.Add(1)
	go f.run()
}

// put queues a change. It is called with Cache.mu held and never blocks.
func (f *feed) put(ch change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.subs) == 0 {
		return
	}
	if len(f.queue) >= maxFeed {
		clear(f.queue)
		f.queue = append(f.queue[:0], change{kind: Lost})
	}
	f.queue = append(f.queue, ch)
	select {
	case f.kick <- struct{}{}:
	default:
	}
}

func (f *feed) run() {
	defer f.wg.Done()
	for {
		select {
		case <-f.stop:
			return
		case <-f.kick:
		}
		f.deliver()
	}
}

func (f *feed) deliver() {
	f.mu.Lock()
	list := f.queue
	f.queue = f.spare[:0]
	subs := make([]func(Event), 0, len(f.subs))
	for _, fn := range f.subs {
		subs = append(subs, fn)
	}
	f.mu.Unlock()
	for _, ch := range list {
		e := Event{Kind: ch.kind, Form: ch.form, Reason: ch.reason}
		if ch.page != nil {
			e.Key = ch.page.name()
		}
		for _, fn := range subs {
			fn(e)
		}
	}
	clear(list)
	f.spare = list
}

func (f *feed) close() {
	close(f.stop)
	f.wg.Wait()
}

// Subscribe calls fn for every change from now on, one at a time and in their
// order, on a goroutine of the cache's and under none of its locks. A slow fn
// delays other subscribers but never the cache; see [Lost]. It returns a
// function that ends the subscription, after which at most the events under
// way are still delivered.
func (c *Cache) Subscribe(fn func(Event)) (cancel func()) {
	f := &c.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	id := f.nextSub
	f.nextSub++
	f.subs[id] = fn
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.subs, id)
	}
}
