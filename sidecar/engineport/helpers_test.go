package engineport

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"membrane/cache"
	"membrane/kvwire"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(dialVariable); path != "" {
		os.Exit(dialAsSomebody(path))
	}
	goleak.VerifyTestMain(m)
}

// object is the size of the test engine's pages: 64 tokens in four blocks.
const object = 4 * 1024

type port struct {
	*Server
	cache  *cache.Cache
	socket string
	tcp    string
}

// underWay waits until so much is under way: a request is so until its answer has
// been sent, which its client may see sooner.
func (p *port) underWay(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return p.InFlight() == n }, timeout, tick)
}

func newPort(t *testing.T, change ...func(*Config)) *port {
	t.Helper()
	c, err := cache.New(cache.Config{Budget: 32 << 20})
	require.NoError(t, err)
	cfg := Config{Node: "n1", Server: "membrane test", Cache: c, InboxBytes: 1 << 20, Metrics: metrics.NewSet(), Log: zerolog.Nop()}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "mb")
	require.NoError(t, err)
	p := &port{Server: s, cache: c, socket: filepath.Join(dir, "run", "engine.sock")}
	l, err := ListenSocket(p.socket)
	require.NoError(t, err)
	require.NoError(t, s.ServeSocket(l))
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, s.ServeTCP(tcp))
	p.tcp = tcp.Addr().String()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, c.Close())
		require.Zero(t, s.busy.Load())
		require.Zero(t, s.slots.Load())
		require.Zero(t, s.memory.used.Load())
		require.Zero(t, s.count.panics.Get())
		require.NoError(t, os.RemoveAll(dir))
	})
	return p
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func dial(t *testing.T, addr string, opts kvwire.ClientOptions) *kvwire.Client {
	t.Helper()
	c, err := kvwire.Dial(within(t), addr, opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func registration(engine string) kvwire.Register {
	return kvwire.Register{
		Engine: engine, Role: kvwire.RoleBoth,
		Model: kvwire.ModelFacts{WeightsID: "w", DType: "float32", RoPE: "base=10000", Layers: 2, KVHeads: 2, HeadSize: 4},
		Descriptor: kvwire.Descriptor{
			Layout: "test", DType: "float32", BlockTokens: 16, BlockBytes: 1024, TPSize: 1, PPSize: 1, Layers: [2]int{0, 2}, Heads: [2]int{0, 2},
		},
		InboxSlots: 8,
	}
}

// rank returns the registration of one process of an engine with two shards.
func rank(engine string, role kvwire.Role, tp int) kvwire.Register {
	r := registration(engine)
	r.Role = role
	r.Descriptor.TPSize, r.Descriptor.TPRank, r.Descriptor.Heads = 2, tp, [2]int{tp, tp + 1}
	return r
}

func attach(t *testing.T, addr string, reg kvwire.Register) *kvwire.Client {
	t.Helper()
	c := dial(t, addr, kvwire.ClientOptions{Inline: true})
	_, err := c.Register(within(t), reg)
	require.NoError(t, err)
	return c
}

func tokens(n int, seed uint32) []byte {
	var b []byte
	for i := range n {
		b = binary.LittleEndian.AppendUint32(b, seed+uint32(i))
	}
	return b
}

func bytesOf(page int) []byte {
	r := rand.New(rand.NewPCG(1, uint64(page)))
	b := make([]byte, object)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// store stores the first n pages of a chain through the inbox or inline.
func store(t *testing.T, c *kvwire.Client, handle uint64, n int) {
	t.Helper()
	if c.Arena() == nil {
		for i := range n {
			got, err := c.Write(within(t), kvwire.PageRef{Handle: handle, Page: uint32(i)}, bytesOf(i))
			require.NoError(t, err)
			require.Equal(t, kvwire.Committed{Status: kvwire.StoreStored, Sum: kvwire.Sum(bytesOf(i))}, got)
		}
		return
	}
	var pages []kvwire.PageRef
	for i := range n {
		pages = append(pages, kvwire.PageRef{Handle: handle, Page: uint32(i)})
	}
	slots, err := c.Reserve(within(t), pages, nil)
	require.NoError(t, err)
	var commits []kvwire.Commit
	for i, s := range slots {
		require.Equal(t, kvwire.StoreSlot, s.Status)
		copy(c.Slot(s.Slot), bytesOf(i))
		commits = append(commits, kvwire.Commit{PageRef: pages[i], Slot: s.Slot})
	}
	done, err := c.Commit(within(t), commits, nil)
	require.NoError(t, err)
	for i, d := range done {
		require.Equal(t, kvwire.Committed{Status: kvwire.StoreStored, Sum: kvwire.Sum(bytesOf(i))}, d)
	}
}

func match(t *testing.T, c *kvwire.Client, m kvwire.Match) kvwire.Leased {
	t.Helper()
	l, err := c.Match(within(t), m, nil)
	require.NoError(t, err)
	return l
}

func wantError(t *testing.T, err error, code kvwire.Code, field string) {
	t.Helper()
	var e *kvwire.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, code, e.Code, "%v", e)
	assert.Equal(t, field, e.Field, "%v", e)
	assert.NotEmpty(t, e.Message)
}

func release(t *testing.T, c *kvwire.Client, lease uint64, verify bool) uint8 {
	t.Helper()
	out, err := c.Release(within(t), kvwire.Release{Lease: lease, Verify: verify})
	require.NoError(t, err)
	return out
}
