package lm

import (
	"bytes"
	"io"
	"math"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// heap is what lives on the Go heap, in bytes.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestGarbageClosesOnlyItsConnection(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	bad := [][]byte{
		encode(0, "k", 0, bf16),
		encode(6, "k", 0, bf16),
		encode(-1, "k", 0, bf16),
		encode(math.MaxInt32, "k", 0, bf16),
		encode(1, "", 3, bf16),
		encode(2, "", 0, bf16),
		encode(3, "   ", 0, bf16),
		encode(2, "a\nb", 0, bf16),
		encode(2, "a\x00", 0, bf16),
		encode(2, "a\x7f", 0, bf16),
		encode(1, "k", -1, bf16),
		encode(1, "k", MaxSkip+1, bf16),
		encode(1, "k", math.MinInt32, bf16),
		bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 20),
	}
	for i, in := range bad {
		c := n.dial(t)
		c.send(in)
		c.closed()
		require.EqualValues(t, i+1, n.counter("bad_requests_total"), "%q", in)
	}
	n.fine(t)
}

func TestLongestValue(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	most := int(n.maxValue)
	key := string(bytes.Repeat([]byte("k"), MaxKey))
	c.put(key+"", content(1, most), bf16)
	c.has(key, content(1, most), bf16)
	c.put("more", content(2, most+1), bf16)
	c.lacks("more")
	assert.EqualValues(t, 1, n.counter(`refused_stores_total{reason="too_large"}`))
	n.fine(t)
}

func TestHugeDeclaredLengthsCostNothing(t *testing.T) {
	n := start(t, 16<<20)
	some := []byte(content(1, 100<<10))
	before := heap()
	for range 50 {
		c := n.dial(t)
		c.send(encode(1, "k", MaxSkip, bf16))
		c.send(some)
	}
	n.fine(t)
	assert.Less(t, heap(), before+50*(readBuffer+16<<10))
}

func TestOnlyWhatCameIsCountedAsReceived(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	c.put("k", content(1, 100), bf16)
	c.has("k", content(1, 100), bf16)
	cut := n.dial(t)
	cut.send(encode(1, "cut", MaxSkip, bf16))
	cut.send(make([]byte, 1000))
	require.Eventually(t, func() bool { return n.counter(`requests_total{command="put"}`) == 2 }, timeout, tick)
	require.NoError(t, cut.Close())
	require.Eventually(t, func() bool { return n.Connections() == 1 }, timeout, tick)
	assert.EqualValues(t, 100, n.counter("received_bytes_total"))
}

// Invariant 4: values under way together have at most a quarter of the arena.
func TestValuesThatDoNotComeAreBounded(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	for i := range 6 {
		c := n.dial(t)
		c.send(encode(1, string(rune('a'+i)), 1<<20, bf16))
		if i < 3 {
			c.send([]byte("xyz"))
			require.Eventually(t, func() bool { return n.cache.Stats().Held == int64(i+1) }, timeout, tick)
			continue
		}
		c.send([]byte(content(1, 1<<20)))
		c.lacks(string(rune('a' + i)))
	}
	n.fine(t)
	assert.EqualValues(t, 3, n.counter(`refused_stores_total{reason="over_budget"}`))
}

func TestPipelines(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	var all bytes.Buffer
	for i := range 200 {
		key := string(rune('a' + i%20))
		all.Write(encode(1, key, 1000+i%20, bf16))
		all.WriteString(content(uint64(i%20), 1000+i%20))
		all.Write(encode(2, key, 0, format{}))
	}
	go func() { _, _ = c.Write(all.Bytes()) }()
	for i := range 200 {
		got, value := c.reply()
		require.EqualValues(t, 200, got[0])
		require.Equal(t, content(uint64(i%20), 1000+i%20), value)
	}
	n.fine(t)
}

// A client that asks and does not read is closed, pins little until then, and
// holds nobody up.
func TestSlowReader(t *testing.T) {
	n := start(t, 64<<20, func(c *Config) { c.writeTimeout = 300 * time.Millisecond })
	w := n.dial(t)
	value := content(1, 4<<20)
	w.put("big", value, bf16)
	w.has("big", value, bf16)
	before := heap()
	for range 20 {
		c := n.dial(t)
		require.NoError(t, c.SetReadBuffer(4096))
		c.send(bytes.Repeat(encode(2, "big", 0, format{}), 50))
	}
	for range 20 {
		w.has("big", value, bf16)
		assert.LessOrEqual(t, n.cache.Stats().PinnedBytes, int64(32<<20))
	}
	assert.Less(t, heap(), before+20<<20)
	require.Eventually(t, func() bool { return n.Connections() == 1 }, timeout, tick)
	assert.EqualValues(t, 20, n.counter("slow_connections_total"))
	assert.Zero(t, n.cache.Stats().PinnedBytes)
	n.fine(t)
}

// Invariant 4: what slow readers pin counts for the cap of leases and pins.
func TestPinnedBytesAreCapped(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20, func(c *Config) { c.writeTimeout = timeout })
	w := n.dial(t)
	for i := range 4 {
		w.put(string(rune('a'+i)), content(uint64(i), 3<<20), bf16)
	}
	assert.True(t, w.exists("d"))
	for i := range 2 {
		c := n.dial(t)
		require.NoError(t, c.SetReadBuffer(4096))
		c.send(bytes.Repeat(encode(2, string(rune('a'+i)), 0, format{}), 10))
		require.Eventually(t, func() bool { return n.cache.Stats().PinnedBytes > int64(i+1)*3<<20 }, timeout, tick)
	}
	w.lacks("c")
	w.has("b", content(1, 3<<20), bf16) // pinned already
	assert.EqualValues(t, 1, n.counter(`missed_total{reason="pinned"}`))
}

func TestHalfClosedSocketsAreAnswered(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	value := content(1, 1<<20)
	c.put("a", value, bf16)
	c.send(encode(2, "a", 0, format{}))
	c.send(encode(2, "a", 0, format{})[:100]) // and never more
	require.NoError(t, c.CloseWrite())
	_, got := c.reply()
	require.True(t, value == got)
	c.closed()
	// A value that ends too early is not stored.
	c = n.dial(t)
	c.send(encode(1, "b", 500_000, bf16))
	c.send([]byte("xyz"))
	require.NoError(t, c.CloseWrite())
	c.closed()
	c = n.dial(t)
	c.lacks("b")
	require.Eventually(t, func() bool { return n.cache.Stats().Held == 0 }, timeout, tick)
}

func TestStalledRequestsEnd(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20, func(c *Config) { c.stallTimeout = 50 * time.Millisecond })
	for _, in := range [][]byte{encode(1, "b", 500_000, bf16), encode(2, "b", 0, bf16)[:185], {2}} {
		c := n.dial(t)
		c.send(in)
		c.closed()
	}
	assert.EqualValues(t, 3, n.counter("slow_connections_total"))
	c := n.dial(t)
	c.lacks("b")
	<-time.After(100 * time.Millisecond)
	c.lacks("b") // between requests there is time
}

func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	var all []net.Conn
	for range MaxFromOne {
		nc, err := net.Dial("tcp", n.addr)
		require.NoError(t, err)
		all = append(all, nc)
	}
	require.Eventually(t, func() bool { return n.Connections() == MaxFromOne }, timeout, tick)
	n.dial(t).closed()
	assert.EqualValues(t, 1, n.counter("connections_refused_total"))
	for _, nc := range all {
		require.NoError(t, nc.Close())
	}
	require.Eventually(t, func() bool { return n.Connections() == 0 }, timeout, tick)
	n.fine(t)
}

func TestResetEndsStoresUnderWay(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	c.send(encode(1, "a", 100_000, bf16))
	require.Eventually(t, func() bool { return n.cache.Stats().Held == 1 }, timeout, tick)
	n.space.Reset()
	c.send([]byte(content(1, 100_000)))
	c.lacks("a")
	assert.EqualValues(t, 1, n.counter(`refused_stores_total{reason="reset"}`))
}

// Whatever comes, the server goes on and holds nothing back.
func FuzzConnection(f *testing.F) {
	f.Add(append(encode(1, chunk, 3, bf16), "abc"...))
	f.Add(append(append(encode(1, chunk, 3, bf16), "abc"...), encode(2, chunk, 0, bf16)...))
	f.Add(encode(1, chunk, 100_000, bf16))
	f.Add(encode(3, "", -1, format{}))
	f.Add(append(encode(5, "", 0, format{}), encode(4, "", 5, format{})...))
	n := start(f, 1<<20)
	f.Fuzz(func(t *testing.T, in []byte) {
		c := n.dial(t)
		_, _ = c.Write(in)
		_ = c.CloseWrite()
		out, err := io.ReadAll(c)
		if err == nil && len(out) > 0 {
			require.GreaterOrEqual(t, len(out), replySize)
			require.Contains(t, "\xc8\x90", string(out[:1]))
		}
		require.NoError(t, c.Close())
		n.fine(t)
		require.Eventually(t, func() bool { return n.cache.Stats().Held == 0 && n.Connections() == 0 }, timeout, tick)
		require.Zero(t, n.counter("panics_total"))
	})
}

func FuzzRequest(f *testing.F) {
	f.Add(encode(1, chunk, 3, bf16))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := parseRequest(b)
		if err != nil {
			return
		}
		require.LessOrEqual(t, len(q.key), MaxKey)
		require.True(t, q.length >= 0 && q.length <= MaxSkip)
		again, err := parseRequest(encode(int32(q.command), string(q.key), int(q.length), q.format))
		require.NoError(t, err)
		require.Equal(t, q, again)
	})
}

func FuzzHeader(f *testing.F) {
	b := make([]byte, 100)
	putHeader(b[:headerSize([]byte("k"))], []byte("k"), bf16)
	f.Add(b)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, at, err := parseHeader(b); err == nil {
			require.LessOrEqual(t, at, len(b))
			require.LessOrEqual(t, at, maxHeader)
		}
	})
}
