package mesh

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/cache"
	"membrane/kvwire"
)

var (
	testForm = kvwire.Form{1, 2, 3}
	testNS   = kvwire.Namespace{4, 5, 6}
	testKey  = []byte("the cluster key of the tests")
)

const testTenant = "public"

// node is a mesh with its cache, and an HTTP listener that serves its address.
type node struct {
	*Mesh
	cache *cache.Cache
	space *cache.Space
	http  string
	stop  func()
}

// startNode starts a node on loopback, which the test's end closes.
func startNode(t testing.TB, name string, change func(*Config)) *node {
	t.Helper()
	cfg := Config{
		NodeID: name, ClusterName: t.Name(),
		GossipAddr: "127.0.0.1:0", DataAddr: "127.0.0.1:0",
		ClusterKey: testKey,
		Logger:     zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel),
	}
	if change != nil {
		change(&cfg)
	}
	n := &node{}
	var err error
	n.cache, err = cache.New(cache.Config{Budget: 32 << 20, ClusterKey: cfg.ClusterKey})
	require.NoError(t, err)
	n.space, err = n.cache.Space(testTenant, testNS)
	require.NoError(t, err)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status, body := n.Address(r.Method, r.URL.Path, r.Header.Get("Authorization"), time.Now())
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}))
	n.http = srv.Listener.Addr().String()
	cfg.HTTPAddr = n.http
	cfg.Store = n.cache
	n.Mesh, err = New(cfg)
	require.NoError(t, err)
	require.NoError(t, n.Start(context.Background()))
	n.stop = sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		assert.NoError(t, n.Close(ctx))
		srv.Close()
		assert.NoError(t, n.cache.Close())
	})
	t.Cleanup(n.stop)
	return n
}

// pair starts a holder and a reader that know each other.
func pair(t testing.TB, change func(*Config)) (holder, reader *node) {
	t.Helper()
	holder = startNode(t, "holder", change)
	reader = startNode(t, "reader", func(c *Config) {
		if change != nil {
			change(c)
		}
		c.Join = []string{holder.GossipAddr()}
	})
	waitPeers(t, holder, 1)
	waitPeers(t, reader, 1)
	return holder, reader
}

func eventually(t testing.TB, ok func() bool, msg string) {
	t.Helper()
	require.Eventually(t, ok, 15*time.Second, 2*time.Millisecond, msg)
}

func waitPeers(t testing.TB, n *node, peers int) {
	t.Helper()
	eventually(t, func() bool {
		known := 0
		for _, p := range n.peers.all() {
			if p.directory() != nil {
				known++
			}
		}
		return known == peers
	}, "peers' directories are not known")
}

// waitListed waits until n's picture of the peer lists all hashes.
func waitListed(t testing.TB, n *node, peer string, hashes []kvwire.Hash) {
	t.Helper()
	eventually(t, func() bool {
		for _, p := range n.peers.all() {
			if p.name != peer {
				continue
			}
			f := p.directory()
			for _, h := range hashes {
				if f == nil || !f.has(digestOf(h)) {
					return false
				}
			}
			return true
		}
		return false
	}, "the pages are not in the directory")
}

func digestOf(h kvwire.Hash) uint64 {
	return kvwire.DirectoryDigest(kvwire.PageKey{Tenant: testTenant, Namespace: testNS, Hash: h}, testForm)
}

func testHashes(chain string, n int) []kvwire.Hash {
	out := make([]kvwire.Hash, n)
	for i := range out {
		out[i] = sha256.Sum256(binary.LittleEndian.AppendUint32([]byte(chain), uint32(i)))
	}
	return out
}

// payload returns the bytes of a page's shard, the same each time.
func payload(h kvwire.Hash, shard, size int) []byte {
	r := rand.NewChaCha8(h)
	b := make([]byte, size+shard)
	_, _ = r.Read(b)
	return b[shard:]
}

func put(t testing.TB, n *node, hashes []kvwire.Hash, shards, size int) {
	t.Helper()
	for _, h := range hashes {
		for s := range shards {
			res, err := n.space.Put(kvwire.Shard{Index: uint16(s), Count: uint16(shards)}, testForm, h, payload(h, s, size))
			require.NoError(t, err)
			require.True(t, res.Stored, "%v", res.Reason)
		}
	}
}

func requireHeld(t testing.TB, n *node, hashes []kvwire.Hash, shards, size int) {
	t.Helper()
	for i, h := range hashes {
		for s := range shards {
			v, why := n.space.View(kvwire.Shard{Index: uint16(s), Count: uint16(shards)}, testForm, h, true)
			require.Equal(t, kvwire.ReasonNone, why, "page %d", i)
			require.Equal(t, payload(h, s, size), v.Bytes(), "page %d shard %d", i, s)
			v.Close()
		}
	}
}

func (n *node) request(hashes []kvwire.Hash, shards int) FillRequest {
	return FillRequest{Space: n.space, Form: testForm, Shards: shards, Hashes: hashes}
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// peerOf returns n's picture of another node.
func (n *node) peerOf(t testing.TB, name string) *peer {
	t.Helper()
	for _, p := range n.peers.all() {
		if p.name == name {
			return p
		}
	}
	require.Fail(t, "no such peer", name)
	return nil
}

// detour makes n reach a peer's data port at another address, with its
// directory as it is.
func (n *node) detour(t testing.TB, name, addr string) *peer {
	t.Helper()
	p := n.peerOf(t, name)
	p.mu.Lock()
	for _, c := range p.idle {
		c.close()
	}
	p.idle = nil
	p.addr = addr
	p.mu.Unlock()
	return p
}

// idleConn waits until the peer keeps one idle connection and returns it.
func (p *peer) idleConn(t testing.TB) (c *dataConn) {
	t.Helper()
	eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.idle) == 1 {
			c = p.idle[0]
		}
		return c != nil
	}, "no connection is kept")
	return c
}

// blamed reports whether the last pull made the peer no candidate for a while,
// over or not.
func (p *peer) blamed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.downPause > 0
}
