package cache

import (
	"crypto/rand"
	"encoding/binary"
	"time"

	"membrane/kvwire"
)

// fate is how a lease ended.
type fate uint8

const (
	live fate = iota
	endedReleased
	endedExpired
	endedCancelled
	endedEmpty // before its id was given out
	unknown
)

const (
	// fates is of how many ids the fate is remembered; older ones count as
	// expired.
	fates = 1 << 16
	// maxKept bounds what is kept for reuse, in pages of one lease.
	maxKept   = 8192
	maxLeases = 64
)

// lease is a live lease or pin. It is guarded by Cache.mu.
type lease struct {
	id      uint64
	client  *client // nil for a pin
	form    kvwire.Form
	shards  int
	holders int
	left    int
	expires time.Time
	pages   []*page
	bytes   int64
	busy    int // checks in progress, during which pages stay pinned
	ended   fate

	released   holderSet
	heap       int
	prev, next *lease // of the client
}

type holderSet [kvwire.MaxShards / 64]uint64

func (h *holderSet) has(i int) bool { return h[i/64]>>(i%64)&1 != 0 }
func (h *holderSet) set(i int)      { h[i/64] |= 1 << (i % 64) }

// client is one client that has leases.
type client struct {
	id     ClientID
	bytes  int64
	leases *lease
}

// leases is all live leases and pins. It is guarded by Cache.mu.
type leases struct {
	first, next uint64
	ended       []fate // by id modulo fates
	live        map[uint64]*lease
	clients     map[ClientID]*client
	byEnd       []*lease // a heap, the next to expire first
	pins        int
	spare       []*lease
	scratch     []Location
}

func (ls *leases) init() {
	// Ids of an earlier process must not mean anything in this one.
	var b [8]byte
	rand.Read(b[:])
	ls.first = binary.LittleEndian.Uint64(b[:])>>2 + 1
	ls.next = ls.first
	ls.ended = make([]fate, fates)
	ls.live = make(map[uint64]*lease)
	ls.clients = make(map[ClientID]*client)
}

// fate returns what became of an id that is not live.
func (ls *leases) fate(id uint64) fate {
	switch {
	case id < ls.first || id >= ls.next:
		return unknown
	case ls.next-id > fates:
		return endedExpired
	}
	return ls.ended[id%fates]
}

func (ls *leases) get() *lease {
	if n := len(ls.spare); n > 0 {
		l := ls.spare[n-1]
		ls.spare = ls.spare[:n-1]
		return l
	}
	return &lease{}
}

func (ls *leases) put(l *lease) {
	if len(ls.spare) < maxLeases && cap(l.pages) <= maxKept {
		*l = lease{pages: l.pages[:0]}
		ls.spare = append(ls.spare, l)
	}
}

// client returns the client's entry, which lasts as long as it has leases.
func (ls *leases) client(id ClientID) *client {
	cl := ls.clients[id]
	if cl == nil {
		cl = &client{id: id}
		ls.clients[id] = cl
	}
	return cl
}

func (ls *leases) dropClient(cl *client) {
	if cl.leases == nil {
		delete(ls.clients, cl.id)
	}
}

// register makes l live, for a client or (nil) as a pin. It needs c.mu.
func (c *Cache) register(l *lease, cl *client) {
	ls := &c.leases
	l.id = ls.next
	ls.next++
	ls.ended[l.id%fates] = live
	ls.live[l.id] = l
	l.client = cl
	if cl == nil {
		ls.pins++
	} else {
		cl.bytes += l.bytes
		if l.next = cl.leases; l.next != nil {
			l.next.prev = l
		}
		cl.leases = l
	}
	if ls.push(l); l.heap == 0 {
		c.wake() // the owner waits for a later end
	}
}

// end makes l dead; its pages are unpinned now, or when the last check of them
// is over. It needs c.mu.
func (c *Cache) end(l *lease, how fate) {
	if l.ended != live {
		return
	}
	ls := &c.leases
	l.ended = how
	ls.ended[l.id%fates] = how
	delete(ls.live, l.id)
	ls.remove(l)
	if cl := l.client; cl == nil {
		ls.pins--
	} else {
		cl.bytes -= l.bytes
		if l.prev != nil {
			l.prev.next = l.next
		} else {
			cl.leases = l.next
		}
		if l.next != nil {
			l.next.prev = l.prev
		}
		ls.dropClient(cl)
	}
	l.busy++
	c.idle(l)
}

// idle ends a use of l's pages and lets go of them if l is dead and unused.
// It needs c.mu.
func (c *Cache) idle(l *lease) {
	if l.busy--; l.busy > 0 || l.ended == live {
		return
	}
	c.shorten(l, 0)
	c.leases.put(l)
	if c.unsettled() {
		c.wake()
	}
}

func (c *Cache) expireLease(l *lease) {
	c.counters.expired.Add(1)
	c.end(l, endedExpired)
}

// expire ends what has reached its end and returns how long until the next.
func (c *Cache) expire(now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	for h := &c.leases.byEnd; len(*h) > 0; {
		l := (*h)[0]
		if d := l.expires.Sub(now); d > 0 {
			return d
		}
		c.expireLease(l)
	}
	return time.Hour
}

// endAll ends every lease and pin.
func (c *Cache) endAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.leases.byEnd) > 0 {
		c.end(c.leases.byEnd[0], endedCancelled)
	}
}

func (ls *leases) push(l *lease) {
	l.heap = len(ls.byEnd)
	ls.byEnd = append(ls.byEnd, l)
	ls.up(l.heap)
}

func (ls *leases) remove(l *lease) {
	i, n := l.heap, len(ls.byEnd)-1
	ls.swap(i, n)
	ls.byEnd[n] = nil
	ls.byEnd = ls.byEnd[:n]
	if i < n {
		ls.down(i)
		ls.up(i)
	}
}

func (ls *leases) up(i int) {
	for i > 0 && ls.byEnd[i].expires.Before(ls.byEnd[(i-1)/2].expires) {
		ls.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
}

func (ls *leases) down(i int) {
	for {
		k := 2*i + 1
		if k >= len(ls.byEnd) {
			return
		}
		if k+1 < len(ls.byEnd) && ls.byEnd[k+1].expires.Before(ls.byEnd[k].expires) {
			k++
		}
		if !ls.byEnd[k].expires.Before(ls.byEnd[i].expires) {
			return
		}
		ls.swap(i, k)
		i = k
	}
}

func (ls *leases) swap(i, j int) {
	h := ls.byEnd
	h[i], h[j] = h[j], h[i]
	h[i].heap, h[j].heap = i, j
}
