package resp

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/cache"
	"membrane/kvwire"
)

func TestCommands(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	c.want("+PONG\r\n", "PING")
	c.want(bulk("x"), "ping", "x")
	c.want(bulk("é"), "ECHO", "é")
	c.want("+OK\r\n", "SELECT", "0")
	c.fails("out of range", "SELECT", "1")
	c.want("$-1\r\n", "GET", "a")
	c.want("+OK\r\n", "SET", "a", "1")
	c.want("+OK\r\n", "SET", "a", "two")
	c.want(bulk("two"), "GET", "a")
	c.want(":3\r\n", "STRLEN", "a")
	c.want(":0\r\n", "STRLEN", "none")
	c.want("+OK\r\n", "SET", "empty", "")
	c.want("$0\r\n\r\n", "GET", "empty")
	c.want("*3\r\n$3\r\ntwo\r\n$-1\r\n$0\r\n\r\n", "MGET", "a", "none", "empty")
	c.want(":2\r\n", "EXISTS", "a", "none", "a")
	c.want("+string\r\n", "TYPE", "a")
	c.want("+none\r\n", "TYPE", "none")
	c.want(":1\r\n", "TOUCH", "a", "none")

	c.want("+OK\r\n", "MSET", "b", "1", "c", "2")
	c.fails("wrong number", "MSET", "b", "1", "c")
	c.want("*2\r\n$1\r\n1\r\n$1\r\n2\r\n", "MGET", "b", "c")
	c.want(":2\r\n", "DEL", "b", "c", "d")
	c.want(":0\r\n", "UNLINK", "b")

	c.want("$-1\r\n", "SET", "a", "3", "NX")
	c.want("$-1\r\n", "SET", "n", "3", "xx")
	c.want(bulk("two"), "GET", "a")
	c.want("+OK\r\n", "SET", "n", "3", "nx")
	c.want("+OK\r\n", "SET", "n", "4", "XX")
	c.want(bulk("4"), "GET", "n")
	c.fails("syntax error", "SET", "n", "4", "NX", "XX")
	c.fails("syntax error", "SET", "n", "4", "WHAT")
	c.fails("KEEPTTL is not supported", "SET", "n", "4", "KEEPTTL")
	c.fails("GET is not supported", "SET", "n", "4", "GET")
	for _, bad := range []string{"0", "-1", "x", "", "9223372036854775807", "99999999999999999999"} {
		c.fails("invalid expire", "SET", "n", "5", "EX", bad)
	}
	c.want(bulk("4"), "GET", "n")

	for _, r := range []struct{ from, to, want string }{
		{"0", "-1", "0123456789"}, {"2", "4", "234"}, {"-3", "-1", "789"}, {"5", "100", "56789"}, {"7", "3", ""}, {"-100", "2", "012"}, {"11", "12", ""},
	} {
		c.want("+OK\r\n", "SET", "r", "0123456789")
		c.want(bulk(r.want), "GETRANGE", "r", r.from, r.to)
	}
	c.want("$0\r\n\r\n", "GETRANGE", "none", "0", "-1")
	c.fails("not an integer", "GETRANGE", "r", "0", "x")
	c.want(":74\r\n", "MEMORY", "USAGE", "r")
	c.want("$-1\r\n", "MEMORY", "USAGE", "none")
	c.want(":74\r\n", "MEMORY", "USAGE", "r", "SAMPLES", "0")
	c.fails("subcommand", "MEMORY", "DOCTOR")

	c.want("*0\r\n", "COMMAND")
	c.want("*0\r\n", "COMMAND", "DOCS", "get")
	c.want(fmt.Sprintf(":%d\r\n", len(commands)), "COMMAND", "COUNT")
	c.want("*2\r\n$4\r\nsave\r\n$0\r\n\r\n", "CONFIG", "GET", "save")
	c.want("*2\r\n$10\r\nappendonly\r\n$2\r\nno\r\n", "CONFIG", "GET", "append*")
	c.fails("only CONFIG GET", "CONFIG", "SET", "save", "")
	c.want("$-1\r\n", "CLIENT", "GETNAME")
	c.want("+OK\r\n", "CLIENT", "SETNAME", "me")
	c.want(bulk("me"), "CLIENT", "GETNAME")
	c.fails("cannot contain", "CLIENT", "SETNAME", "a b")
	c.want("+OK\r\n", "CLIENT", "SETINFO", "LIB-NAME", "x")
	assert.Regexp(t, `^:\d+\r\n$`, c.do("CLIENT", "ID"))
	c.fails("unknown subcommand", "CLIENT", "KILL", "x")
	assert.Contains(t, c.do("INFO"), "redis_version:7")
	c.want(":4\r\n", "DBSIZE")
	c.fails("unknown command 'HSET'", "HSET", "a", "b", "c")
	c.fails("unknown command 'a?b'", "a\nb")
	c.fails("wrong number of arguments for 'get'", "GET")
	c.fails("wrong number of arguments for 'get'", "GET", "a", "b")
	c.fails("open", "AUTH", "x")
	c.want("+OK\r\n", "FLUSHDB", "ASYNC")
	c.want(":0\r\n", "DBSIZE")
	c.want("+OK\r\n", "FLUSHALL")
	c.want("+RESET\r\n", "RESET")
	c.want("$-1\r\n", "CLIENT", "GETNAME")
	c.want("+OK\r\n", "QUIT")
	c.closed()
}

func TestResp3(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	c.fails("NOPROTO", "HELLO", "4")
	assert.Regexp(t, `^\*14\r\n\$6\r\nserver\r\n\$5\r\nredis\r\n\$7\r\nversion\r\n\$6\r\n7\.0\.15\r\n\$5\r\nproto\r\n:2\r\n`, c.do("HELLO", "2"))
	three := c.do("HELLO", "3", "SETNAME", "me")
	assert.Regexp(t, `^%7\r\n\$6\r\nserver\r\n`, three)
	assert.Contains(t, three, "proto\r\n:3\r\n")
	c.want("_\r\n", "GET", "a")
	c.want("*2\r\n_\r\n_\r\n", "MGET", "a", "b")
	c.want("%1\r\n$4\r\nsave\r\n$0\r\n\r\n", "CONFIG", "GET", "save")
	c.want("+OK\r\n", "SET", "a", "1")
	c.want("_\r\n", "SET", "a", "1", "NX")
	c.want(bulk("me"), "CLIENT", "GETNAME")
	c.fails("syntax", "HELLO", "3", "WHAT")
	c.want("+RESET\r\n", "RESET")
	c.want("$-1\r\n", "GET", "b")
}

func TestTimeToLive(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	value := content(1, 300<<10)
	c.want(":-2\r\n", "TTL", "a")
	c.want("+OK\r\n", "SET", "a", value, "EX", "100")
	c.want(":100\r\n", "TTL", "a")
	c.want(":1\r\n", "EXPIRE", "a", "1000")
	c.want(":1000\r\n", "TTL", "a")
	c.want(":1\r\n", "PERSIST", "a")
	c.want(":0\r\n", "PERSIST", "a")
	c.want(":-1\r\n", "PTTL", "a")
	require.Equal(t, bulk(value), c.do("GET", "a"))
	c.want(":0\r\n", "EXPIRE", "none", "5")
	c.fails("not an integer", "EXPIRE", "a", "x")
	c.want(":1\r\n", "EXPIRE", "a", "-1")
	c.want("$-1\r\n", "GET", "a")

	c.want("+OK\r\n", "SET", "b", "x", "PX", "30")
	c.want("+OK\r\n", "SET", "c", "x", "PX", "30")
	c.want("+OK\r\n", "SET", "d", "x", "PX", "30")
	require.Eventually(t, func() bool { return c.do("EXISTS", "b", "c", "d") == ":0\r\n" }, timeout, tick)
	c.want(":-2\r\n", "PTTL", "b")
	c.want(":0\r\n", "DEL", "b")
	c.want("$-1\r\n", "GET", "c")
	c.want("$-1\r\n", "SET", "d", "y", "XX")
	c.want("+OK\r\n", "SET", "d", "y", "NX")
	c.want(bulk("y"), "GET", "d")
	c.want("*1\r\n$1\r\nd\r\n", "KEYS", "*")
	assert.NotZero(t, n.cache.Stats().Evictions[kvwire.ReasonDeleted])
}

func TestPipelinesAreAnsweredInOrder(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	c := n.dial(t)
	var in []byte
	var want strings.Builder
	for i := range 100 {
		// Lengths on both sides of every limit at which values take another way.
		for _, size := range []int{0, 1, copyBelow - 1, copyBelow, copyBelow + 1, readBuffer - 10, readBuffer + 10} {
			v := content(uint64(i), size)
			key := fmt.Sprintf("k%d", i%5)
			in = append(in, encode("SET", key, v)...)
			in = append(in, encode("GET", key)...)
			in = append(in, encode("NONE")...)
			want.WriteString("+OK\r\n" + bulk(v) + "-ERR unknown command 'NONE'\r\n")
		}
	}
	for i, size := range []int{cache.PartSize - 100, cache.PartSize, cache.PartSize + 100, 2*cache.PartSize - 64, 2 << 20, 5<<20 + 1} {
		v := content(uint64(i), size)
		in = append(in, encode("MSET", "x", v, "y", "1")...)
		in = append(in, encode("MGET", "y", "x", "none", "x")...)
		in = append(in, encode("GETRANGE", "x", "100", "-100")...)
		want.WriteString("+OK\r\n*4\r\n" + bulk("1") + bulk(v) + "$-1\r\n" + bulk(v) + bulk(v[100:len(v)-99]))
	}
	go func() { _, _ = c.Write(in) }()
	got := make([]byte, want.Len())
	_, err := io.ReadFull(c.r, got)
	require.NoError(t, err)
	require.True(t, want.String() == string(got))
}

func TestInlineCommands(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	f := func(line, want string) {
		t.Helper()
		c.send([]byte(line))
		require.Equal(t, want, c.reply())
	}
	f("PING\r\n", "+PONG\r\n")
	f("\r\n\n  ping  x \n", bulk("x"))
	f("set a \"1 2\\x41\\n\\\"\" \r\n", "+OK\r\n")
	f("get 'a'\r\n", bulk("1 2A\n\""))
	f("mset b 1 c 'it\\'s'\r\n", "+OK\r\n")
	f("mget b c\r\n", "*2\r\n"+bulk("1")+bulk("it's"))
	f("SET 'm@00000001@0@ab' x\r\n", "+OK\r\n")
	f("SET 'm@00000001@0@ab' y\r\n", "+OK\r\n")
	f("GET m@00000001@0@ab\r\n", bulk("x"))
	assert.EqualValues(t, 1, n.counter("conflicts_total"))
	f("SET m@00000001@0@ab x\r\n", "+OK\r\n")
	assert.EqualValues(t, 1, n.counter("conflicts_total"))
	f("\"a\"b\r\n", "-ERR Protocol error: unbalanced quotes in request\r\n")
	c.closed()
	for _, line := range []string{"POST / HTTP/1.1\r\nHost: x\r\n\r\n", "Host: x\r\n"} {
		c = n.dial(t)
		f(line, "-ERR Protocol error: this is not HTTP\r\n")
		c.closed()
	}
}

func TestScanNamesEveryKey(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	want := make(map[string]bool)
	for i := range 5000 {
		k := fmt.Sprintf("k%d", i)
		want[k] = true
		c.send(encode("SET", k, "v"))
	}
	for range want {
		require.Equal(t, "+OK\r\n", c.reply())
	}
	all := func(args ...string) map[string]int {
		seen := make(map[string]int)
		cursor, steps := "0", 0
		for {
			lines := strings.Split(c.do(append([]string{"SCAN", cursor}, args...)...), "\r\n")
			cursor = lines[2]
			for i := 5; i < len(lines); i += 2 {
				seen[lines[i]]++
			}
			// Keys that come and go meanwhile change nothing for the others.
			c.do("SET", fmt.Sprintf("new%d", steps), "v")
			c.do("DEL", fmt.Sprintf("new%d", steps-1))
			if steps++; cursor == "0" {
				assert.Greater(t, steps, 1)
				return seen
			}
		}
	}
	seen := all()
	for k := range want {
		require.Equal(t, 1, seen[k], k)
	}
	assert.Len(t, all("MATCH", "k12?"), 10)
	assert.Len(t, all("MATCH", "k499[0-4]", "COUNT", "100"), 5)
	c.want("*2\r\n$1\r\n0\r\n*0\r\n", "SCAN", "0", "TYPE", "hash")
	for _, bad := range []string{"x", "-1", "63", "4611686018427387903", "1025"} {
		c.fails("invalid cursor", "SCAN", bad)
	}
	c.fails("syntax", "SCAN", "0", "MATCH")
	c.fails("not an integer", "SCAN", "0", "COUNT", "0")
	require.Equal(t, "*10\r\n", c.do("KEYS", "k123?")[:5])
	for i := range 5001 {
		c.send(encode("SET", fmt.Sprintf("more%d", i), "v"))
	}
	for range 5001 {
		require.Equal(t, "+OK\r\n", c.reply())
	}
	c.fails("use SCAN", "KEYS", "*")
}

func TestPatterns(t *testing.T) {
	t.Parallel()
	f := func(pattern, name string, want bool) {
		t.Helper()
		assert.Equal(t, want, match([]byte(pattern), []byte(name)), "%s %s", pattern, name)
	}
	f("*", "", true)
	f("", "", true)
	f("", "a", false)
	f("a*c*", "abcabc", true)
	f("a*d", "abc", false)
	f("?", "", false)
	f("[a-c]x", "bx", true)
	f("[^a-c]x", "bx", false)
	f("[c-a]x", "bx", true)
	f(`[\]]`, "]", true)
	f(`\*`, "*", true)
	f(`\*`, "a", false)
	f("[abc", "b", true)
	f(`a\`, `a\`, true)
	f("h[ae]llo", "hello", true)
	began := time.Now()
	f(strings.Repeat("*a", 2000)+"b", strings.Repeat("a", 4000), false)
	assert.Less(t, time.Since(began), timeout)
}

// Invariant 1: right bytes or no bytes, for values of one part and of several.
func TestWrongBytesAreNotServed(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	for _, size := range []int{10, copyBelow + 1, cache.PartSize - 100, cache.PartSize + 1, 2 << 20} {
		c := n.dial(t)
		value := content(1, size)
		c.want("+OK\r\n", "SET", "a", value)
		n.flip(t, "a")
		c.send(encode("GET", "a"))
		got, err := c.tryReply()
		if err == nil {
			require.Equal(t, "$-1\r\n", got)
		} else { // the connection ends before the value does
			require.Less(t, len(got), len(bulk(value)))
			c = n.dial(t)
		}
		c.want(":0\r\n", "EXISTS", "a")
		c.want("+OK\r\n", "SET", "a", value)
		n.flip(t, "a")
		c.want("$0\r\n\r\n", "GETRANGE", "a", "0", "5")
		c.want("+OK\r\n", "SET", "a", value)
		require.Equal(t, bulk(value), c.do("GET", "a"))
	}
	assert.EqualValues(t, 10, n.cache.Stats().Corrupt)
	assert.EqualValues(t, 10, n.counter(`missed_total{reason="corrupt"}`))
}

func TestDrain(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	c.want("+OK\r\n", "SET", "a", "1")
	c.send([]byte("*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$5\r\nhe"))
	// A value's length is counted once its command has been let in.
	require.Eventually(t, func() bool { return n.counter("received_bytes_total") == 1+5 }, timeout, tick)
	n.Drain()
	require.Equal(t, 1, n.InFlight())
	c.send([]byte("llo\r\n"))
	require.Equal(t, "+OK\r\n", c.reply(), "what is under way goes on")
	c.fails("draining", "SET", "c", "1")
	c.fails("draining", "GET", "a")
	c.want("+PONG\r\n", "PING")
	require.Eventually(t, func() bool { return n.InFlight() == 0 }, timeout, tick)
	assert.EqualValues(t, 1, n.counter(`refused_stores_total{reason="draining"}`))
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := New(Config{})
	require.ErrorContains(t, err, "Cache and Metrics")
}
