package mesh

import (
	"context"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

const (
	benchPage  = 2 << 20
	benchPages = 8
)

// BenchmarkFill fills pages of 2 MiB over loopback, between two nodes in this
// process. Its ceiling is BenchmarkBareTCP.
func BenchmarkFill(b *testing.B) {
	holder, reader := pair(b, nil)
	pages := testHashes("p", benchPages)
	put(b, holder, pages, 1, benchPage)
	waitListed(b, reader, "holder", pages)
	b.SetBytes(benchPages * benchPage)
	b.ReportAllocs()
	for b.Loop() {
		n, why := reader.Fill(context.Background(), reader.request(pages, 1))
		require.Equal(b, benchPages, n, why.String())
		b.StopTimer()
		reader.space.Reset()
		b.StartTimer()
	}
}

// BenchmarkBareTCP moves the same frames from the same arena into the other,
// with writev and without challenge, checks or table.
func BenchmarkBareTCP(b *testing.B) {
	holder, reader := pair(b, nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer ln.Close()
	from := holder.cache.Arena().Bytes(0, benchPages*benchPage)
	to := reader.cache.Arena().Bytes(0, benchPages*benchPage)
	done := make(chan struct{})
	header := make([]byte, kvwire.HeaderSize+kvwire.PageHeaderSize)
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		one := make([]byte, 1)
		for {
			if _, err := io.ReadFull(c, one); err != nil {
				return
			}
			for i := range int64(benchPages) {
				bufs := net.Buffers{header, from[i*benchPage : (i+1)*benchPage]}
				if _, err := bufs.WriteTo(c); err != nil {
					return
				}
			}
		}
	}()
	c, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(b, err)
	in := make([]byte, len(header))
	b.SetBytes(benchPages * benchPage)
	for b.Loop() {
		_, err := c.Write([]byte{1})
		require.NoError(b, err)
		for i := range int64(benchPages) {
			_, err := io.ReadFull(c, in)
			require.NoError(b, err)
			_, err = io.ReadFull(c, to[i*benchPage:(i+1)*benchPage])
			require.NoError(b, err)
		}
	}
	_ = c.Close()
	<-done
}

// BenchmarkMiss looks up a prefix that none of 64 peers holds.
func BenchmarkMiss(b *testing.B) {
	n := startNode(b, "a", nil)
	peers := make([]*peer, 64)
	for i := range peers {
		peers[i] = &peer{m: n.Mesh, name: string(rune('A' + i))}
		digests := make([]uint64, 8192)
		for j, h := range testHashes(peers[i].name, len(digests)) {
			digests[j] = digestOf(h)
		}
		peers[i].filter.Store(newFilter(digests))
	}
	n.peers.list.Store(&peers)
	req := n.request(testHashes("nobody's", 2048), 1)
	ctx, cancel := context.WithTimeout(context.Background(), n.cfg.FillTimeout*1000)
	defer cancel()
	b.ReportAllocs()
	for b.Loop() {
		if got, _ := n.Fill(ctx, req); got != 0 {
			b.Fatal("held")
		}
	}
	n.peers.list.Store(nil)
}
