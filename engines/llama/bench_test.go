package llama

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkPrefill computes a cold prompt of the length that the demo uses.
func BenchmarkPrefill(b *testing.B) {
	const tokens = 2000
	for _, threads := range []int{1, 2} {
		b.Run(map[int]string{1: "one-thread", 2: "two-threads"}[threads], func(b *testing.B) {
			m, err := generated(b).WithThreads(threads)
			require.NoError(b, err)
			ids := prompt(tokens)
			for b.Loop() {
				prefill(b, m, m.NewKV(64), ids)
			}
			b.ReportMetric(float64(b.N)*tokens/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	m := generated(b)
	kv := m.NewKV(64)
	logits := prefill(b, m, kv, prompt(2000))
	for b.Loop() {
		require.NoError(b, kv.Truncate(2000))
		greedy(b, m, kv, logits, 11)
	}
	b.ReportMetric(float64(b.N)*10/b.Elapsed().Seconds(), "tokens/s")
}

func BenchmarkPages(b *testing.B) {
	m := generated(b)
	kv := m.NewKV(64)
	prefill(b, m, kv, prompt(256))
	page := make([]byte, m.PageBytes(64))
	b.Run("read", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		for b.Loop() {
			require.NoError(b, kv.ReadPage(page, 2))
		}
	})
	b.Run("load", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		for b.Loop() {
			require.NoError(b, kv.Truncate(128))
			require.NoError(b, kv.LoadPage(2, page))
		}
	})
}

func BenchmarkGenerate(b *testing.B) {
	for b.Loop() {
		generated(b)
	}
}

func TestDecodeDoesNotAllocatePerToken(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	m := generated(t, WithLayers(2))
	kv := m.NewKV(64)
	logits := prefill(t, m, kv, prompt(100))
	ctx := context.Background()
	count := func(n int) float64 {
		return testing.AllocsPerRun(5, func() {
			_ = kv.Truncate(100)
			_ = m.Greedy(ctx, kv, logits, n, func(uint32) bool { return true })
		})
	}
	count(20)
	require.InDelta(t, count(2), count(20), 1, "allocations of 2 and of 20 tokens")
}
