package resp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
)

const (
	timeout = time.Minute // of a busy machine under the race detector
	tick    = time.Millisecond
)

// node is a listener with a cache of its own.
type node struct {
	*Server
	cache *cache.Cache
	set   *metrics.Set
	addr  string
}

func start(t testing.TB, budget int64, change ...func(*Config)) *node {
	t.Helper()
	c, err := cache.New(cache.Config{Budget: budget, AllocWait: time.Second})
	require.NoError(t, err)
	cfg := Config{Cache: c, Version: "test", Metrics: metrics.NewSet(), Log: zerolog.Nop()}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, s.Serve(l))
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		assert.Zero(t, c.Stats().Held, "views and slots")
		assert.Zero(t, c.Stats().PinnedBytes)
		assert.NoError(t, c.Close())
	})
	return &node{s, c, cfg.Metrics, l.Addr().String()}
}

// counter returns one of the listener's counters.
func (n *node) counter(name string) uint64 {
	return n.set.GetOrCreateCounter("membrane_resp_" + name).Get()
}

func (n *node) space(t testing.TB) *cache.Space {
	s, err := n.cache.Space(auth.PublicTenant, namespace)
	require.NoError(t, err)
	return s
}

// peer is a Redis client that shows every byte.
type peer struct {
	t testing.TB
	*net.TCPConn
	r *bufio.Reader
}

func (n *node) dial(t testing.TB) *peer {
	t.Helper()
	nc, err := net.Dial("tcp", n.addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(timeout)))
	return &peer{t, nc.(*net.TCPConn), bufio.NewReaderSize(nc, 64<<10)}
}

// encode is a command as clients send it.
func encode(args ...string) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b
}

func (c *peer) send(b []byte) {
	c.t.Helper()
	_, err := c.Write(b)
	require.NoError(c.t, err)
}

// do sends a command and returns the reply as it came.
func (c *peer) do(args ...string) string {
	c.t.Helper()
	c.send(encode(args...))
	return c.reply()
}

// reply reads one whole reply.
func (c *peer) reply() string {
	c.t.Helper()
	s, err := c.tryReply()
	require.NoError(c.t, err, "%q", s)
	return s
}

func (c *peer) tryReply() (string, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return line, err
	}
	n, _ := strconv.Atoi(strings.TrimSpace(line[1:]))
	switch line[0] {
	case '$':
		if n < 0 {
			return line, nil
		}
		b := make([]byte, n+2)
		k, err := io.ReadFull(c.r, b)
		return line + string(b[:k]), err
	case '%':
		n *= 2
		fallthrough
	case '*':
		var all strings.Builder
		all.WriteString(line)
		for range n {
			s, err := c.tryReply()
			all.WriteString(s)
			if err != nil {
				return all.String(), err
			}
		}
		return all.String(), nil
	}
	return line, nil
}

// want sends a command and requires its reply, byte by byte.
func (c *peer) want(reply string, args ...string) {
	c.t.Helper()
	require.Equal(c.t, reply, c.do(args...), "%.100q", args)
}

// fails sends a command and requires an error that has the words in it.
func (c *peer) fails(words string, args ...string) {
	c.t.Helper()
	got := c.do(args...)
	require.Regexp(c.t, `^-[A-Z]+ .*\r\n$`, got)
	require.Contains(c.t, got, words)
}

// closed requires that the other side ends the connection.
func (c *peer) closed() {
	c.t.Helper()
	_, err := c.r.ReadByte()
	require.ErrorIs(c.t, err, io.EOF)
}

func bulk(s string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(s), s) }

// random is what all contents are cut from: making them costs more than sending.
var random = sync.OnceValue(func() string {
	b := make([]byte, 8<<20)
	r := rand.New(rand.NewPCG(1, 0))
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return string(b)
})

// content is n random bytes, others for another seed.
func content(seed uint64, n int) string {
	all := random()
	from := int(seed * 4099 % uint64(len(all)-n))
	return all[from : from+n]
}

// flip changes the last byte of a value where it lies.
func (n *node) flip(t testing.TB, name string) {
	t.Helper()
	k := parseKey([]byte(name))
	v, why := n.space(t).View(k.shard, form, k.hash, false)
	require.Equal(t, kvwire.ReasonNone, why)
	v.Bytes()[len(v.Bytes())-1] ^= 1
	v.Close()
}
