//go:build !noristretto

package cache

import (
	"fmt"

	"github.com/dgraph-io/ristretto/v2"

	"membrane/kvwire"
)

// ristrettoPolicy is TinyLFU admission and sampled LFU eviction. Its callbacks
// run on ristretto's goroutine, so they only append to a queue.
type ristrettoPolicy struct {
	cache *ristretto.Cache[uint64, entry]
	queue verdicts
}

const (
	// probe is a key that no page has but by a chance of 2^-64: one that is
	// asked for more than any page, so that ristretto makes room for it.
	probe = 1
	// bufferItems is how many lookups ristretto takes at a time.
	bufferItems = 256
)

func newPolicy(pages, limit int64) (policy, error) {
	p := &ristrettoPolicy{}
	var err error
	p.cache, err = ristretto.NewCache(&ristretto.Config[uint64, entry]{
		NumCounters: 10 * pages,
		MaxCost:     limit,
		// Lookups come in batches (see touches), and ristretto drops what
		// does not fit into three buffers at a time.
		BufferItems:        bufferItems,
		IgnoreInternalCost: true,
		KeyToHash:          func(key uint64) (uint64, uint64) { return key, 0 },
		// Never an update in place: a key that is deleted and added again
		// must pass through the queue in that order.
		ShouldUpdate: func(_, _ entry) bool { return false },
		OnEvict:      func(i *ristretto.Item[entry]) { p.queue.put(i.Value, kvwire.ReasonCapacity) },
		OnReject:     func(i *ristretto.Item[entry]) { p.queue.put(i.Value, kvwire.ReasonRejected) },
	})
	if err != nil {
		return nil, fmt.Errorf("cannot start ristretto: %w", err)
	}
	return p, nil
}

func (p *ristrettoPolicy) touch(key uint64) { p.cache.Get(key) }

func (p *ristrettoPolicy) add(key uint64, e entry, cost int64) bool {
	return p.cache.Set(key, e, cost)
}

func (p *ristrettoPolicy) del(key uint64)   { p.cache.Del(key) }
func (p *ristrettoPolicy) limit(cost int64) { p.cache.UpdateMaxCost(cost) }

// shrink offers a key that costs nothing. Ristretto makes room for what is
// offered until its limit holds, naming those that it would name for a page.
func (p *ristrettoPolicy) shrink() {
	p.cache.Set(probe, entry{}, 0)
	p.cache.Wait()
	if _, ok := p.cache.Get(probe); ok {
		p.cache.Del(probe)
		return
	}
	for range bufferItems { // refused: not known yet, or forgotten
		p.cache.Get(probe)
	}
}

func (p *ristrettoPolicy) settle()             { p.cache.Wait() }
func (p *ristrettoPolicy) windowOnly() bool    { return false }
func (p *ristrettoPolicy) close()              { p.cache.Close() }
func (p *ristrettoPolicy) verdicts() *verdicts { return &p.queue }
