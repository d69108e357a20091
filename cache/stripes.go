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
	mine    sync.Pool // of *stripe; per processor, as far as the pool can
	next    atomic.Uint32
}

// stripe is what lookups of one processor write.
type stripe struct {
	sync.RWMutex
	index         int
	lookups, hits atomic.Uint64
	_             [208]byte // processors fetch cache lines in pairs
}

// maxStripes bounds what a writer has to take.
const maxStripes = 8

func (m *stripedMutex) init() {
	m.stripes = make([]stripe, min(runtime.NumCPU(), maxStripes))
	for i := range m.stripes {
		m.stripes[i].index = i
	}
	m.mine.New = func() any { return &m.stripes[int(m.next.Add(1))%len(m.stripes)] }
}

// reader returns a stripe to read under, which leave takes back.
func (m *stripedMutex) reader() *stripe { return m.mine.Get().(*stripe) }

func (m *stripedMutex) leave(s *stripe) { m.mine.Put(s) }

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
