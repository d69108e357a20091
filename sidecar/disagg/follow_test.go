package disagg

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/fragments"
)

// watched is a backend whose pages a test sees as they are computed and loaded.
type watched struct {
	Backend
	computing func(page int) // before a page is computed
	loaded    func(page int) // after a page was loaded
}

type watchedModel struct {
	Model
	w *watched
}

type watchedSequence struct {
	Sequence
	w    *watched
	page int
}

func (w *watched) Model(id string) (Model, error) {
	m, err := w.Backend.Model(id)
	return watchedModel{m, w}, err
}

func (m watchedModel) Start() Sequence { return &watchedSequence{m.Model.Start(), m.w, 0} }

func (s *watchedSequence) Load(tokens int, b []byte) error {
	err := s.Sequence.Load(tokens, b)
	s.w.loaded(s.page)
	s.page++
	return err
}

func (s *watchedSequence) Compute(ctx context.Context, tokens []uint32) ([]byte, error) {
	s.w.computing(s.page)
	s.page++
	return s.Sequence.Compute(ctx, tokens)
}

// lateManifests breaks the circle between a mesh and the service that needs it.
type lateManifests struct{ s atomic.Pointer[Service] }

func (l *lateManifests) Manifest(tenant string, h kvwire.Hash) []byte {
	return l.s.Load().Manifest(tenant, h)
}

func (l *lateManifests) WaitManifest(ctx context.Context, tenant string, h kvwire.Hash) []byte {
	return l.s.Load().WaitManifest(ctx, tenant, h)
}
func (l *lateManifests) Pulled(tenant string, h kvwire.Hash) { l.s.Load().Pulled(tenant, h) }

// realNode is a node whose peers it reaches over sockets.
type realNode struct {
	*node
	mesh *mesh.Mesh
	w    *watched
	stop func() // of the mesh alone
}

func newRealNode(t *testing.T, name, role string, join ...string) *realNode {
	t.Helper()
	set := metrics.NewSet()
	c, err := cache.New(cache.Config{Budget: 64 << 20})
	require.NoError(t, err)
	fs, err := fragments.New(fragments.Config{Cache: c, Metrics: set})
	require.NoError(t, err)
	late := &lateManifests{}
	r := &realNode{w: &watched{Backend: Embedded(fs), computing: func(int) {}, loaded: func(int) {}}}
	r.mesh, err = mesh.New(mesh.Config{
		NodeID: name, ClusterName: t.Name(), GossipAddr: "127.0.0.1:0", DataAddr: "127.0.0.1:0", Role: role, Join: join,
		Logger: zerolog.Nop(), Store: c, Manifests: late,
	})
	require.NoError(t, err)
	s, err := New(Config{Cache: c, Backend: r.w, Peers: r.mesh, Roles: keeper(role), Metrics: set, Log: zerolog.Nop()})
	require.NoError(t, err)
	late.s.Store(s)
	r.node = &node{Service: s, name: name, cache: c, set: set}
	require.NoError(t, r.mesh.Start(context.Background()))
	r.stop = sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		assert.NoError(t, r.mesh.Close(ctx))
	})
	t.Cleanup(func() {
		r.stop()
		s.Close()
		fs.Close()
		require.Zero(t, c.Stats().Pins, "pins are left")
		require.NoError(t, c.Close())
	})
	return r
}

// prefillAndDecode starts two nodes that prefill and decode.
func prefillAndDecode(t *testing.T) (p, d *realNode) {
	t.Helper()
	p = newRealNode(t, "p", "prefill")
	d = newRealNode(t, "d", "decode", p.mesh.GossipAddr())
	require.Eventually(t, func() bool { return d.mesh.Stats().Peers == 1 && p.mesh.Stats().Peers == 1 }, patience, 5*time.Millisecond)
	return p, d
}

type decoded struct {
	Decoded
	err  error
	took time.Duration
}

// follow begins a prefill and a decode of its handle as soon as that is known.
func follow(ctx context.Context, t *testing.T, p, d *realNode, tokens []int64, deadline time.Duration) (prefill chan error, decode chan decoded) {
	t.Helper()
	prefill, decode = make(chan error, 1), make(chan decoded, 1)
	r := prefillOf(tokens)
	r.Begun = func(b Prefilled) {
		go func() {
			began := time.Now()
			out, err := d.Decode(within(t, patience), "acme", DecodeRequest{RequestID: "d", Handle: b.Handle, Model: "m", MaxTokens: 4, Deadline: deadline}, nil)
			decode <- decoded{out, err, time.Since(began)}
		}()
	}
	go func() {
		_, err := p.Prefill(ctx, "acme", r)
		prefill <- err
	}()
	return prefill, decode
}

// patience is for a machine that others use, too.
const patience = 2 * time.Minute

func get[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		require.FailNow(t, "nothing came")
	}
	panic("unreachable")
}

// Each page is at the decode node before the next is computed, so the first
// leaves before the prefill ends and only the last chunk is left after it.
func TestPagesAreTakenWhileThePrefillRuns(t *testing.T) {
	t.Parallel()
	p, d := prefillAndDecode(t)
	for _, pages := range []int{3, 7} {
		tokens := upTo(pages*128 - 40)
		tokens[0] = int64(pages) // no page in common
		var mu sync.Mutex
		var at []time.Time // when each page was in the decode's sequence
		has := func(n int) bool { mu.Lock(); defer mu.Unlock(); return len(at) >= n }
		d.w.loaded = func(int) { mu.Lock(); defer mu.Unlock(); at = append(at, time.Now()) }
		p.w.computing = func(page int) {
			assert.Eventually(t, func() bool { return has(page) }, patience, time.Millisecond, "page %d does not come before the next is made", page-1)
		}
		prefill, decode := follow(within(t, patience), t, p, d, tokens, 0)
		require.NoError(t, get(t, prefill))
		end := time.Now()
		out := get(t, decode)
		require.NoError(t, out.err)
		mu.Lock()
		require.Len(t, at, pages)
		assert.True(t, at[0].Before(end), "the first page comes before the prefill ends")
		late := 0
		for _, when := range at {
			if when.After(end) {
				late++
			}
		}
		mu.Unlock()
		assert.LessOrEqual(t, late, 1, "what is left after the prefill is the last chunk, of %d", pages)
		assert.Equal(t, greedy(t, tokens, 4), out.Tokens)
		assert.Zero(t, out.Recomputed)
		assert.Equal(t, len(tokens), out.Pulled)
		assert.GreaterOrEqual(t, out.Followed, (pages-1)*128)
		assert.WithinDuration(t, time.Now().Add(DefaultTTL), out.Expires, time.Minute)
		require.Eventually(t, func() bool { return p.cache.Stats().Pins == 0 }, patience, 5*time.Millisecond, "the prefill node is not told")
	}
}

// halfway blocks a prefill before a page until it is released.
func halfway(t *testing.T, p *realNode, page int) (reached chan struct{}, release func()) {
	t.Helper()
	reached = make(chan struct{})
	blocked := make(chan struct{})
	release = sync.OnceFunc(func() { close(blocked) })
	t.Cleanup(release)
	p.w.computing = func(n int) {
		if n == page {
			close(reached)
			<-blocked
		}
	}
	return reached, release
}

func TestAPrefillThatFailsHalfwayIsFinishedByTheDecode(t *testing.T) {
	t.Parallel()
	p, d := prefillAndDecode(t)
	tokens := upTo(4 * 128)
	reached, release := halfway(t, p, 2)
	ctx, cancel := context.WithCancel(within(t, patience))
	prefill, decode := follow(ctx, t, p, d, tokens, 0)
	get(t, reached)
	cancel()
	release()
	require.Error(t, get(t, prefill))
	out := get(t, decode)
	require.NoError(t, out.err)
	assert.Equal(t, greedy(t, tokens, 4), out.Tokens)
	assert.Equal(t, 2*128, out.Pulled)
	assert.Equal(t, 2*128, out.Recomputed)
	assert.Zero(t, p.running.count())
	assert.Zero(t, p.cache.Stats().Pins)
}

func TestAPrefillNodeThatIsLostIsReplacedByTheDecode(t *testing.T) {
	t.Parallel()
	p, d := prefillAndDecode(t)
	tokens := upTo(3 * 128)
	reached, release := halfway(t, p, 2)
	loaded := make(chan int, 9)
	d.w.loaded = func(page int) { loaded <- page }
	prefill, decode := follow(within(t, patience), t, p, d, tokens, 0)
	get(t, reached)
	get(t, loaded)
	get(t, loaded)
	p.stop()
	out := get(t, decode)
	require.NoError(t, out.err)
	assert.Equal(t, greedy(t, tokens, 4), out.Tokens)
	assert.Equal(t, 128, out.Recomputed)
	release()
	require.NoError(t, get(t, prefill))
}

// A prefill that hangs costs half of the decode's time; then it computes what
// has not come.
func TestAPrefillThatHangsIsNotWaitedForTooLong(t *testing.T) {
	t.Parallel()
	p, d := prefillAndDecode(t)
	tokens := upTo(2 * 128)
	reached, release := halfway(t, p, 1)
	prefill, decode := follow(within(t, patience), t, p, d, tokens, 12*time.Second)
	get(t, reached)
	out := get(t, decode)
	require.NoError(t, out.err)
	assert.Equal(t, greedy(t, tokens, 4), out.Tokens)
	assert.Equal(t, 128, out.Recomputed)
	assert.Less(t, out.took, 12*time.Second)
	release()
	require.NoError(t, get(t, prefill))
}

func TestARunningPrefillIsItsTenants(t *testing.T) {
	t.Parallel()
	p, d := prefillAndDecode(t)
	reached, release := halfway(t, p, 0)
	handle := make(chan string, 1)
	r := prefillOf(upTo(130))
	r.Begun = func(b Prefilled) { handle <- b.Handle }
	prefill := make(chan error, 1)
	go func() { _, err := p.Prefill(within(t, patience), "acme", r); prefill <- err }()
	get(t, reached)
	h := get(t, handle)
	_, err := d.Decode(within(t, patience), "other", DecodeRequest{RequestID: "d", Handle: h, Model: "m"}, nil)
	kind, _ := kindOf(t, err)
	assert.Equal(t, NotFound, kind)
	_, err = d.Decode(within(t, patience), "acme", DecodeRequest{RequestID: "d", Handle: h, Model: "other"}, nil)
	kind, _ = kindOf(t, err)
	assert.Equal(t, Malformed, kind)

	// A caller who goes away while the decode follows leaves nothing behind.
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() {
		_, err := d.Decode(ctx, "acme", DecodeRequest{RequestID: "d", Handle: h, Model: "m"}, nil)
		gone <- err
	}()
	require.Eventually(t, func() bool { return d.mesh.Stats().Follows == 1 }, patience, time.Millisecond)
	cancel()
	kind, _ = kindOf(t, get(t, gone))
	assert.Equal(t, Gone, kind)
	assert.Zero(t, d.cache.Stats().Pins)
	release()
	require.NoError(t, get(t, prefill))
	assert.Equal(t, greedy(t, upTo(130), 2), d.mustDecode(t, "acme", h, 2).Tokens)
}

// On the node that prefills, a decode waits for the end.
func TestADecodeWaitsForAPrefillOfItsOwnNode(t *testing.T) {
	t.Parallel()
	n := newRealNode(t, "n", "both")
	reached, release := halfway(t, n, 1)
	prefill, decode := follow(within(t, patience), t, n, n, upTo(140), 0)
	get(t, reached)
	assert.Empty(t, decode)
	release()
	require.NoError(t, get(t, prefill))
	out := get(t, decode)
	require.NoError(t, out.err)
	assert.Equal(t, greedy(t, upTo(140), 4), out.Tokens)
	assert.Zero(t, out.Recomputed+out.Pulled)
}

func TestRunningPrefillsOfOnePromptEndTogether(t *testing.T) {
	t.Parallel()
	r := newRunning()
	p := &prompt{tenant: "t", handle: kvwire.Hash{1}}
	now := time.Now()
	first, second := r.begin(p, "m", now), r.begin(p, "m", now.Add(time.Second))
	one := r.get(p.id())
	assert.Equal(t, now.Add(time.Second), one.expires)
	first(false)
	first(false) // counts once
	assert.Equal(t, one, r.get(p.id()), "the other may still do it")
	second(true)
	<-one.done
	assert.Nil(t, r.get(p.id()))

	first, second = r.begin(p, "m", now), r.begin(p, "m", now)
	one = r.get(p.id())
	first(true)
	<-one.done
	third := r.begin(p, "m", now)
	second(false) // of the run before
	assert.NotNil(t, r.get(p.id()))
	third(false)
	assert.Zero(t, r.count())
}
