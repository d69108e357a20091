package disagg

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/cache"
)

// A batch that fails takes back what it has kept, and nothing of another
// request for the same prompt that was answered meanwhile.
func TestAFailedBatchTakesBackOnlyItsOwn(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a")
	shared, own := upTo(10), upTo(20)
	long := upTo(16384)
	long[0] = 1
	ctx, cancel := context.WithCancel(within(t, time.Minute))
	failed := make(chan error, 1)
	go func() {
		_, err := a.PrefillBatch(ctx, "acme", []PrefillRequest{prefillOf(shared), prefillOf(own), prefillOf(own), prefillOf(long)})
		failed <- err
	}()
	require.Eventually(t, func() bool { all, _, _ := a.handles.counts(); return all == 2 }, time.Minute, time.Millisecond)
	p := a.mustPrefill(t, "acme", shared)
	cancel()
	kind, _ := kindOf(t, <-failed)
	assert.Equal(t, Gone, kind)
	assert.Equal(t, greedy(t, shared, 3), a.mustDecode(t, "acme", p.Handle, 3).Tokens)
	all, _, _ := a.handles.counts()
	assert.Equal(t, 1, all, "what the batch alone has kept is gone")
}

// An error that is not about a field names none.
func TestErrorsOfOneRequestNameNoBatch(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a", func(c *Config, _ *cache.Config) { c.Backend = fullBackend{} })
	_, err := a.Prefill(within(t, time.Minute), "acme", prefillOf(upTo(1)))
	kind, e := kindOf(t, err)
	assert.Equal(t, Busy, kind)
	assert.False(t, strings.HasPrefix(e.Error(), "requests["), e.Error())
	_, err = a.PrefillBatch(within(t, time.Minute), "acme", []PrefillRequest{prefillOf(upTo(1))})
	_, e = kindOf(t, err)
	assert.Equal(t, "requests[0]", e.Field)
}

// fullBackend has no room for another model.
type fullBackend struct{ Backend }

func (fullBackend) Model(string) (Model, error) { return nil, busy(time.Second, "too many models") }
