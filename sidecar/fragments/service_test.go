package fragments

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"membrane/cache"
	"membrane/engines/llama"
	"membrane/kvwire"
	"membrane/sidecar/engineport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// peerOf fills from another service's cache, as the mesh would.
type peerOf struct{ from *cache.Cache }

func (p peerOf) Fill(_ context.Context, r engineport.FillRequest) (int, kvwire.Reason) {
	there, err := p.from.Space(r.Space.Tenant(), r.Space.Namespace())
	if err != nil {
		return 0, kvwire.ReasonPeer
	}
	for i, h := range r.Hashes {
		v, why := there.View(kvwire.Shard{Count: 1}, r.Form, h, true)
		if v == nil {
			return i, why
		}
		_, err := r.Space.Put(kvwire.Shard{Count: 1}, r.Form, h, v.Bytes())
		v.Close()
		if err != nil {
			return i, kvwire.ReasonPeer
		}
	}
	return len(r.Hashes), kvwire.ReasonNone
}

func newService(t *testing.T, budget int64, fill engineport.Filler) (*Service, *cache.Cache) {
	t.Helper()
	c, err := cache.New(cache.Config{Budget: budget})
	require.NoError(t, err)
	s, err := New(Config{Cache: c, Fill: fill, Metrics: metrics.NewSet()})
	require.NoError(t, err)
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, c.Close())
	})
	return s, c
}

func upTo(n int) []int64 {
	out := make([]int64, n)
	for i := range out {
		out[i] = int64(i)
	}
	return out
}

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

func spans(fs []Fragment) (out [][2]int) {
	for _, f := range fs {
		out = append(out, f.Identity.TokenSpan)
	}
	return out
}

// The home page's example, with real bytes.
func TestPrefillOnceThenReconstruct(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, 32<<20, nil)
	fs, err := s.Prefill(ctx(t), "public", upTo(300), "llama-3-8b")
	require.NoError(t, err)
	assert.Equal(t, [][2]int{{0, 127}, {128, 255}, {256, 299}}, spans(fs))

	model, err := llama.Generate("llama-3-8b")
	require.NoError(t, err)
	kv := model.NewKV(WindowTokens)
	var ids []uint32
	for i := range 300 {
		ids = append(ids, uint32(i))
	}
	_, err = model.Prefill(ctx(t), kv, ids)
	require.NoError(t, err)
	for _, f := range fs {
		span := f.Identity.TokenSpan
		b := kv.Window(span[0], span[1]-span[0]+1)
		assert.Equal(t, payloadHash(b), f.Identity.PayloadHash, "the hash is that of the KV itself")
		assert.EqualValues(t, len(b), f.PayloadSize)
		got := s.Retrieve("public", f.Identity.PayloadHash)
		require.True(t, got.Found)
		assert.Equal(t, f, *got.Fragment)
	}
	assert.Equal(t, []int{4, 2, 2, 44, 32}, fs[2].Identity.Shape)

	r, err := s.Reconstruct(ctx(t), "public", upTo(300), "llama-3-8b", false)
	require.NoError(t, err)
	assert.Equal(t, Reconstruction{Fragments: fs, Coverage: 1, Missing: [][2]int{}, Prefetch: []string{}}, r)
	assert.EqualValues(t, 300, s.computed.Get())

	// 44 of these tokens are at the same place but not in a window of their own.
	longer, err := s.Reconstruct(ctx(t), "public", upTo(310), "llama-3-8b", false)
	require.NoError(t, err)
	assert.Equal(t, [][2]int{{256, 309}}, longer.Missing)
	assert.InDelta(t, 256.0/310, longer.Coverage, 1e-9)
	for _, other := range []func() (Reconstruction, error){
		func() (Reconstruction, error) { return s.Reconstruct(ctx(t), "public", upTo(300), "other", false) },
		func() (Reconstruction, error) { return s.Reconstruct(ctx(t), "acme", upTo(300), "llama-3-8b", false) },
		func() (Reconstruction, error) {
			return s.Reconstruct(ctx(t), "public", append([]int64{7}, upTo(299)...), "llama-3-8b", false)
		},
	} {
		r, err := other()
		require.NoError(t, err)
		assert.Zero(t, r.Coverage)
		assert.Equal(t, [][2]int{{0, 299}}, r.Missing)
		assert.Empty(t, r.Fragments)
	}
	empty, err := s.Reconstruct(ctx(t), "public", nil, "m", true)
	require.NoError(t, err)
	assert.Equal(t, Reconstruction{Fragments: []Fragment{}, Coverage: 1, Missing: [][2]int{}, Prefetch: []string{}}, empty)
}

func TestOnlyGapsAreComputedBehindTheirRealPrefix(t *testing.T) {
	t.Parallel()
	a, ac := newService(t, 32<<20, nil)
	fs, err := a.Prefill(ctx(t), "public", upTo(400), "m")
	require.NoError(t, err)
	require.Len(t, fs, 4)

	b, bc := newService(t, 32<<20, nil)
	for _, i := range []int{0, 2} { // a hole in the middle, and no end
		id, e := a.index.payload("public", fs[i].PayloadRef)
		require.NotNil(t, e)
		there, err := ac.Space(id.key.Tenant, id.key.Namespace)
		require.NoError(t, err)
		v, _ := there.View(kvwire.Shard{Count: 1}, id.form, id.key.Hash, true)
		here, err := bc.Space(id.key.Tenant, id.key.Namespace)
		require.NoError(t, err)
		_, err = here.Put(kvwire.Shard{Count: 1}, id.form, id.key.Hash, v.Bytes())
		require.NoError(t, err)
		v.Close()
	}
	r, err := b.Reconstruct(ctx(t), "public", upTo(400), "m", false)
	require.NoError(t, err)
	assert.Equal(t, [][2]int{{128, 255}, {384, 399}}, r.Missing)
	assert.Equal(t, []Fragment{fs[0], fs[2]}, r.Fragments)
	r, err = b.Reconstruct(ctx(t), "public", upTo(400), "m", true)
	require.NoError(t, err)
	assert.True(t, r.Prefilled)
	assert.Equal(t, fs, r.Fragments, "the same bytes as without the hole")
	assert.EqualValues(t, 128+16, b.computed.Get())
	assert.EqualValues(t, 256, b.loaded.Get())
}

func TestWindowsComeFromPeers(t *testing.T) {
	t.Parallel()
	a, ac := newService(t, 32<<20, nil)
	fs, err := a.Prefill(ctx(t), "acme", upTo(300), "m")
	require.NoError(t, err)
	b, _ := newService(t, 32<<20, peerOf{ac})
	r, err := b.Reconstruct(ctx(t), "acme", upTo(300), "m", false)
	require.NoError(t, err)
	assert.Equal(t, fs, r.Fragments)
	assert.Equal(t, 1.0, r.Coverage)
	assert.EqualValues(t, 300, b.fetched.Get())
	assert.Zero(t, b.computed.Get())
	assert.True(t, b.Retrieve("acme", fs[2].PayloadRef).Found)
}

func TestTenantsSeeTheirOwnAndPublicFragments(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, 32<<20, nil)
	own, err := s.Prefill(ctx(t), "acme", upTo(10), "m")
	require.NoError(t, err)
	public, err := s.Prefill(ctx(t), "public", upTo(20), "m")
	require.NoError(t, err)
	hash := own[0].PayloadRef
	miss := Retrieved{}
	assert.True(t, s.Retrieve("acme", hash).Found)
	assert.True(t, s.Retrieve("acme", "acme:"+hash).Found)
	assert.True(t, s.Retrieve("acme", public[0].PayloadRef).Found)
	for _, foreign := range []Retrieved{
		s.Retrieve("other", hash), s.Retrieve("public", hash), s.Retrieve("other", "acme:"+hash), s.Retrieve("other", "nothing"),
	} {
		assert.Equal(t, miss, foreign)
	}
	list, next := s.Inventory("acme", "", 0)
	assert.Equal(t, own, list)
	assert.Empty(t, next)
	assert.Equal(t, "acme:"+hash, list[0].StorageKey())
}

func TestInventoryPages(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, 32<<20, nil)
	_, err := s.Prefill(ctx(t), "public", upTo(128*4+1), "m")
	require.NoError(t, err)
	all, next := s.Inventory("public", "", 0)
	require.Len(t, all, 5)
	assert.Empty(t, next)
	var paged []Fragment
	for after, n := "", 0; ; n++ {
		list, next := s.Inventory("public", after, 2)
		paged = append(paged, list...)
		if after = next; next == "" {
			assert.Equal(t, 2, n)
			break
		}
	}
	assert.Equal(t, all, paged)
}

func TestIndexFollowsEvictions(t *testing.T) {
	t.Parallel()
	s, c := newService(t, 1<<20, nil) // four whole windows
	const made = 12
	for i := range made {
		_, err := s.Prefill(ctx(t), "public", upTo(100), fmt.Sprint("m", i))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		return int64(s.Len()) == c.Stats().Pages && s.Len() > 0 && s.Len() < made
	}, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { // evictions may go on meanwhile
		list, _ := s.Inventory("public", "", 0)
		for _, f := range list {
			if !s.Retrieve("public", f.PayloadRef).Found {
				return false
			}
		}
		return len(list) > 0
	}, 10*time.Second, time.Millisecond)
	s.mu.Lock()
	for _, space := range s.spaces {
		space.Reset()
	}
	s.mu.Unlock()
	require.Eventually(t, func() bool { return s.Len() == 0 }, 10*time.Second, time.Millisecond)
	assert.Empty(t, s.index.byHash)
}

func TestLostNewsIsMadeUpFor(t *testing.T) {
	t.Parallel()
	held := map[string]bool{}
	x := newIndex(func(id pageID) bool { return held[id.key.Tenant] })
	for _, tenant := range []string{"a", "b"} {
		held[tenant] = true
		x.add(pageID{key: kvwire.PageKey{Tenant: tenant}}, Fragment{Tenant: tenant, PayloadRef: tenant})
	}
	held["a"] = false
	x.follow(cache.Event{Kind: cache.Lost})
	assert.Equal(t, 1, x.len())
	x.follow(cache.Event{Kind: cache.Removed, Key: kvwire.PageKey{Tenant: "b"}}) // old news: it is back
	assert.Equal(t, 1, x.len())
}

func TestFlippedByteIsCorruptAndComputedAgain(t *testing.T) {
	t.Parallel()
	s, c := newService(t, 32<<20, nil)
	fs, err := s.Prefill(ctx(t), "public", upTo(200), "m")
	require.NoError(t, err)
	id, _ := s.index.payload("public", fs[0].PayloadRef)
	space := s.opened("public", id.key.Namespace)
	v, _ := space.View(kvwire.Shard{Count: 1}, id.form, id.key.Hash, false)
	v.Bytes()[100] ^= 1
	v.Close()
	assert.Equal(t, Retrieved{Corrupt: true, PayloadHash: fs[0].PayloadRef}, s.Retrieve("public", fs[0].PayloadRef))
	assert.EqualValues(t, 1, c.Stats().Corrupt)
	require.Eventually(t, func() bool { return s.Len() == 1 }, 10*time.Second, time.Millisecond)
	again, err := s.Prefill(ctx(t), "public", upTo(200), "m")
	require.NoError(t, err)
	assert.Equal(t, fs, again)
	assert.EqualValues(t, 200+128, s.computed.Get())
}

// TestRetrieveChecksOnceASecond looks at a fragment that was checked just now
// and, by its clock, long ago: only then are the bytes looked at.
func TestRetrieveChecksOnceASecond(t *testing.T) {
	t.Parallel()
	s, c := newService(t, 32<<20, nil)
	fs, err := s.Prefill(ctx(t), "public", upTo(128), "m")
	require.NoError(t, err)
	hash := fs[0].PayloadRef
	require.True(t, s.Retrieve("public", hash).Found)
	id, e := s.index.payload("public", hash)
	now := time.Unix(0, e.checked.Load())
	assert.False(t, e.stale(now.Add(recheckAfter-1)))
	assert.True(t, e.stale(now.Add(recheckAfter)))

	v, _ := s.opened("public", id.key.Namespace).View(kvwire.Shard{Count: 1}, id.form, id.key.Hash, false)
	v.Bytes()[100] ^= 1
	v.Close()
	e.checked.Store(time.Now().Add(time.Hour).UnixNano())
	assert.True(t, s.Retrieve("public", hash).Found)
	e.checked.Store(0)
	assert.True(t, s.Retrieve("public", hash).Corrupt)
	assert.EqualValues(t, 1, c.Stats().Corrupt)
}

func TestBadRequests(t *testing.T) {
	t.Parallel()
	s, c := newService(t, 4<<20, nil)
	f := func(err error, code kvwire.Code, field, message string) {
		t.Helper()
		var e *kvwire.Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, code, e.Code)
		assert.Equal(t, field, e.Field)
		assert.Contains(t, e.Message, message)
		assert.Zero(t, c.Stats().Pages)
	}
	prefill := func(tokens []int64, model string) error {
		_, err := s.Prefill(ctx(t), "public", tokens, model)
		return err
	}
	reconstruct := func(tokens []int64, prefill bool) error {
		_, err := s.Reconstruct(ctx(t), "public", tokens, "m", prefill)
		return err
	}
	f(prefill([]int64{1, -2}, "m"), kvwire.CodeBadField, "prompt_tokens[1]", "-2 is not")
	f(prefill([]int64{1, 2, 1 << 32}, "m"), kvwire.CodeBadField, "prompt_tokens[2]", "4294967296")
	f(prefill(upTo(MaxPrefillTokens+1), "m"), kvwire.CodeTooLarge, "prompt_tokens", "32769 tokens")
	f(prefill(upTo(1), ""), kvwire.CodeBadField, "model_id", "0 bytes")
	f(prefill(upTo(1), strings.Repeat("m", MaxModelID+1)), kvwire.CodeBadField, "model_id", "257")
	f(reconstruct(upTo(MaxReconstructTokens+1), false), kvwire.CodeTooLarge, "tokens", "131073")
	f(reconstruct(upTo(MaxPrefillTokens+1), true), kvwire.CodeTooLarge, "tokens", "32769")
	require.NoError(t, reconstruct(upTo(MaxReconstructTokens), false))
	require.NoError(t, prefillNone(s, upTo(MaxPrefillTokens)))
	require.NoError(t, prefill([]int64{0, 1<<32 - 1}, strings.Repeat("m", MaxModelID)))
}

// prefillNone passes the checks of a prefill and computes nothing.
func prefillNone(s *Service, tokens []int64) error {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Prefill(done, "public", tokens, "m"); kvwire.CodeOf(err) != kvwire.CodeBusy {
		return fmt.Errorf("not refused for time: %w", err)
	}
	return nil
}

func TestBusyEngineIsAnError(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, 4<<20, nil)
	s.cfg.ComputeTimeout = 10 * time.Millisecond
	s.engine <- struct{}{}
	_, err := s.Prefill(ctx(t), "public", upTo(10), "m")
	assert.Equal(t, kvwire.CodeBusy, kvwire.CodeOf(err))
	for range MaxWaiting + 1 {
		s.queue <- struct{}{}
	}
	_, err = s.Prefill(ctx(t), "public", upTo(10), "m")
	assert.ErrorContains(t, err, "which is the most")
	_, err = s.Reconstruct(ctx(t), "public", upTo(10), "m", false) // needs no engine
	assert.NoError(t, err)
}

func TestModelIDsAreBounded(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, 4<<20, nil)
	for i := range MaxModels {
		_, err := s.space("public", kvwire.Namespace{byte(i), byte(i >> 8)})
		require.NoError(t, err)
	}
	_, err := s.Prefill(ctx(t), "public", upTo(1), "m")
	assert.Equal(t, kvwire.CodeBusy, kvwire.CodeOf(err))
	_, err = s.Prefill(ctx(t), "acme", upTo(1), "m") // another tenant is not concerned
	require.NoError(t, err)
	_, err = s.cfg.Cache.Space("public", kvwire.Namespace{1, 2, 3}) // nor are engines
	require.NoError(t, err)
	for i := range 2 * maxModels {
		_, err := s.models.get(fmt.Sprint(i))
		require.NoError(t, err)
	}
	assert.Len(t, s.models.list, maxModels)
	a, err := s.models.get("15")
	require.NoError(t, err)
	b, err := s.models.get("15")
	require.NoError(t, err)
	assert.Same(t, a, b)
}

func TestConcurrentPrefillsAgree(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, 32<<20, nil)
	got := make(chan []Fragment, 8)
	for range cap(got) {
		go func() {
			fs, err := s.Prefill(context.Background(), "public", upTo(100), "m")
			assert.NoError(t, err)
			got <- fs
		}()
	}
	first := <-got
	for range cap(got) - 1 {
		assert.Equal(t, first, <-got)
	}
	assert.EqualValues(t, 100, s.computed.Get())
}
