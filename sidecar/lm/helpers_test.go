package lm

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
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
	chunk   = "org/model@1@0@0123456789abcdef@bfloat16"
)

var bf16 = format{layout: 1, dtype: 3, shape: [4]int32{2, 4, 256, 64}}

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
	cfg := Config{Cache: c, Tenant: auth.PublicTenant, Metrics: metrics.NewSet(), Log: zerolog.Nop()}
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
	return n.set.GetOrCreateCounter("membrane_lm_" + name).Get()
}

// peer is a client as LMCache's: whole requests, whole replies.
type peer struct {
	t testing.TB
	*net.TCPConn
}

func (n *node) dial(t testing.TB) *peer {
	t.Helper()
	nc, err := net.Dial("tcp", n.addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(timeout)))
	return &peer{t, nc.(*net.TCPConn)}
}

// encode is a request, written apart from the code that is tested.
func encode(cmd int32, key string, length int, f format) []byte {
	b := make([]byte, 0, 186)
	for _, n := range []int32{cmd, int32(length), f.layout, f.dtype, 0, f.shape[0], f.shape[1], f.shape[2], f.shape[3]} {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	b = append(b, key...)
	for len(b) < 186 {
		b = append(b, ' ')
	}
	return b
}

func (c *peer) send(b []byte) {
	c.t.Helper()
	_, err := c.Write(b)
	require.NoError(c.t, err)
}

// reply reads the nine integers and what they announce.
func (c *peer) reply() ([9]int32, string) {
	c.t.Helper()
	var b [36]byte
	_, err := io.ReadFull(c, b[:])
	require.NoError(c.t, err)
	var n [9]int32
	for i := range n {
		n[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
	}
	value := make([]byte, n[1])
	_, err = io.ReadFull(c, value)
	require.NoError(c.t, err)
	return n, string(value)
}

func (c *peer) put(key, value string, f format) {
	c.t.Helper()
	c.send(encode(1, key, len(value), f))
	c.send([]byte(value))
}

// missing is LMCache's own server's reply to what is not there.
var missing = [9]int32{400, 0, 1, 2}

// has requires a value.
func (c *peer) has(key, value string, f format) {
	c.t.Helper()
	c.send(encode(2, key, 0, format{}))
	n, got := c.reply()
	require.Equal(c.t, [9]int32{200, int32(len(value)), f.layout, f.dtype, f.shape[0], f.shape[1], f.shape[2], f.shape[3], 0}, n)
	require.True(c.t, value == got, "%.100q", got)
}

// lacks requires that a value is not there.
func (c *peer) lacks(key string) {
	c.t.Helper()
	c.send(encode(2, key, 0, format{}))
	n, _ := c.reply()
	require.Equal(c.t, missing, n)
}

// exists asks for a key.
func (c *peer) exists(key string) bool {
	c.t.Helper()
	c.send(encode(3, key, 0, format{}))
	n, _ := c.reply()
	return n == [9]int32{200, 0, 1, 2}
}

// closed requires that the other side ends the connection.
func (c *peer) closed() {
	c.t.Helper()
	_, err := c.Read(make([]byte, 1))
	require.ErrorIs(c.t, err, io.EOF)
}

// fine requires that somebody else is served.
func (n *node) fine(t testing.TB) {
	t.Helper()
	c := n.dial(t)
	c.put("fine", "yes", bf16)
	c.has("fine", "yes", bf16)
	require.NoError(t, c.Close())
}

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

// flip changes a byte of a value's slot where it lies, counted from the end.
func (n *node) flip(t testing.TB, key string, fromEnd int) {
	t.Helper()
	v, why := n.space.View(shard, form, hashKey([]byte(key)), false)
	require.Equal(t, kvwire.ReasonNone, why)
	v.Bytes()[len(v.Bytes())-fromEnd] ^= 1
	v.Close()
}
