package engineport

import (
	"sync/atomic"

	"membrane/kvwire"
)

// maxBodies is what the bodies of requests that are above smallBody take of the
// heap at a time, all connections together.
const (
	maxBodies = 32 << 20
	smallBody = 64 << 10
)

// Limits on what chains and leases may take of the heap, counted as below. A
// chain of 131,072 tokens in pages of 64 takes 64 KiB.
const (
	// MaxMemory is for all engines together, MaxEngineMemory for one.
	MaxMemory       = 64 << 20
	MaxEngineMemory = MaxMemory / 4 * 3
)

// budget is a number of bytes that may be taken and are given back. It is safe
// for concurrent use.
type budget struct {
	most int64
	used atomic.Int64
}

func (b *budget) take(n int64) bool {
	if b.used.Add(n) > b.most {
		b.used.Add(-n)
		return false
	}
	return true
}

// takeFirst is take, except that nothing is too large while nothing is taken.
func (b *budget) takeFirst(n int64) bool { return b.used.CompareAndSwap(0, n) || b.take(n) }

func (b *budget) give(n int64) { b.used.Add(-n) }

// entryCost is about what a map entry and its value take, in bytes.
const entryCost = 256

// chainCost returns the bytes that a chain keeps: the hashes of its full pages
// and the tokens of the page that is not full.
func chainCost(pages, pageTokens int) int64 {
	return entryCost + int64(pages)*kvwire.HashSize + int64(pageTokens)*4
}

// leaseCost returns the bytes that a lease keeps here and in the cache.
func leaseCost(pages int) int64 { return entryCost + int64(pages)*(kvwire.HashSize+8) }

// take takes bytes for the engine, or reports which limit it has reached. It
// needs e.mu.
func (e *engine) take(field string, n int64) error {
	if e.mayTake(n) {
		return nil
	}
	e.endExpired()
	if e.mayTake(n) {
		return nil
	}
	return kvwire.Errorf(kvwire.CodeBusy, field, "engine %q keeps chains and leases of %d bytes and all engines %d; %d more are above %d or %d: drop the chains of finished requests",
		e.key.name, e.kept, e.memory.used.Load(), n, MaxEngineMemory, MaxMemory)
}

func (e *engine) mayTake(n int64) bool {
	if e.kept+n > MaxEngineMemory || !e.memory.take(n) {
		return false
	}
	e.kept += n
	return true
}

// giveBack undoes take. It needs e.mu.
func (e *engine) giveBack(n int64) {
	e.kept -= n
	e.memory.give(n)
}

// growChain takes what a chain needs for so many pages. It fails when the
// chain was dropped meanwhile.
func (e *engine) growChain(ch *chain, pages int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ch.dropped {
		return unknownHandle("handle", ch.handle)
	}
	more := chainCost(pages, e.pageTokens) - ch.cost
	if more <= 0 {
		return nil
	}
	if err := e.take("handle", more); err != nil {
		return err
	}
	ch.cost += more
	return nil
}

// discard forgets a chain, with or without a handle.
func (e *engine) discard(ch *chain) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dropChain(ch)
}

// dropChain is discard; it needs e.mu.
func (e *engine) dropChain(ch *chain) {
	delete(e.chains, ch.handle)
	ch.dropped = true
	e.giveBack(ch.cost)
	ch.cost = 0
}
