package mesh

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// BenchmarkServe is a batch_read alone: the holder's side of BenchmarkFill,
// with a reader that throws the bytes away.
func BenchmarkServe(b *testing.B) {
	holder := startNode(b, "holder", nil)
	pages := testHashes("p", benchPages)
	put(b, holder, pages, 1, benchPage)
	c, err := dialData(context.Background(), holder.DataAddr(), "holder", "reader", testKey)
	require.NoError(b, err)
	defer c.close()
	body := kvwire.AppendBatchRead(nil, kvwire.BatchRead{
		DeadlineUS: uint32(maxReadTime.Microseconds()), Form: testForm, Namespace: holder.space.Namespace(), Tenant: holder.space.Tenant(), Hashes: pages,
	})
	b.SetBytes(benchPages * benchPage)
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, c.c.SetDeadline(time.Now().Add(time.Minute)))
		require.NoError(b, c.send(kvwire.TypeBatchRead, body))
		for range benchPages {
			h, err := kvwire.ReadHeader(c.r)
			require.NoError(b, err)
			require.Equal(b, kvwire.TypePage, h.Type)
			n, err := io.CopyN(io.Discard, c.r, int64(h.Length))
			require.NoError(b, err)
			require.Greater(b, n, int64(benchPage), "a page that is held")
		}
		h, err := kvwire.ReadHeader(c.r)
		require.NoError(b, err)
		_, err = c.answer(h, kvwire.TypeBatchRead)
		require.NoError(b, err)
	}
}
