package llama

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPrefillRefusesBadInput(t *testing.T) {
	t.Parallel()
	loaded, err := Load("testdata/small-f32")
	require.NoError(t, err)
	kv := loaded.NewKV(16)
	ctx := context.Background()

	_, err = loaded.Prefill(ctx, kv, []uint32{1, 255, 256})
	assert.ErrorContains(t, err, "token 2 is 256, must be below 256")
	_, err = loaded.Prefill(ctx, kv, nil)
	assert.ErrorContains(t, err, "no tokens")
	_, err = loaded.Prefill(ctx, kv, make([]uint32, 2049))
	assert.ErrorContains(t, err, "2048 positions")
	_, err = generated(t).Prefill(ctx, kv, []uint32{1})
	assert.ErrorContains(t, err, "another shape")
	assert.Equal(t, 0, kv.Len())

	require.NoError(t, kv.LoadWindow(0, 2040, make([]byte, loaded.PageBytes(2040))))
	_, err = loaded.Prefill(ctx, kv, make([]uint32, 9))
	assert.ErrorContains(t, err, "2048 positions")
	_, err = loaded.Prefill(ctx, kv, make([]uint32, 8))
	require.NoError(t, err, "exactly the limit")
	err = loaded.Greedy(ctx, kv, make([]float32, 256), 2, func(uint32) bool { return true })
	assert.ErrorContains(t, err, "2048 positions")
	err = loaded.Greedy(ctx, kv, make([]float32, 255), 2, func(uint32) bool { return true })
	assert.ErrorContains(t, err, "255 logits")
}

// stepContext is cancelled when it is asked for the n-th time.
type stepContext struct {
	context.Context
	left int
}

func (c *stepContext) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

// TestCancelStopsBetweenLayers cancels at every look and then goes on: what the
// cache holds after a cancel is right.
func TestCancelStopsBetweenLayers(t *testing.T) {
	t.Parallel()
	m := generated(t, WithLayers(2), WithHidden(64))
	ids := prompt(200)
	straight := m.NewKV(64)
	want := prefill(t, m, straight, ids)
	looks := 3 * 2 // chunks times layers
	for stop := range looks {
		kv := m.NewKV(64)
		_, err := m.Prefill(&stepContext{context.Background(), stop}, kv, ids)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, stop/2*chunkTokens, kv.Len())
		require.Equal(t, want, prefill(t, m, kv, ids[kv.Len():]))
		require.Equal(t, straight.Window(0, 200), kv.Window(0, 200))
	}
	_, err := m.Prefill(&stepContext{context.Background(), looks}, m.NewKV(64), ids)
	require.NoError(t, err)
}

func TestGreedyStops(t *testing.T) {
	t.Parallel()
	m := generated(t, WithLayers(1))
	ctx, cancel := context.WithCancel(context.Background())
	kv := m.NewKV(64)
	logits := prefill(t, m, kv, prompt(5))
	before := append([]float32{}, logits...)

	count := 0
	require.NoError(t, m.Greedy(ctx, kv, logits, 10, func(uint32) bool { count++; return count < 3 }))
	assert.Equal(t, 3, count)
	assert.Equal(t, 7, kv.Len(), "the last token yielded is not in the cache")
	assert.Equal(t, before, logits, "the caller's logits are left alone")

	require.NoError(t, m.Greedy(ctx, kv, logits, 0, func(uint32) bool { t.Error("yield"); return true }))
	cancel()
	err := m.Greedy(ctx, kv, logits, 5, func(uint32) bool { t.Error("yield"); return true })
	require.ErrorIs(t, err, context.Canceled)
}

func TestDecodeShowsTheLogits(t *testing.T) {
	t.Parallel()
	m := generated(t, WithLayers(1))
	ctx := context.Background()
	kv := m.NewKV(64)
	logits := prefill(t, m, kv, prompt(5))
	var tokens []uint32
	var last []float32
	require.NoError(t, m.Decode(ctx, kv, logits, 3, func(token uint32, logits []float32) bool {
		assert.Equal(t, Argmax(logits), token)
		tokens, last = append(tokens, token), append([]float32{}, logits...)
		return true
	}))
	again := m.NewKV(64)
	assert.Equal(t, last, prefill(t, m, again, append(prompt(5), tokens[:2]...)), "those of the last token")
}

func TestLogprob(t *testing.T) {
	t.Parallel()
	logits := []float32{1, 1000, 999, -1000}
	assert.InDelta(t, -math.Log1p(math.Exp(-1)), Logprob(logits, 1), 1e-12, "large logits do not overflow")
	assert.InDelta(t, -1-math.Log1p(math.Exp(-1)), Logprob(logits, 2), 1e-12)
	assert.InDelta(t, -math.Log(4), Logprob(make([]float32, 4), 3), 1e-12)
}

func TestArgmax(t *testing.T) {
	t.Parallel()
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	assert.EqualValues(t, 1, Argmax([]float32{1, 3, 3, 2}))
	assert.EqualValues(t, 2, Argmax([]float32{nan, -5, -4, nan}))
	assert.EqualValues(t, 1, Argmax([]float32{0, inf}))
	assert.EqualValues(t, 0, Argmax([]float32{nan, nan}))
	assert.EqualValues(t, 0, Argmax(nil))
}
