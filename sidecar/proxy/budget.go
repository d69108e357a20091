package proxy

import "sync"

// budget bounds second attempts to a tenth of the first ones, so that pods that
// fail under load are not asked twice as much: every first attempt adds a tenth
// of a token, a second one takes a whole.
type budget struct {
	mu     sync.Mutex
	tokens float64
}

const (
	maxBudget    = 10
	perFirst     = 0.1
	perSecondTry = 1
)

func newBudget() *budget { return &budget{tokens: maxBudget} }

func (b *budget) first() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tokens = min(b.tokens+perFirst, maxBudget)
}

// second reports whether a second attempt may be made.
func (b *budget) second() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tokens < perSecondTry {
		return false
	}
	b.tokens -= perSecondTry
	return true
}
