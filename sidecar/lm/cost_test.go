package lm

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
		key := fmt.Sprint(size)
		c.put(key, content(1, size), bf16)
		c.has(key, content(1, size), bf16)
		in, out := encode(2, key, 0, format{}), make([]byte, 36+size)
		got := testing.AllocsPerRun(200, func() { exchange(t, c, in, out) })
		require.True(t, content(1, size) == string(out[36:]))
		assert.Zero(t, got, "get of %d bytes", size)
		in = encode(3, key, 0, format{})
		got = testing.AllocsPerRun(200, func() { exchange(t, c, in, out[:36]) })
		assert.Zero(t, got, "exist")
	}
}

func benchmark(b *testing.B, size int) {
	n := start(b, 512<<20)
	setup := n.dial(b)
	keys := (128 << 20) / size
	requests := make([][]byte, keys)
	for i := range keys {
		name := fmt.Sprintf("key:%064x", i)
		setup.put(name, content(1, size), bf16)
		requests[i] = encode(2, name, 0, format{})
	}
	setup.has(fmt.Sprintf("key:%064x", keys-1), content(1, size), bf16)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		c := n.dial(b)
		out := make([]byte, 36+size)
		for i := 0; pb.Next(); i++ {
			exchange(b, c, requests[i*7%keys], out)
		}
	})
}

func BenchmarkGet64KiB(b *testing.B) { benchmark(b, 64<<10) }
func BenchmarkGet2MiB(b *testing.B)  { benchmark(b, 2<<20) }
