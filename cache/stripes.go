package cache

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// stripedMutex is Cache.mu: a readers-writer lock whose short readers use a
// stripe of their processor's, so that lookups on several processors do not
// pass one cache line around. A writer takes every stripe.
type stripedMutex struct {
	sync.RWMutex
	stripes []stripe
	mine    sync.Pool // of *reader; per processor, as far as the pool can
	next    atomic.Uint32
}

// stripe is what lookups of one processor write.
type stripe struct {
	sync.RWMutex
	index         int
	lookups, hits atomic.Uint64
	last          atomic.Pointer[reader] // that used it
	_             [200]byte              // processors fetch cache lines in pairs
}

// reader is a way to a stripe, which one goroutine at a time has. The pool does
// not know which stripes are taken, so two processors may come to use one: each
// then finds, look-up by look-up, that the other was there.
type reader struct {
	*stripe
	met int // others, in a row
}

// maxMet is after how many meetings a reader looks for another stripe.
const maxMet = 32

// maxStripes bounds what a writer has to take.
const maxStripes = 8

func (m *stripedMutex) init() {
	m.stripes = make([]stripe, min(runtime.NumCPU(), maxStripes))
	for i := range m.stripes {
		m.stripes[i].index = i
	}
	m.mine.New = func() any { return &reader{stripe: m.another()} }
}

func (m *stripedMutex) another() *stripe {
	return &m.stripes[int(m.next.Add(1))%len(m.stripes)]
}

// reader returns a stripe to read under, which leave takes back.
func (m *stripedMutex) reader() *reader { return m.mine.Get().(*reader) }

func (m *stripedMutex) leave(r *reader) {
	if r.last.Load() == r {
		r.met = 0
	} else if r.last.Store(r); r.met < maxMet {
		r.met++
	} else {
		r.stripe, r.met = m.another(), 0
	}
	m.mine.Put(r)
}

// Lock keeps all others out.
func (m *stripedMutex) Lock() {
	m.RWMutex.Lock()
	for i := range m.stripes {
		m.stripes[i].Lock()
	}
}

// Unlock undoes Lock.
func (m *stripedMutex) Unlock() {
	for i := range m.stripes {
		m.stripes[i].Unlock()
	}
	m.RWMutex.Unlock()
}
