package disagg

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"membrane/cache"
	"membrane/engines/llama"
	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/fragments"
	"membrane/sidecar/roles"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is a service with its cache, which other nodes reach without a network.
type node struct {
	*Service
	name  string
	cache *cache.Cache
	set   *metrics.Set
	fake  *fakePeers
}

// fakePeers is the mesh of a node: the other nodes, in order.
type fakePeers struct {
	own    string
	mu     sync.Mutex
	others []*node
	hang   bool // manifests are not answered
	// ahead is by how much this node's clock is ahead of the others'.
	ahead time.Duration
}

func (f *fakePeers) Name() string { return f.own }

func (f *fakePeers) list() []*node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.others
}

func (f *fakePeers) Fill(_ context.Context, r mesh.FillRequest) (int, kvwire.Reason) {
	for i, h := range r.Hashes {
		if r.Space.Has(r.Form, h) {
			continue
		}
		got := false
		for _, o := range f.list() {
			there := o.cache.Lookup(r.Space.Tenant(), r.Space.Namespace())
			if there == nil {
				continue
			}
			v, _ := there.View(whole, r.Form, h, true)
			if v == nil {
				continue
			}
			_, err := r.Space.Put(whole, r.Form, h, v.Bytes())
			v.Close()
			got = err == nil
			break
		}
		if !got {
			return i, kvwire.ReasonAbsent
		}
	}
	return len(r.Hashes), kvwire.ReasonNone
}

func (f *fakePeers) FindManifest(ctx context.Context, tenant string, h kvwire.Hash, may func(mesh.Member) bool) (found mesh.FoundManifest) {
	for _, o := range f.list() {
		s := o.cfg.Roles.State()
		if !may(mesh.Member{Name: o.name, Role: string(s.Role), Status: mesh.StatusAlive}) {
			continue
		}
		found.Asked++
		if f.hang {
			<-ctx.Done()
			found.Silent++
			continue
		}
		if found.Manifest = f.seen(o.Manifest(tenant, h)); found.Manifest != nil {
			break
		}
	}
	return found
}

// seen returns a manifest of another node with its times as they look here.
func (f *fakePeers) seen(body []byte) []byte {
	if f.ahead == 0 || body == nil {
		return body
	}
	m, err := kvwire.ParseManifest(body)
	if err != nil {
		return nil
	}
	if m.Created != 0 {
		m.Created -= f.ahead.Milliseconds()
	}
	m.Expires -= f.ahead.Milliseconds()
	return kvwire.AppendManifest(nil, m)
}

// Follow has no network to wait for: it takes what is there.
func (f *fakePeers) Follow(ctx context.Context, r mesh.FillRequest, held func(int)) (int, kvwire.Reason) {
	for {
		n, why := f.Fill(ctx, r)
		if held(n); why == kvwire.ReasonNone || ctx.Err() != nil {
			return n, why
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
}

func (f *fakePeers) WaitManifest(ctx context.Context, name, tenant string, h kvwire.Hash) ([]byte, error) {
	for _, o := range f.list() {
		if o.name == name {
			return f.seen(o.WaitManifest(ctx, tenant, h)), ctx.Err()
		}
	}
	return nil, errors.New("no such node")
}

func (f *fakePeers) ManifestPulled(_ context.Context, name, tenant string, h kvwire.Hash) error {
	for _, o := range f.list() {
		if o.name == name {
			o.Pulled(tenant, h)
		}
	}
	return nil
}

type option func(*Config, *cache.Config)

func withRole(role string) option {
	return func(c *Config, _ *cache.Config) { c.Roles = keeper(role) }
}

func keeper(role string) *roles.Keeper {
	k, _ := roles.New(roles.Config{Setting: role})
	return k
}

func newNode(t *testing.T, name string, options ...option) *node {
	t.Helper()
	n := &node{name: name, set: metrics.NewSet(), fake: &fakePeers{own: name}}
	cfg := Config{Peers: n.fake, Roles: keeper("both"), Metrics: n.set, Log: zerolog.Nop()}
	cc := cache.Config{Budget: 64 << 20}
	for _, o := range options {
		o(&cfg, &cc)
	}
	var err error
	n.cache, err = cache.New(cc)
	require.NoError(t, err)
	fs, err := fragments.New(fragments.Config{Cache: n.cache, Metrics: n.set})
	require.NoError(t, err)
	cfg.Cache = n.cache
	if cfg.Backend == nil {
		cfg.Backend = Embedded(fs)
	}
	n.Service, err = New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		n.Close()
		fs.Close()
		require.Zero(t, n.cache.Stats().Pins, "pins are left")
		require.NoError(t, n.cache.Close())
	})
	return n
}

// connect makes the nodes each other's peers.
func connect(nodes ...*node) {
	for _, n := range nodes {
		for _, o := range nodes {
			if o != n {
				n.fake.mu.Lock()
				n.fake.others = append(n.fake.others, o)
				n.fake.mu.Unlock()
			}
		}
	}
}

func upTo(n int) []int64 {
	out := make([]int64, n)
	for i := range out {
		out[i] = int64(i*7 + 3)
	}
	return out
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func prefillOf(tokens []int64) PrefillRequest {
	return PrefillRequest{RequestID: "r", Model: "m", Tokens: tokens}
}

func (n *node) mustPrefill(t *testing.T, tenant string, tokens []int64) Prefilled {
	t.Helper()
	p, err := n.Prefill(within(t, time.Minute), tenant, prefillOf(tokens))
	require.NoError(t, err)
	return p
}

func (n *node) mustDecode(t *testing.T, tenant, handle string, most int) Decoded {
	t.Helper()
	d, err := n.Decode(within(t, time.Minute), tenant, DecodeRequest{RequestID: "d", Handle: handle, Model: "m", MaxTokens: most}, nil)
	require.NoError(t, err)
	return d
}

// greedy is what the model says behind a prompt, computed without any of ours.
func greedy(t *testing.T, tokens []int64, n int) (out []uint32) {
	t.Helper()
	m, err := llama.Generate("m")
	require.NoError(t, err)
	ids := make([]uint32, len(tokens))
	for i := range ids {
		ids[i] = uint32(tokens[i])
	}
	kv := m.NewKV(64)
	logits, err := m.Prefill(context.Background(), kv, ids)
	require.NoError(t, err)
	require.NoError(t, m.Greedy(context.Background(), kv, logits, n, func(token uint32) bool {
		out = append(out, token)
		return true
	}))
	return out
}

// kindOf returns the kind of an error and the error, which must be one that
// the caller can do something about.
func kindOf(t *testing.T, err error) (Kind, *Error) {
	t.Helper()
	var e *Error
	require.ErrorAs(t, err, &e)
	require.NotEmpty(t, e.Message)
	require.NotContains(t, e.Code(), " ")
	if e.Kind == Busy {
		require.GreaterOrEqual(t, e.RetryAfter, time.Second)
	}
	return e.Kind, e
}
