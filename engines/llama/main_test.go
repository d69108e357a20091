package llama

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// generated makes a small model of the demo's kind.
func generated(tb testing.TB, opts ...Option) *Model {
	tb.Helper()
	m, err := Generate("llama-3-8b", opts...)
	require.NoError(tb, err)
	return m
}

// prompt returns n token ids of the whole 32-bit range.
func prompt(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(mix64(uint64(i) + 1))
	}
	return out
}

func prefill(tb testing.TB, m *Model, kv *KV, tokens []uint32) []float32 {
	tb.Helper()
	logits, err := m.Prefill(context.Background(), kv, tokens)
	require.NoError(tb, err)
	return logits
}

func greedy(tb testing.TB, m *Model, kv *KV, logits []float32, n int) []uint32 {
	tb.Helper()
	var out []uint32
	err := m.Greedy(context.Background(), kv, logits, n, func(t uint32) bool {
		out = append(out, t)
		return true
	})
	require.NoError(tb, err)
	return out
}
