package disagg

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/roles"
)

// The point of it all: one node prefills, another decodes behind that KV and
// computes no prompt token.
func TestDecodeFromAHandleComputesNoPrompt(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 128, 200} {
		a, b := newNode(t, "a", withRole("prefill")), newNode(t, "b", withRole("decode"))
		connect(a, b)
		prompt := upTo(n)
		p := a.mustPrefill(t, "acme", prompt)
		assert.Len(t, p.Handle, 64)
		assert.Equal(t, n, p.Tokens)
		assert.Zero(t, p.Cached)
		assert.WithinDuration(t, time.Now().Add(DefaultTTL), p.Expires, time.Minute)
		d := b.mustDecode(t, "acme", p.Handle, 12)
		assert.Equal(t, greedy(t, prompt, 12), d.Tokens, "%d tokens", n)
		assert.True(t, d.Finished)
		assert.Equal(t, FinishLength, d.Reason)
		assert.Equal(t, n, d.Prompt)
		assert.Equal(t, n, d.Pulled)
		assert.Zero(t, d.Recomputed)
		assert.Zero(t, b.m.recomputed.Get())
		assert.EqualValues(t, n, b.m.pulled.Get())
		assert.Equal(t, p.Expires.UnixMilli(), d.Expires.UnixMilli())

		// Again, from what is here now.
		again := b.mustDecode(t, "acme", p.Handle, 12)
		assert.Equal(t, d.Tokens, again.Tokens)
		assert.Zero(t, again.Pulled)
		assert.Zero(t, b.m.recomputed.Get())
	}
}

func TestPrefillReusesWhatIsHere(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "a"), newNode(t, "b")
	connect(a, b)
	first := a.mustPrefill(t, "acme", upTo(300))
	assert.Equal(t, 300, a.mustPrefill(t, "acme", upTo(300)).Cached)
	assert.EqualValues(t, 300, a.m.computed.Get(), "nothing is computed the second time")
	longer := a.mustPrefill(t, "acme", upTo(400))
	assert.Equal(t, 256, longer.Cached)
	assert.NotEqual(t, first.Handle, longer.Handle)
	// A node that has none of it takes it from the other; of the last token it
	// needs what comes behind.
	there := b.mustPrefill(t, "acme", upTo(300))
	assert.Equal(t, first.Handle, there.Handle)
	assert.Equal(t, 300, there.Cached)
	assert.EqualValues(t, 1, b.m.computed.Get())
	assert.EqualValues(t, 300, b.m.fetched.Get())
	assert.Equal(t, greedy(t, upTo(300), 5), b.mustDecode(t, "acme", there.Handle, 5).Tokens)
}

func TestOneHandleOfTwoTenants(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "a", withRole("prefill")), newNode(t, "b", withRole("decode"))
	connect(a, b)
	acme := a.mustPrefill(t, "acme", upTo(200))
	_, err := b.Decode(within(t, time.Minute), "other", DecodeRequest{RequestID: "d", Handle: acme.Handle, Model: "m"}, nil)
	kind, e := kindOf(t, err)
	assert.Equal(t, NotFound, kind)
	assert.Contains(t, e.Error(), "prefill again")
	assert.Nil(t, a.Manifest("other", kvwire.Hash{}))
	other := a.mustPrefill(t, "other", upTo(200))
	assert.Equal(t, acme.Handle, other.Handle)
	assert.EqualValues(t, 400, a.m.computed.Get(), "tenants share nothing")
	assert.Equal(t, b.mustDecode(t, "acme", acme.Handle, 3).Tokens, b.mustDecode(t, "other", other.Handle, 3).Tokens)
}

// Pages that are gone or have wrong bytes are computed again, are counted, and
// the tokens are right.
func TestMissingAndCorruptPagesAreComputedAgain(t *testing.T) {
	t.Parallel()
	prompt := upTo(128*2 + 10)
	want := greedy(t, prompt, 8)
	for _, spoil := range []struct {
		name  string
		pages []int
		want  int
	}{{"first", []int{0}, 128}, {"last", []int{2}, 10}, {"two", []int{1, 2}, 138}} {
		for _, how := range []string{"gone", "corrupt"} {
			a := newNode(t, "a")
			p := a.mustPrefill(t, "acme", prompt)
			model, err := a.cfg.Backend.Model("m")
			require.NoError(t, err)
			wire, err := kvwire.CheckTokens("t", prompt)
			require.NoError(t, err)
			pages, err := a.newPrompt("acme", model, "m", wire)
			require.NoError(t, err)
			for _, i := range spoil.pages {
				if how == "gone" {
					require.True(t, pages.space.Remove(pages.form, pages.pages[i].hash))
					continue
				}
				v, _ := pages.space.View(whole, pages.form, pages.pages[i].hash, false)
				require.NotNil(t, v)
				v.Bytes()[100] ^= 0x40
				v.Close()
			}
			d := a.mustDecode(t, "acme", p.Handle, 8)
			assert.Equal(t, want, d.Tokens, "%s %s", spoil.name, how)
			assert.Equal(t, spoil.want, d.Recomputed, "%s %s", spoil.name, how)
			assert.EqualValues(t, spoil.want, a.m.recomputed.Get())
			assert.Zero(t, a.mustDecode(t, "acme", p.Handle, 1).Recomputed, "what was computed again is here again")
		}
	}
}

// Invariant 5: pages under a handle stay whatever else comes, until they are
// pulled.
func TestPagesUnderAHandleStayUntilPulled(t *testing.T) {
	t.Parallel()
	small := func(_ *Config, c *cache.Config) { c.Budget = 4 << 20 }
	a, b := newNode(t, "a", small), newNode(t, "b")
	connect(a, b)
	kept := a.mustPrefill(t, "acme", upTo(300))
	flood := func() {
		other, err := a.cache.Space("flood", kvwire.Namespace{1})
		require.NoError(t, err)
		for i := range 200 {
			_, err := other.Put(whole, kvwire.Form{1}, kvwire.Hash{byte(i), 1}, make([]byte, 200<<10))
			require.NoError(t, err)
		}
	}
	flood()
	assert.EqualValues(t, 3, a.cache.Stats().Pins)
	d := b.mustDecode(t, "acme", kept.Handle, 4)
	assert.Zero(t, d.Recomputed)
	require.Eventually(t, func() bool { return a.cache.Stats().Pins == 0 }, 10*time.Second, time.Millisecond, "the pull ends the pins")
	assert.EqualValues(t, 1, a.m.pullsHeard.Get())
	assert.Zero(t, b.cache.Stats().Pins)
	_, pinned, _ := a.handles.counts()
	assert.Zero(t, pinned)
	assert.Nil(t, a.Manifest("acme", kvwire.Hash{}))
}

func TestPinsHaveACap(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a", func(_ *Config, c *cache.Config) { c.Budget = 4 << 20 })
	var err error
	handles := 0
	for i := range 40 {
		tokens := upTo(128)
		tokens[0] = int64(i)
		if _, err = a.Prefill(within(t, time.Minute), "acme", prefillOf(tokens)); err != nil {
			break
		}
		handles++
	}
	kind, e := kindOf(t, err)
	assert.Equal(t, Busy, kind)
	assert.Equal(t, "pinned", e.Code())
	assert.Greater(t, handles, 2)
	s := a.cache.Stats()
	assert.LessOrEqual(t, s.PinnedBytes, int64(2<<20))
	assert.EqualValues(t, handles, s.Pins, "the refused one leaves no pin")
	assert.Empty(t, e.Field)
}

// Whether a handle has expired is for the node that keeps it to say: its clock is
// the one that it was made by.
func TestClocksMayDiffer(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{2 * DefaultTTL, -2 * DefaultTTL} {
		a, b := newNode(t, "a", withRole("prefill")), newNode(t, "b", withRole("decode"))
		connect(a, b)
		b.fake.ahead = ahead
		prompt := upTo(200)
		p := a.mustPrefill(t, "acme", prompt)
		for range 2 {
			d := b.mustDecode(t, "acme", p.Handle, 4)
			assert.Equal(t, greedy(t, prompt, 4), d.Tokens)
			assert.Zero(t, d.Recomputed)
			assert.WithinDuration(t, time.Now(), d.Expires, DefaultTTL)
		}
	}
}

func TestHandlesExpire(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a", func(c *Config, _ *cache.Config) { c.TTL = time.Second })
	p := a.mustPrefill(t, "acme", upTo(10))
	require.Eventually(t, func() bool {
		all, _, bytes := a.handles.counts()
		return all == 0 && bytes == 0 && a.cache.Stats().Pins == 0
	}, 10*time.Second, 10*time.Millisecond)
	_, err := a.Decode(within(t, time.Minute), "acme", DecodeRequest{RequestID: "d", Handle: p.Handle, Model: "m"}, nil)
	kind, e := kindOf(t, err)
	assert.Equal(t, NotFound, kind)
	assert.Contains(t, e.Message, "expired")
	assert.EqualValues(t, 1, a.m.expired.Get())
	_, err = New(Config{})
	assert.Error(t, err)
}

func TestHandlesAreBounded(t *testing.T) {
	t.Parallel()
	c, err := cache.New(cache.Config{Budget: cache.MinBudget})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	h := newHandles(c)
	now := time.Now()
	add := func(tenant string, i, bytes int) bool {
		e := &entry{body: make([]byte, bytes), expires: now.Add(time.Duration(i+5) * time.Second)}
		wait, ok := h.put(handleID{tenant, kvwire.Hash{byte(i), byte(i >> 8), byte(bytes), byte(bytes >> 8)}}, e, now)
		if !ok {
			assert.Equal(t, 5*time.Second, wait, "when the first one expires")
		}
		return ok
	}
	for i := range MaxHandles / 2 {
		require.True(t, add("a", i, 1), i)
	}
	assert.False(t, add("a", MaxHandles, 1), "one tenant has half")
	assert.True(t, add("a", 0, 1), "the same one again")
	for i := range MaxHandles / 2 {
		require.True(t, add("b", i, 1))
	}
	assert.False(t, add("c", 0, 1))
	assert.Equal(t, MaxHandles, h.sweep(now.Add(2*time.Hour)))
	all, _, bytes := h.counts()
	assert.Zero(t, all)
	assert.Zero(t, bytes)
	assert.Empty(t, h.tenants)
	assert.True(t, add("a", 0, MaxHandleBytes/2))
	assert.False(t, add("a", 1, 1))
	assert.True(t, add("b", 1, MaxHandleBytes/2))
	assert.False(t, add("c", 2, 1))
	id := handleID{"b", kvwire.Hash{9}}
	h.sweep(now.Add(2 * time.Hour))
	h.put(id, &entry{expires: now.Add(time.Minute), pins: []uint64{1}}, now)
	h.putCopy(id, &entry{expires: now.Add(time.Hour)}, now)
	assert.Equal(t, []uint64{1}, h.get(id, now).pins, "a copy does not take the place of what was prefilled here")
	h.putCopy(id, &entry{expires: now.Add(time.Hour)}, now.Add(2*time.Minute))
	assert.Empty(t, h.get(id, now).pins, "but of what has expired")
	h.close()
	_, ok := h.put(handleID{}, &entry{}, now)
	assert.False(t, ok)
}

func TestBadRequestsStoreNothing(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a")
	ctx := within(t, time.Minute)
	prefill := func(kind Kind, field, message string, change func(*PrefillRequest)) {
		t.Helper()
		r := prefillOf([]int64{1, 2})
		change(&r)
		_, err := a.Prefill(ctx, "acme", r)
		got, e := kindOf(t, err)
		assert.Equal(t, kind, got, "%v", err)
		assert.Equal(t, field, e.Field)
		assert.Contains(t, e.Message, message)
	}
	long := func(n int) string { return strings.Repeat("x", n) }
	prefill(Malformed, "request_id", "missing", func(r *PrefillRequest) { r.RequestID = "" })
	prefill(Malformed, "request_id", "257 bytes are more than 256", func(r *PrefillRequest) { r.RequestID = long(257) })
	prefill(Malformed, "model_id", "missing", func(r *PrefillRequest) { r.Model = "" })
	prefill(Malformed, "model_id", "257 bytes", func(r *PrefillRequest) { r.Model = long(257) })
	prefill(Malformed, "token_ids", "is empty", func(r *PrefillRequest) { r.Tokens = nil })
	prefill(Malformed, "token_ids[1]", "-1 is not a token id", func(r *PrefillRequest) { r.Tokens = []int64{1, -1} })
	prefill(Malformed, "token_ids[0]", "4294967296", func(r *PrefillRequest) { r.Tokens = []int64{1 << 32} })
	prefill(Malformed, "token_ids", "32769 tokens are more than 32768", func(r *PrefillRequest) { r.Tokens = upTo(MaxPromptTokens + 1) })
	prefill(Malformed, "token_type_ids", "send one for each", func(r *PrefillRequest) { r.TypeIDs = []int64{0} })
	prefill(Malformed, "token_type_ids[1]", "no token types", func(r *PrefillRequest) { r.TypeIDs = []int64{0, 1} })
	prefill(Malformed, "max_decode_tokens", "-1 is not", func(r *PrefillRequest) { r.MaxDecodeTokens = -1 })
	prefill(Malformed, "fingerprint", "129 bytes", func(r *PrefillRequest) { r.Fingerprint = long(129) })
	prefill(Malformed, "deadline_ms", "is not between", func(r *PrefillRequest) { r.Deadline = MaxDeadline + 1 })

	batch := func(n int, message string) {
		t.Helper()
		rs := make([]PrefillRequest, n)
		for i := range rs {
			rs[i] = prefillOf([]int64{int64(i)})
		}
		_, err := a.PrefillBatch(ctx, "acme", rs)
		got, e := kindOf(t, err)
		assert.Equal(t, Malformed, got)
		assert.Equal(t, "requests", e.Field)
		assert.Contains(t, e.Message, message)
	}
	batch(0, "0 requests are not 1 to 64")
	batch(MaxBatch+1, "65 requests")
	_, err := a.PrefillBatch(ctx, "acme", []PrefillRequest{prefillOf(upTo(5)), prefillOf([]int64{-1})})
	_, e := kindOf(t, err)
	assert.Equal(t, "requests[1].token_ids[0]", e.Field)

	handle := strings.Repeat("ab", 32)
	decode := func(kind Kind, field, message string, change func(*DecodeRequest)) {
		t.Helper()
		r := DecodeRequest{RequestID: "d", Handle: handle, Model: "m"}
		change(&r)
		_, err := a.Decode(ctx, "acme", r, nil)
		got, e := kindOf(t, err)
		assert.Equal(t, kind, got, "%v", err)
		assert.Equal(t, field, e.Field)
		assert.Contains(t, e.Message, message)
	}
	decode(NotFound, "kv_handle", "prefill again", func(*DecodeRequest) {})
	decode(NotFound, "kv_handle", "64 hexadecimal digits", func(r *DecodeRequest) { r.Handle = "abc" })
	decode(Malformed, "kv_handle", "missing", func(r *DecodeRequest) { r.Handle = "" })
	decode(Malformed, "kv_handle", "257 bytes", func(r *DecodeRequest) { r.Handle = long(257) })
	for _, path := range []string{"../" + handle, "a/b", `a\b`, "a%2fb", "a b", "a\x00", "é"} {
		decode(Malformed, "kv_handle", "is not allowed", func(r *DecodeRequest) { r.Handle = path })
	}
	decode(Malformed, "kv_handle", "is a path", func(r *DecodeRequest) { r.Handle = ".." })
	decode(Malformed, "max_tokens", "-1 is not", func(r *DecodeRequest) { r.MaxTokens = -1 })
	decode(Malformed, "max_tokens", "32769 is not", func(r *DecodeRequest) { r.MaxTokens = MaxOutputTokens + 1 })
	decode(Malformed, "temperature", "-0.1 is not", func(r *DecodeRequest) { r.Sampling.Temperature = -0.1 })
	decode(Malformed, "temperature", "NaN", func(r *DecodeRequest) { r.Sampling.Temperature = math.NaN() })
	decode(Malformed, "top_p", "1.1 is not", func(r *DecodeRequest) { r.Sampling.TopP = 1.1 })
	decode(Malformed, "stop_token_ids", "65 stop", func(r *DecodeRequest) { r.Sampling.Stop = make([]uint32, MaxStopTokens+1) })
	decode(Malformed, "request_id", "missing", func(r *DecodeRequest) { r.RequestID = "" })

	assert.Zero(t, a.cache.Stats().Pages)
	all, _, _ := a.handles.counts()
	assert.Zero(t, all)

	p := a.mustPrefill(t, "acme", upTo(5))
	decode(Malformed, "model_id", `prefilled for another model: send its model_id, or prefill for "other"`, func(r *DecodeRequest) { r.Handle, r.Model = p.Handle, "other" })
}

func TestRolesRefuseTheOtherPhase(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "a", withRole("prefill")), newNode(t, "b", withRole("decode"))
	_, err := a.Decode(within(t, time.Minute), "acme", DecodeRequest{RequestID: "d", Handle: strings.Repeat("ab", 32), Model: "m"}, nil)
	kind, e := kindOf(t, err)
	assert.Equal(t, WrongRole, kind)
	assert.Contains(t, e.Message, "send decode to a node with the role decode or both")
	_, err = b.Prefill(within(t, time.Minute), "acme", prefillOf(upTo(3)))
	kind, _ = kindOf(t, err)
	assert.Equal(t, WrongRole, kind)
	assert.Zero(t, b.cache.Stats().Pages)
}

func TestWhoMayKeepHandles(t *testing.T) {
	t.Parallel()
	auto := map[string]string{roles.TagAuto: "1"}
	for _, c := range []struct {
		member mesh.Member
		want   bool
	}{
		{mesh.Member{Role: "prefill", Status: mesh.StatusAlive}, true},
		{mesh.Member{Role: "both", Status: mesh.StatusSuspect}, true},
		{mesh.Member{Status: mesh.StatusAlive}, true},
		{mesh.Member{Role: "decode", Status: mesh.StatusAlive}, false},
		{mesh.Member{Role: "decode", Status: mesh.StatusAlive, Tags: auto}, true}, // it may have prefilled before
		{mesh.Member{Role: "prefill", Status: mesh.StatusFailed, Tags: auto}, false},
	} {
		assert.Equal(t, c.want, mayPrefill(c.member), "%+v", c.member)
	}
}

func TestBatchesKeepAllOrNone(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a", func(_ *Config, c *cache.Config) { c.Budget = 4 << 20 })
	out, err := a.PrefillBatch(within(t, time.Minute), "acme", []PrefillRequest{prefillOf(upTo(5)), prefillOf(upTo(200))})
	require.NoError(t, err)
	assert.Len(t, out, 2)
	before := a.cache.Stats().Pins
	many := []PrefillRequest{prefillOf(upTo(5))} // which was there before and stays
	for i := range MaxBatch - 1 {
		tokens := upTo(128)
		tokens[0] = int64(i)
		many = append(many, prefillOf(tokens))
	}
	_, err = a.PrefillBatch(within(t, time.Minute), "acme", many)
	kind, _ := kindOf(t, err)
	assert.Equal(t, Busy, kind)
	assert.Equal(t, before, a.cache.Stats().Pins)
	all, _, _ := a.handles.counts()
	assert.Equal(t, 2, all)
}

func TestSilentPeersAreSaid(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "a"), newNode(t, "b")
	connect(a, b)
	b.fake.hang = true
	began := time.Now()
	_, err := b.Decode(within(t, time.Minute), "acme", DecodeRequest{RequestID: "d", Handle: strings.Repeat("ab", 32), Model: "m", Deadline: 200 * time.Millisecond}, nil)
	kind, e := kindOf(t, err)
	assert.Equal(t, NotFound, kind)
	assert.Contains(t, e.Message, "1 of 1 that may prefill did not answer")
	assert.Less(t, time.Since(began), 10*time.Second)
}

func TestSampling(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a")
	p := a.mustPrefill(t, "acme", upTo(50))
	run := func(how Sampling) Decoded {
		d, err := a.Decode(within(t, time.Minute), "acme", DecodeRequest{RequestID: "d", Handle: p.Handle, Model: "m", MaxTokens: 20, Sampling: how}, nil)
		require.NoError(t, err)
		return d
	}
	seed := func(n int64) *int64 { return &n }
	plain := run(Sampling{}).Tokens
	assert.Equal(t, greedy(t, upTo(50), 20), plain)
	hot := Sampling{Temperature: 1.5, Seed: seed(7)}
	first := run(hot).Tokens
	assert.Equal(t, first, run(hot).Tokens, "a seed repeats")
	assert.NotEqual(t, plain, run(hot).Tokens)
	assert.NotEqual(t, run(hot).Tokens, run(Sampling{Temperature: 1.5, Seed: seed(8)}).Tokens)
	assert.Equal(t, plain, run(Sampling{Temperature: 1.5, TopP: 1e-9, Seed: seed(7)}).Tokens, "only the most likely is kept")
	stopped := run(Sampling{Stop: []uint32{plain[3]}})
	at := 0
	for plain[at] != plain[3] {
		at++
	}
	assert.Equal(t, plain[:at], stopped.Tokens)
	assert.Equal(t, FinishStop, stopped.Reason)
	assert.True(t, stopped.Finished)
}

func TestTokensComeAsTheyAreMade(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a")
	p := a.mustPrefill(t, "acme", upTo(20))
	var got []uint32
	d, err := a.Decode(within(t, time.Minute), "acme", DecodeRequest{RequestID: "d", Handle: p.Handle, Model: "m", MaxTokens: 5}, func(token uint32) error {
		got = append(got, token)
		return nil
	})
	require.NoError(t, err)
	assert.Equal(t, d.Tokens, got)

	// A client that goes away ends it at once.
	n := 0
	_, err = a.Decode(within(t, time.Minute), "acme", DecodeRequest{RequestID: "d", Handle: p.Handle, Model: "m", MaxTokens: 10000}, func(uint32) error {
		if n++; n == 3 {
			return errors.New("broken pipe")
		}
		return nil
	})
	kind, _ := kindOf(t, err)
	assert.Equal(t, Gone, kind)
	assert.Equal(t, 3, n)
}

func TestDeadlinesAndCancellation(t *testing.T) {
	t.Parallel()
	a := newNode(t, "a")
	p := a.mustPrefill(t, "acme", upTo(20))
	long := DecodeRequest{RequestID: "d", Handle: p.Handle, Model: "m", MaxTokens: MaxOutputTokens, Deadline: 300 * time.Millisecond}
	d, err := a.Decode(within(t, time.Minute), "acme", long, nil)
	require.NoError(t, err)
	assert.False(t, d.Finished, "tokens that were made are answered")
	assert.Equal(t, FinishDeadline, d.Reason)
	assert.NotEmpty(t, d.Tokens)

	ctx, cancel := context.WithCancel(context.Background())
	long.Deadline = 0
	_, err = a.Decode(ctx, "acme", long, func(uint32) error { cancel(); return nil })
	kind, _ := kindOf(t, err)
	assert.Equal(t, Gone, kind)

	// A backend that is busy for ever.
	model, err := a.cfg.Backend.Model("m")
	require.NoError(t, err)
	release, err := model.Acquire(context.Background())
	require.NoError(t, err)
	r := prefillOf(upTo(40))
	r.Deadline = 50 * time.Millisecond
	_, err = a.Prefill(within(t, time.Minute), "acme", r)
	kind, _ = kindOf(t, err)
	assert.Equal(t, Late, kind)
	release()
	assert.Zero(t, a.cache.Stats().Pins)
	assert.Zero(t, len(a.decodes))
	assert.True(t, a.tokens.TryAcquire(sequenceTokens), "all room is given back")
	a.tokens.Release(sequenceTokens)
}

func TestBundles(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "a"), newNode(t, "b")
	connect(a, b)
	ctx := within(t, time.Minute)
	read := func(n *node, tenant, model, name string) string {
		t.Helper()
		got, err := n.GetBundle(ctx, tenant, model, name)
		if err != nil {
			kind, _ := kindOf(t, err)
			require.Equal(t, NotFound, kind)
			return ""
		}
		defer got.Close()
		assert.WithinDuration(t, time.Now().Add(BundleTTL), got.Expires, time.Minute)
		assert.Len(t, got.Hash, 64)
		return string(got.Bytes())
	}
	hash, err := a.PutBundle("acme", "m", "h:1", 5, strings.NewReader("bytes"))
	require.NoError(t, err)
	assert.Equal(t, "277089d91c0bdf4f2e6862ba7e4a07605119431f5d13f726dd352b06f1b206a9", hash)
	assert.Equal(t, "bytes", read(a, "acme", "m", "h:1"))
	assert.Empty(t, read(a, "other", "m", "h:1"))
	assert.Empty(t, read(a, "acme", "n", "h:1"))
	assert.Empty(t, read(a, "acme", "m", "h:2"))
	assert.Equal(t, "bytes", read(b, "acme", "m", "h:1"), "from a peer")
	size, stat, expires, err := b.StatBundle(ctx, "acme", "m", "h:1")
	require.NoError(t, err)
	assert.EqualValues(t, 5, size)
	assert.Equal(t, hash, stat)
	assert.True(t, expires.After(time.Now()))
	_, err = a.PutBundle("acme", "m", "h:1", 6, strings.NewReader("others"))
	require.NoError(t, err)
	assert.Equal(t, "others", read(a, "acme", "m", "h:1"))

	bad := func(kind Kind, model, name string, size int64, body string) {
		t.Helper()
		pages := a.cache.Stats().Pages
		_, err := a.PutBundle("acme", model, name, size, strings.NewReader(body))
		got, _ := kindOf(t, err)
		assert.Equal(t, kind, got, "%v", err)
		assert.Equal(t, pages, a.cache.Stats().Pages)
	}
	bad(Malformed, "m", "a/b", 1, "x")
	bad(Malformed, "", "a", 1, "x")
	bad(Malformed, "m", "a", 0, "")
	bad(Malformed, "m", "a", 5, "cut")
	bad(TooLarge, "m", "a", MaxBundle+1, "")
	bad(TooLarge, "m", "a", 64<<20, "") // more than half of this cache
	assert.True(t, a.uploads.TryAcquire(32<<20), "all room is given back")
	a.uploads.Release(32 << 20)
}
