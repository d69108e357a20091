package resp

import (
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// exchange sends one request and reads n bytes, without an allocation.
func exchange(t testing.TB, c *peer, in, out []byte) {
	if _, err := c.Write(in); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c.TCPConn, out); err != nil {
		t.Fatal(err)
	}
}

func TestAllocations(t *testing.T) {
	if raceOn {
		t.Skip("the race detector allocates")
	}
	n := start(t, 64<<20)
	for _, size := range []int{100, 64 << 10, 2 << 20} {
		c := n.dial(t)
		value := content(1, size)
		c.want("+OK\r\n", "SET", chunkKey, value)
		c.want("+OK\r\n", "SET", "plain", value)
		f := func(most float64, want string, args ...string) {
			t.Helper()
			in, out := encode(args...), make([]byte, len(want))
			got := testing.AllocsPerRun(200, func() { exchange(t, c, in, out) })
			require.True(t, want == string(out), "%.100q", out)
			assert.LessOrEqual(t, got, most, "%s of %d bytes", args[0], size)
		}
		f(0, bulk(value), "GET", chunkKey)
		f(0, bulk(value), "GET", "plain")
		f(0, ":1\r\n", "EXISTS", chunkKey)
		// A page and its slot in the table.
		f(8, "+OK\r\n", "SET", "plain", value)
		c.want(":1\r\n", "DEL", chunkKey)
	}
}

// Invariant 4: a key costs the Go heap no more than a page may.
func TestHeapPerKey(t *testing.T) {
	if raceOn {
		t.Skip("the race detector uses memory")
	}
	n := start(t, 64<<20)
	c := n.dial(t)
	const many = 20_000
	before := heap()
	for i := range many {
		c.send(encode("SET", fmt.Sprintf("a rather long key, that must not lie on the heap, %0200d", i), "value"))
		if i%100 == 99 {
			for range 100 {
				require.Equal(t, "+OK\r\n", c.reply())
			}
		}
	}
	require.Equal(t, many, n.space(t).Len())
	assert.Less(t, (float64(heap())-float64(before))/many, 512.0)
}

func benchmark(b *testing.B, size int, set bool) {
	n := start(b, 512<<20)
	setup := n.dial(b)
	value := content(1, size)
	keys := (128 << 20) / size
	requests := make([][]byte, keys)
	for i := range keys {
		name := fmt.Sprintf("key:%064x", i)
		setup.want("+OK\r\n", "SET", name, value)
		requests[i] = encode("GET", name)
		if set {
			requests[i] = encode("SET", name, value)
		}
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	reply := len(bulk(value))
	if set {
		reply = len("+OK\r\n")
	}
	b.RunParallel(func(pb *testing.PB) {
		c := n.dial(b)
		out := make([]byte, reply)
		for i := 0; pb.Next(); i++ {
			exchange(b, c, requests[i*7%keys], out)
		}
	})
}

func BenchmarkGet64KiB(b *testing.B) { benchmark(b, 64<<10, false) }
func BenchmarkGet2MiB(b *testing.B)  { benchmark(b, 2<<20, false) }
func BenchmarkSet2MiB(b *testing.B)  { benchmark(b, 2<<20, true) }
