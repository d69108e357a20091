package replay

import (
	"fmt"
	"sync/atomic"

	"github.com/dgraph-io/ristretto/v2"
)

// plainRistretto is the library as its documentation says to use it.
type plainRistretto struct {
	cache *ristretto.Cache[uint64, struct{}]
	gone  atomic.Uint64
}

func newRistretto(_ *Trace, capacity int) (policy, error) {
	p := &plainRistretto{}
	var err error
	p.cache, err = ristretto.NewCache(&ristretto.Config[uint64, struct{}]{
		NumCounters:        10 * int64(capacity),
		MaxCost:            int64(capacity),
		BufferItems:        64,
		IgnoreInternalCost: true,
		OnEvict:            func(*ristretto.Item[struct{}]) { p.gone.Add(1) },
		OnReject:           func(*ristretto.Item[struct{}]) { p.gone.Add(1) },
	})
	if err != nil {
		return nil, fmt.Errorf("cannot start ristretto: %w", err)
	}
	return p, nil
}

func (p *plainRistretto) request(blocks []uint64) (held int, err error) {
	var missing []uint64
	for i, b := range blocks {
		if _, ok := p.cache.Get(b); !ok {
			missing = append(missing, b)
		} else if held == i {
			held++
		}
	}
	for i, b := range missing {
		p.cache.Set(b, struct{}{}, 1)
		if i%1024 == 1023 { // its queue has 32 × 1024 places
			p.cache.Wait()
		}
	}
	p.cache.Wait()
	return held, nil
}

func (p *plainRistretto) evictions() uint64 { return p.gone.Load() }

func (p *plainRistretto) close() error {
	p.cache.Close()
	return nil
}
