package engineport

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"membrane/cache"
	"membrane/kvwire"
)

const benchTokens = 100_000

// benchEngine attaches to a port of its own with blocks of the given tokens,
// 16 bytes a token.
func benchEngine(b *testing.B, pageTokens int) *kvwire.Client {
	b.Helper()
	c, err := cache.New(cache.Config{Budget: 64 << 20})
	require.NoError(b, err)
	s, err := New(Config{Node: "n1", Server: "membrane test", Cache: c, PageTokens: pageTokens, Metrics: metrics.NewSet(), Log: zerolog.Nop()})
	require.NoError(b, err)
	dir, err := os.MkdirTemp("", "mb")
	require.NoError(b, err)
	socket := filepath.Join(dir, "engine.sock")
	l, err := ListenSocket(socket)
	require.NoError(b, err)
	require.NoError(b, s.ServeSocket(l))
	client, err := kvwire.Dial(context.Background(), socket, kvwire.ClientOptions{})
	require.NoError(b, err)
	b.Cleanup(func() {
		_ = client.Close()
		_ = s.Close()
		_ = c.Close()
		_ = os.RemoveAll(dir)
	})
	reg := registration("e")
	reg.Descriptor.BlockTokens, reg.Descriptor.BlockBytes = pageTokens, int64(16*pageTokens)
	reg.InboxSlots = 256
	_, err = client.Register(context.Background(), reg)
	require.NoError(b, err)
	return client
}

// BenchmarkMatch matches a prompt that is all held, releases and drops it.
// Compare with BenchmarkBareChain, which only hashes.
func BenchmarkMatch(b *testing.B) {
	ctx := context.Background()
	for _, page := range []int{16, 128} {
		b.Run(fmt.Sprint(page), func(b *testing.B) {
			c := benchEngine(b, page)
			prompt := tokens(benchTokens, 1)
			l, err := c.Match(ctx, kvwire.Match{Flags: kvwire.MatchPresence, Tokens: prompt}, nil)
			require.NoError(b, err)
			pages := benchTokens / page
			for first := 0; first < pages; first += 256 {
				var refs []kvwire.PageRef
				for i := first; i < min(first+256, pages); i++ {
					refs = append(refs, kvwire.PageRef{Handle: l.Handle, Page: uint32(i)})
				}
				slots, err := c.Reserve(ctx, refs, nil)
				require.NoError(b, err)
				var commits []kvwire.Commit
				for i, s := range slots {
					commits = append(commits, kvwire.Commit{PageRef: refs[i], Slot: s.Slot})
				}
				_, err = c.Commit(ctx, commits, nil)
				require.NoError(b, err)
			}
			locs := make([]kvwire.Location, 0, pages)
			b.ReportAllocs()
			for b.Loop() {
				l, err := c.Match(ctx, kvwire.Match{DeadlineUS: 1e6, Tokens: prompt}, locs)
				if err != nil || int(l.Pages) != pages {
					b.Fatal(l.Pages, l.Reason, err)
				}
				if _, err := c.Release(ctx, kvwire.Release{Lease: l.Lease}); err != nil {
					b.Fatal(err)
				}
				if err := c.Drop(ctx, l.Handle); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkBareChain(b *testing.B) {
	for _, page := range []int{16, 128} {
		b.Run(fmt.Sprint(page), func(b *testing.B) {
			prompt := tokens(benchTokens, 1)
			buf := make([]byte, kvwire.HashSize+4*page)
			for b.Loop() {
				for at := 0; at+4*page <= len(prompt); at += 4 * page {
					copy(buf[kvwire.HashSize:], prompt[at:at+4*page])
					sum := sha256.Sum256(buf)
					copy(buf, sum[:])
				}
			}
		})
	}
}
