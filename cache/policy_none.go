//go:build noristretto

package cache

import "membrane/kvwire"

// nonePolicy refuses everything: the cache is then one first-in first-out
// window. It exists to show that the test of the hit ratio needs ristretto.
type nonePolicy struct{ queue verdicts }

func newPolicy(_, _ int64) (policy, error) { return &nonePolicy{}, nil }

func (p *nonePolicy) touch(uint64) {}

func (p *nonePolicy) add(_ uint64, e entry, _ int64) bool {
	p.queue.put(e, kvwire.ReasonRejected)
	return true
}

func (p *nonePolicy) del(uint64)          {}
func (p *nonePolicy) limit(int64)         {}
func (p *nonePolicy) shrink()             {}
func (p *nonePolicy) settle()             {}
func (p *nonePolicy) windowOnly() bool    { return true }
func (p *nonePolicy) close()              {}
func (p *nonePolicy) verdicts() *verdicts { return &p.queue }
