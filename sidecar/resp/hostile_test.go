package resp

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
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

// fine requires that somebody else is served.
func (n *node) fine(t testing.TB) {
	t.Helper()
	c := n.dial(t)
	c.want("+OK\r\n", "SET", "fine", "yes")
	c.want(bulk("yes"), "GET", "fine")
	require.NoError(t, c.Close())
}

func TestGarbageClosesOnlyItsConnection(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	f := func(in, reply string) {
		t.Helper()
		c := n.dial(t)
		c.send([]byte(in))
		require.Equal(t, "-ERR Protocol error: "+reply+"\r\n", c.reply())
		c.closed()
		n.fine(t)
	}
	f("*x\r\n", "invalid multibulk length")
	f("*1\r\nGET\r\n", `expected '$', got 'G'`)
	f("*1\r\n\r\n", `expected '$', got '\x00'`)
	f("*1\r\n$x\r\n", "invalid bulk length")
	f("*1\r\n$-1\r\n", "invalid bulk length")
	f("*2\r\n$3\r\nGET\r\n$1\r\nabc", "a bulk string does not end where its length says")
	f("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nabc", "a bulk string does not end where its length says")
	f("*99999999999999999999\r\n", "invalid multibulk length")
	f("*2147483647\r\n", fmt.Sprintf("2147483647 arguments are more than %d", MaxArgs))
	f(fmt.Sprintf("*%d\r\n", MaxArgs+1), fmt.Sprintf("%d arguments are more than %d", MaxArgs+1, MaxArgs))
	f("*2\r\n$3\r\nGET\r\n$9223372036854775807\r\n", "invalid bulk length")
	f(fmt.Sprintf("*2\r\n$3\r\nGET\r\n$%d\r\n", MaxSkip+1), fmt.Sprintf("an argument of %d bytes is above %d", MaxSkip+1, MaxSkip))
	f(fmt.Sprintf("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$%d\r\n", MaxSkip+1), fmt.Sprintf("an argument of %d bytes is above %d", MaxSkip+1, MaxSkip))
	f(strings.Repeat("x", MaxInline), "too big inline request")
	f("*"+strings.Repeat("1", MaxInline), "too big inline request")
	// At the limits there is no error.
	c := n.dial(t)
	c.send([]byte("PING " + strings.Repeat("x", MaxInline-7) + "\r\n"))
	require.Equal(t, bulk(strings.Repeat("x", MaxInline-7)), c.reply())
	c.send([]byte("*0\r\n*-1\r\n"))
	c.want("+PONG\r\n", "PING")
	many := append([]string{"EXISTS"}, strings.Split(strings.Repeat("k ", MaxArgs-1), " ")[:MaxArgs-1]...)
	c.want(":0\r\n", many...)
	n.fine(t)
}

func TestLimitsOfArguments(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	key := strings.Repeat("k", MaxKey)
	c.want("+OK\r\n", "SET", key, "1")
	c.want(bulk("1"), "GET", key)
	c.want("*1\r\n"+bulk(key), "KEYS", "kk*")
	c.fails("above the limit of 4096", "SET", key+"k", "1")
	c.fails("above the limit of 4096", "GET", key+"k")
	c.fails("above the limit of 4096", "MSET", "a", "1", key+"k", "1")
	arg := strings.Repeat("x", MaxArg)
	c.want(bulk(arg), "ECHO", arg)
	c.fails("above the limit of 65536", "ECHO", arg+"x")
	var big []string
	for range MaxArgBytes/MaxKey + 1 {
		big = append(big, key)
	}
	c.fails("together are above the limit", append([]string{"EXISTS"}, big...)...)
	c.want(fmt.Sprintf(":%d\r\n", MaxArgBytes/MaxKey-1), append([]string{"EXISTS"}, big[2:]...)...)

	// The longest value, and one byte more.
	most := int(n.maxValue)
	value := content(1, most)
	c.want("+OK\r\n", "SET", "big", value)
	require.Equal(t, bulk(value), c.do("GET", "big"))
	c.fails(fmt.Sprintf("value of %d bytes is above the limit of %d", most+1, most), "SET", "big", value+"x")
	c.fails("0 of 1 values were stored", "MSET", "big", value+"x")
	c.fails("1 of 2 values were stored", "MSET", "small", "x", "big", value+"x")
	require.Equal(t, bulk(value), c.do("GET", "big"), "the old one stays")
	assert.EqualValues(t, 3, n.counter(`refused_stores_total{reason="too_large"}`))
	c.want("+PONG\r\n", "PING")
}

func TestHugeDeclaredLengthsCostNothing(t *testing.T) {
	n := start(t, 16<<20)
	before := heap()
	for range 50 {
		c := n.dial(t)
		c.send([]byte("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1073741824\r\nxyz"))
		c.send([]byte(strings.Repeat("y", 100<<10)))
		d := n.dial(t)
		d.send([]byte("*65536\r\n$4\r\nMGET\r\n$4096\r\nk"))
	}
	n.fine(t)
	assert.Less(t, heap(), before+50*2*(readBuffer+writeBuffer+64<<10))
}

// Invariant 4: values under way together have at most a quarter of the arena.
func TestValuesThatDoNotComeAreBounded(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	var last string
	for i := range 6 {
		c := n.dial(t)
		c.send([]byte(fmt.Sprintf("*3\r\n$3\r\nSET\r\n$1\r\n%d\r\n$1048576\r\nxyz", i)))
		if i < 3 {
			require.Eventually(t, func() bool { return n.cache.Stats().Held == int64(i+1) }, timeout, tick)
			continue
		}
		c.send([]byte(content(1, 1<<20-3) + "\r\n"))
		last = c.reply()
		assert.Contains(t, last, "-OOM")
	}
	n.fine(t)
	assert.NotZero(t, n.counter(`refused_stores_total{reason="over_budget"}`))
}

func TestLongPipelines(t *testing.T) {
	n := start(t, 16<<20)
	before := heap()
	c := n.dial(t)
	many := 100_000
	if raceOn {
		many /= 10
	}
	go func() {
		var b bytes.Buffer
		for i := range many {
			b.Write(encode("SET", fmt.Sprintf("k%d", i%100), fmt.Sprintf("v%d", i)))
		}
		for range many {
			b.Write(encode("GET", "k7"))
		}
		_, _ = c.Write(b.Bytes())
	}()
	for range many {
		require.Equal(t, "+OK\r\n", c.reply())
	}
	want := fmt.Sprintf("v%d", many-93)
	for range many {
		require.Equal(t, bulk(want), c.reply())
	}
	n.fine(t)
	assert.Less(t, heap(), before+16<<20)
}

// A client that asks and does not read is closed, pins little until then, and
// holds nobody up.
func TestSlowReader(t *testing.T) {
	n := start(t, 64<<20, func(c *Config) { c.writeTimeout = 300 * time.Millisecond })
	w := n.dial(t)
	value := content(1, 4<<20)
	w.want("+OK\r\n", "SET", "big", value)
	small := content(2, 8<<10)
	w.want("+OK\r\n", "SET", "small", small)
	before := heap()
	var slow []*peer
	for i := range 20 {
		c := n.dial(t)
		require.NoError(t, c.SetReadBuffer(4096))
		name := []string{"big", "small"}[i%2]
		c.send(bytes.Repeat(encode("GET", name), 1000))
		slow = append(slow, c)
	}
	for range 20 {
		require.Equal(t, bulk(value), w.do("GET", "big"))
		assert.LessOrEqual(t, n.cache.Stats().PinnedBytes, int64(32<<20))
	}
	assert.Less(t, heap(), before+20<<20)
	require.Eventually(t, func() bool { return n.Connections() == 1 }, timeout, tick)
	assert.EqualValues(t, 20, n.counter("slow_connections_total"))
	assert.Zero(t, n.cache.Stats().PinnedBytes)
	for _, c := range slow {
		_, err := io.Copy(io.Discard, c)
		_ = err // closed with bytes that were never read
	}
	n.fine(t)
}

// Invariant 4: what slow readers pin counts for the cap of leases and pins.
func TestPinnedBytesAreCapped(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20, func(c *Config) { c.writeTimeout = timeout })
	w := n.dial(t)
	for i := range 4 {
		w.want("+OK\r\n", "SET", fmt.Sprintf("k%d", i), content(uint64(i), 3<<20))
	}
	for i := range 2 {
		c := n.dial(t)
		require.NoError(t, c.SetReadBuffer(4096))
		c.send(bytes.Repeat(encode("GET", fmt.Sprintf("k%d", i)), 10))
		require.Eventually(t, func() bool { return n.cache.Stats().PinnedBytes > int64(i+1)*3<<20 }, timeout, tick)
	}
	w.fails("BUSY", "GET", "k2")
	w.want("*1\r\n$-1\r\n", "MGET", "k2")
	require.Equal(t, bulk(content(1, 3<<20)), w.do("GET", "k1"), "pinned already")
	assert.EqualValues(t, 2, n.counter(`missed_total{reason="pinned"}`))
}

func TestHalfClosedSocketsAreAnswered(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	value := content(1, 1<<20)
	c.send(encode("SET", "a", value))
	c.send(encode("GET", "a"))
	c.send([]byte("*2\r\n$3\r\nGET\r\n$5\r\nhal")) // and never more
	require.NoError(t, c.CloseWrite())
	require.Equal(t, "+OK\r\n", c.reply())
	require.Equal(t, bulk(value), c.reply())
	c.closed()
	// A value that ends too early is not stored.
	c = n.dial(t)
	c.send([]byte("*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$500000\r\nxyz"))
	require.NoError(t, c.CloseWrite())
	c.closed()
	c = n.dial(t)
	c.want(":0\r\n", "EXISTS", "b")
	require.Eventually(t, func() bool { return n.cache.Stats().Held == 0 }, timeout, tick)
}

func TestStalledCommandsEnd(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20, func(c *Config) { c.stallTimeout = 50 * time.Millisecond })
	for _, in := range []string{"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$500000\r\nxyz", "*2\r\n$3\r\nGE", "PIN"} {
		c := n.dial(t)
		c.send([]byte(in))
		assert.Contains(t, c.reply(), "-ERR timeout")
		c.closed()
	}
	c := n.dial(t)
	c.want("+PONG\r\n", "PING")
	<-time.After(100 * time.Millisecond)
	c.want("+PONG\r\n", "PING") // between commands there is time
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
	c := n.dial(t)
	require.Equal(t, "-ERR max number of clients reached\r\n", c.reply())
	c.closed()
	for _, nc := range all {
		require.NoError(t, nc.Close())
	}
	require.Eventually(t, func() bool { return n.Connections() == 0 }, timeout, tick)
	n.fine(t)
	assert.EqualValues(t, 1, n.counter("connections_refused_total"))
}

func TestFlushEndsStoresUnderWay(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	a, b := n.dial(t), n.dial(t)
	a.send([]byte("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$100000\r\n"))
	require.Eventually(t, func() bool { return n.cache.Stats().Held == 1 }, timeout, tick)
	b.want("+OK\r\n", "FLUSHDB")
	a.send([]byte(content(1, 100000) + "\r\n"))
	require.Contains(t, a.reply(), "reset")
	b.want("$-1\r\n", "GET", "a")
	assert.EqualValues(t, 1, n.counter(`refused_stores_total{reason="reset"}`))
}

// Whatever comes, the server goes on and holds nothing back.
func FuzzConnection(f *testing.F) {
	f.Add([]byte("PING\r\n"))
	f.Add(encode("SET", "a", "b"))
	f.Add(append(encode("SET", pairKey+"kv_bytes", "b", "EX", "10"), encode("MGET", "a", pairKey+"metadata")...))
	f.Add([]byte("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$100000\r\nabc"))
	f.Add([]byte("*3\r\n$4\r\nMSET\r\n$1\r\na\r\n$-5\r\nabc"))
	f.Add([]byte("set a \"\\x41\\\"\nscan 0 match [^\\]-z*\ngetrange a -5 9\n"))
	f.Add(append(encode("HELLO", "3"), encode("CONFIG", "GET", "*")...))
	n := start(f, 1<<20)
	f.Fuzz(func(t *testing.T, in []byte) {
		c := n.dial(t)
		_, _ = c.Write(in)
		_ = c.CloseWrite()
		out, err := io.ReadAll(c)
		if err == nil && len(out) > 0 {
			require.Contains(t, "+-:$*_%", string(out[:1]))
		}
		require.NoError(t, c.Close())
		n.fine(t)
		require.Eventually(t, func() bool { return n.cache.Stats().Held == 0 && n.Connections() == 0 }, timeout, tick)
		require.Zero(t, n.counter("panics_total"))
	})
}

func FuzzHeader(f *testing.F) {
	k := parseKey([]byte(chunkKey))
	b := make([]byte, headerSize(&k))
	putHeader(b, &k, 5)
	f.Add(b)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHeader(b)
		if err == nil {
			require.LessOrEqual(t, headerFixed+h.key, h.size)
			require.LessOrEqual(t, h.key, MaxKey)
		}
	})
}

func FuzzKeyAndPattern(f *testing.F) {
	f.Add([]byte(chunkKey), []byte("*@[0-9]*"))
	f.Add([]byte(pairKey+"metadata"), []byte(`[^\]`))
	f.Fuzz(func(t *testing.T, name, pattern []byte) {
		k := parseKey(name)
		require.Equal(t, string(name), string(k.text)+k.kind.suffix())
		require.Equal(t, k.hash, hashKey(k.text, k.kind))
		match(pattern, name)
		require.True(t, match([]byte("*"), name))
	})
}
