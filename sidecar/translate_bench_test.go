package sidecar

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// BenchmarkTranslatedMatch matches a prompt of 48 pages of 2 MiB over the engine
// socket: pages in the reader's own form (direct: what is left is the check of
// their bytes), pages that have to be made of other forms, and, as a measure, a
// copy of as many bytes out of the arena.
func BenchmarkTranslatedMatch(b *testing.B) {
	m := testModel("w")
	m.Layers, m.KVHeads, m.HeadSize = 8, 8, 128
	const pages = 48
	for _, c := range []struct {
		name     string
		from, to geometry
	}{
		{"direct", geometry{"vllm-lbhnc", "", 16, 1, 1}, geometry{"vllm-lbhnc", "", 16, 1, 1}},
		{"tp 2 to 1, runs of 8 KiB", geometry{"vllm-lbhnc", "", 16, 2, 1}, geometry{"vllm-lbhnc", "", 16, 1, 1}},
		{"tp 1 to 4, runs of 8 KiB", geometry{"vllm-lbhnc", "", 16, 1, 1}, geometry{"vllm-lbhnc", "", 16, 4, 1}},
		{"other layout, runs of 256 B", geometry{"vllm-lbhnc", "", 16, 1, 1}, geometry{"sglang-page_first", "", 64, 1, 1}},
		{"packing of the CPU, single numbers", geometry{"vllm-lbhnc", "vec", 16, 1, 1}, geometry{"sglang-page_first", "", 64, 1, 1}},
	} {
		b.Run(c.name, func(b *testing.B) {
			n := benchSidecar(b)
			from, err := shardsOf(m, c.from)
			require.NoError(b, err)
			to, err := shardsOf(m, c.to)
			require.NoError(b, err)
			writer := boot(b, n.Addresses().EngineAddr, "writer", m, from, true)
			reader := boot(b, n.Addresses().EngineSocket, "reader", m, to, false)
			one := truth(b, m, 1, 1, from)[0][0]
			objects := make([][][]byte, pages)
			for i := range objects {
				objects[i] = one
			}
			bytes := 0
			for _, d := range to {
				bytes += pages * d.Bytes()
			}
			b.SetBytes(int64(bytes))
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				prompt := promptOf(pages, uint32(i))
				writer.write(b, prompt, objects)
				b.StartTimer()
				l := reader.match(b, kvwire.Match{Tokens: prompt})
				b.StopTimer()
				require.EqualValues(b, pages, l.Pages, l.Reason)
				for _, w := range reader.workers {
					_, err := w.Release(soon(b), kvwire.Release{Lease: l.Lease})
					require.NoError(b, err)
				}
				_, err := writer.scheduler.Reset(soon(b))
				require.NoError(b, err)
				b.StartTimer()
			}
			if c.name != "direct" {
				t := n.engines.Counts().Translated
				b.ReportMetric(float64(t.Bytes)/t.Seconds/1e9, "translate-GB/s")
			}
		})
	}
	b.Run("memcpy", func(b *testing.B) {
		n := benchSidecar(b)
		const size = pages * 2 << 20
		arena := n.cache.Arena()
		dst := make([]byte, 4*size)
		clear(dst)
		b.SetBytes(size)
		for i := 0; b.Loop(); i++ {
			copy(dst[i%4*size:][:size], arena.Bytes(int64(i%4)*size, size))
		}
	})
}

// benchSidecar runs a sidecar with a GiB, all of it there, until the benchmark
// ends.
func benchSidecar(b *testing.B) *Sidecar {
	b.Helper()
	dir, err := os.MkdirTemp("", "mb")
	require.NoError(b, err)
	s := DefaultSettings()
	s.NodeID, s.Port, s.Memory, s.Inbox = "bench", 0, 1<<30, 1<<20
	s.EngineAddr, s.EngineSocket = "127.0.0.1:0", filepath.Join(dir, "engine.sock")
	n, err := New(s, "test", zerolog.Nop())
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	<-n.Ready()
	b.Cleanup(func() {
		cancel()
		require.NoError(b, <-done)
		require.NoError(b, os.RemoveAll(dir))
	})
	require.Eventually(b, func() bool { return n.cache.Arena().Prefaulted() == n.cache.Arena().Size() }, time.Minute, tick,
		fmt.Sprint("the arena is not there: ", n.cache.Arena().Prefaulted()))
	return n
}
