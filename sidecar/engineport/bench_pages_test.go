package engineport

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// benchStored is how many pages the benchmarks of pages use at a time.
const benchStored = 32

// benchPages stores pages of one prompt and returns its handle.
func benchPages(b *testing.B, c *kvwire.Client) uint64 {
	b.Helper()
	ctx := context.Background()
	l, err := c.Match(ctx, kvwire.Match{Flags: kvwire.MatchPresence, Tokens: tokens(benchStored*16, 1)}, nil)
	require.NoError(b, err)
	storeBenchPages(b, c, l.Handle)
	return l.Handle
}

func storeBenchPages(b *testing.B, c *kvwire.Client, handle uint64) {
	ctx := context.Background()
	var refs []kvwire.PageRef
	for i := range benchStored {
		refs = append(refs, kvwire.PageRef{Handle: handle, Page: uint32(i)})
	}
	slots, err := c.Reserve(ctx, refs, nil)
	require.NoError(b, err)
	var commits []kvwire.Commit
	for i, s := range slots {
		require.Equal(b, kvwire.StoreSlot, s.Status)
		commits = append(commits, kvwire.Commit{PageRef: refs[i], Slot: s.Slot})
	}
	done, err := c.Commit(ctx, commits, nil)
	require.NoError(b, err)
	for _, d := range done {
		require.Equal(b, kvwire.StoreStored, d.Status)
	}
}

// BenchmarkLeaseRelease leases pages of a known chain and gives them back: two
// requests. The allocations are the client's and the port's together.
func BenchmarkLeaseRelease(b *testing.B) {
	ctx := context.Background()
	c := benchEngine(b, 16)
	handle := benchPages(b, c)
	locs := make([]kvwire.Location, 0, benchStored)
	b.ReportAllocs()
	for b.Loop() {
		l, err := c.Lease(ctx, kvwire.LeaseRequest{Handle: handle, Pages: benchStored, DeadlineUS: 1e6}, locs)
		if err != nil || l.Pages != benchStored {
			b.Fatal(l, err)
		}
		if _, err := c.Release(ctx, kvwire.Release{Lease: l.Lease}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRead reads leased pages inline.
func BenchmarkRead(b *testing.B) {
	ctx := context.Background()
	c := benchEngine(b, 16)
	l, err := c.Lease(ctx, kvwire.LeaseRequest{Handle: benchPages(b, c), Pages: benchStored, DeadlineUS: 1e6, LeaseMS: 30_000}, nil)
	require.NoError(b, err)
	dst := make([]byte, 16*16)
	b.SetBytes(int64(benchStored * len(dst)))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%1000 == 999 { // the lease must not end
			b.StopTimer()
			_, err := c.Release(ctx, kvwire.Release{Lease: l.Lease})
			require.NoError(b, err)
			l, err = c.Lease(ctx, kvwire.LeaseRequest{Handle: l.Handle, Pages: benchStored, DeadlineUS: 1e6, LeaseMS: 30_000}, nil)
			require.NoError(b, err)
			b.StartTimer()
		}
		err := c.Read(ctx, kvwire.Read{Lease: l.Lease, Pages: benchStored}, func(int, int64) []byte { return dst })
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkStore reserves and commits pages that are new each time.
func BenchmarkStore(b *testing.B) {
	ctx := context.Background()
	c := benchEngine(b, 16)
	handle := benchPages(b, c)
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		_, err := c.Reset(ctx)
		require.NoError(b, err)
		b.StartTimer()
		storeBenchPages(b, c, handle)
	}
}
