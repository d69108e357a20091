package cache

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// Two readers that have got the same stripe, as two processors may, part.
func TestReadersOfOneStripePart(t *testing.T) {
	t.Parallel()
	m := stripedMutex{stripes: make([]stripe, 2)}
	a, b := &reader{stripe: &m.stripes[0]}, &reader{stripe: &m.stripes[0]}
	for range 2 * maxMet {
		for _, r := range []*reader{a, b} {
			m.leave(r)
		}
	}
	assert.NotSame(t, a.stripe, b.stripe)
	// Alone, they stay.
	at := [2]*stripe{a.stripe, b.stripe}
	for range 4 * maxMet {
		m.leave(a)
		m.leave(b)
	}
	assert.Same(t, at[0], a.stripe)
	assert.Same(t, at[1], b.stripe)
	// One who only goes past now and then drives nobody away.
	c := &reader{stripe: a.stripe}
	for range 4 * maxMet {
		m.leave(a)
		m.leave(a)
		if c.met == 0 {
			m.leave(c)
		}
	}
	assert.Same(t, at[0], a.stripe)
}
