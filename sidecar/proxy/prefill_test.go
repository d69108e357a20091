package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/sidecar/roles"
)

func TestLongPromptIsPrefilledElsewhere(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{false, true} {
		r := newRig(t)
		pod := r.pod("p")
		body := long(fmt.Sprintf(`,"stream":%v,"stream_options":null,"cache_salt":"mine"`, stream))
		got := r.do("POST", completionsPath, body, "X-Request-Id", "req-1", "Authorization", "Bearer k", "Accept-Encoding", "gzip")
		require.Equal(t, 200, got.status)
		if stream {
			assert.Equal(t, 3, strings.Count(got.body, `"text"`))
			assert.True(t, strings.HasSuffix(got.body, "data: [DONE]\n\n"))
		}
		assert.Equal(t, "1", r.decided(disaggregated))
		assert.Equal(t, "1", r.prefills(prefillOK))
		require.Len(t, pod.got(), 1)
		leg := pod.got()[0]
		assert.Equal(t, completionsPath, leg.uri)
		assert.EqualValues(t, 1, leg.field(t, "max_tokens"))
		assert.Equal(t, false, leg.field(t, "stream"))
		assert.Equal(t, "mine", leg.field(t, "cache_salt"), "the pod's own proxy makes the salt")
		assert.Equal(t, "req-1", leg.header.Get("X-Request-Id"))
		assert.Equal(t, "Bearer k", leg.header.Get("Authorization"))
		params, ok := leg.field(t, "kv_transfer_params").(map[string]any)
		require.True(t, ok)
		assert.Equal(t, true, params["do_remote_decode"])
		assert.NotEmpty(t, params["transfer_id"])

		require.Len(t, r.engine.got(), 1)
		own := r.engine.got()[0]
		assert.EqualValues(t, 5, own.field(t, "max_tokens"))
		assert.Equal(t, stream, own.field(t, "stream"))
		assert.Equal(t, map[string]any{"remote_engine_id": "e", "remote_block_ids": []any{1.0, 2.0}}, own.field(t, "kv_transfer_params"), "the prefill's answer goes to the decode")
		assert.Equal(t, "req-1", own.header.Get("X-Request-Id"))
		assert.Equal(t, []string{"p"}, r.cache.fetched, "pages are here before the engine asks")
		assert.Equal(t, []string{"p"}, r.cache.followed, "and were taken while the pod prefilled")
		assert.Equal(t, own.field(t, "cache_salt"), r.cache.salts[0])
		r.idle()
	}
}

func TestChatIsPrefilledElsewhere(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pod := r.pod("p")
	body := `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 200) + `"}],"max_completion_tokens":7,"tools":[]}`
	require.Equal(t, 200, r.do("POST", chatPath, body).status)
	require.Len(t, pod.got(), 1)
	assert.Equal(t, chatPath, pod.got()[0].uri)
	assert.EqualValues(t, 1, pod.got()[0].field(t, "max_completion_tokens"))
	assert.Nil(t, pod.got()[0].field(t, "max_tokens"))
	assert.EqualValues(t, 7, r.engine.got()[0].field(t, "max_completion_tokens"))
	assert.NotEmpty(t, pod.got()[0].header.Get("X-Request-Id"))
	assert.Equal(t, pod.got()[0].header.Get("X-Request-Id"), r.engine.got()[0].header.Get("X-Request-Id"), "both engines' logs have one id")
	r.idle()
}

func TestEveryReasonNotToPrefillElsewhere(t *testing.T) {
	t.Parallel()
	f := func(why reason, path, body string, change func(*rig), headers ...string) {
		t.Helper()
		r := newRig(t, func(c *Config) {
			if why == reasonOff {
				c.Threshold = 0
			}
		})
		var pod *fakeEngine
		if why != reasonNobody {
			pod = r.pod("p")
		}
		if change != nil {
			change(r)
		}
		require.Equal(t, 200, r.do("POST", path, body, headers...).status)
		assert.Equal(t, "1", r.decided(why), why.String())
		if pod != nil {
			assert.Empty(t, pod.got(), why.String())
		}
		require.Len(t, r.engine.got(), 1)
		r.idle()
	}
	f(reasonOff, completionsPath, long(""), nil)
	f(reasonLeg, completionsPath, long(`,"kv_transfer_params":{"do_remote_decode":true}`), nil)
	f(reasonLeg, completionsPath, long(`,"kv_transfer_params":{"do_remote_prefill":true}`), nil)
	f(reasonPrefills, completionsPath, long(""), func(r *rig) { r.setRole(roles.RolePrefill) })
	f(reasonUnfit, completionsPath, long(`,"echo":true`), nil)
	f(reasonShort, completionsPath, `{"prompt":"short"}`, nil)
	f(reasonCached, completionsPath, long(""), func(r *rig) { r.cache.here = 201 })
	f(reasonCached, completionsPath, long(""), func(r *rig) { r.cache.at["p"] = 201 })
	f(reasonNobody, completionsPath, long(""), nil)
	f(reasonNobody, completionsPath, long(""), func(r *rig) { r.pod("d"); r.pods[0].Role = roles.RoleDecode })
	f(reasonBroken, completionsPath, long(""), func(r *rig) { r.pods[0].Suspect = true })
	// A node that does both leaves others that do both alone.
	r := newRig(t)
	r.setRole(roles.RoleBoth)
	r.pod("b")
	r.pods[0].Role = roles.RoleBoth
	r.do("POST", completionsPath, long(""))
	assert.Equal(t, "1", r.decided(reasonNobody))
	r.setRole(roles.RoleDecode) // one that only decodes does not
	r.do("POST", completionsPath, long(""))
	assert.Equal(t, "1", r.decided(disaggregated))
	// What a router has prepared passes as it is.
	r.do("POST", completionsPath, `{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"h"}}`)
	got := r.engine.got()
	assert.Equal(t, map[string]any{"do_remote_prefill": true, "remote_host": "h"}, got[len(got)-1].field(t, "kv_transfer_params"))
	r.idle()
	seen := map[string]bool{}
	for r := range reasons {
		seen[r.String()] = true
	}
	assert.Len(t, seen, int(reasons))
	assert.Equal(t, "unknown", reasons.String())
	assert.Equal(t, "unknown", outcomes.String())
}

func TestThresholdIsExact(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pod := r.pod("p")
	ids := func(n int) string { return `{"prompt":[` + strings.TrimSuffix(strings.Repeat("7,", n), ",") + `]}` }
	r.do("POST", completionsPath, ids(99))
	assert.Empty(t, pod.got())
	r.do("POST", completionsPath, ids(100))
	assert.Len(t, pod.got(), 1)
	r.cache.here = 100
	r.do("POST", completionsPath, ids(199))
	assert.Len(t, pod.got(), 1)
	r.do("POST", completionsPath, ids(200))
	assert.Len(t, pod.got(), 2)
	r.idle()
}

// The failures of a prefill pod: the client has one answer and no error.
func TestPrefillPodsFail(t *testing.T) {
	t.Parallel()
	die := func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		_, _ = io.WriteString(w, `{"choices":[`)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	text := func(s string) func(http.ResponseWriter, *http.Request, []byte) {
		return func(w http.ResponseWriter, _ *http.Request, _ []byte) { _, _ = io.WriteString(w, s) }
	}
	f := func(how outcome, answer func(http.ResponseWriter, *http.Request, []byte)) {
		t.Helper()
		for _, second := range []bool{true, false} {
			r := newRig(t, func(c *Config) {
				if how == prefillTimeout {
					c.PrefillTimeout = 400 * time.Millisecond
				}
			})
			bad, good := r.pod("bad"), (*fakeEngine)(nil)
			if answer == nil {
				bad.Close()
			} else {
				bad.answers(answer)
			}
			if second {
				good = r.pod("good")
				r.cache.at["bad"] = 50 // so that it is chosen first
			}
			if how == prefillLost {
				bad.answers(func(w http.ResponseWriter, q *http.Request, body []byte) {
					r.mu.Lock()
					r.pods = append([]Pod(nil), r.pods[1:]...)
					r.mu.Unlock()
					answer(w, q, body)
				})
			}
			got := r.do("POST", completionsPath, long(`,"stream":true`))
			assert.Equal(t, 200, got.status, how.String())
			assert.Equal(t, 1, strings.Count(got.body, "[DONE]"), "one answer")
			assert.Equal(t, "1", r.prefills(how), how.String())
			require.Len(t, r.engine.got(), 1, "one decode")
			again := second && how.again()
			if again {
				assert.Len(t, good.got(), 1, how.String())
				assert.Equal(t, "1", r.decided(disaggregated))
				assert.Equal(t, "1", r.metric("membrane_proxy_prefill_retries_total"))
			} else {
				assert.Equal(t, "1", r.decided(reasonFailed))
				assert.Nil(t, r.engine.got()[0].field(t, "kv_transfer_params"))
			}
			if how == prefillTimeout || how == prefillLost {
				require.Eventually(t, func() bool { return bad.aborted.Load() == 1 }, patience, tick, "its work is ended")
			}
			r.idle()
		}
	}
	f(prefillUnreachable, nil)
	f(prefillUnreachable, die)
	f(prefillError, status(500))
	f(prefillError, status(302))
	f(prefillError, text("not JSON"))
	f(prefillError, text(`{"choices":[]}`+strings.Repeat(" ", MaxPrefillAnswer)))
	f(prefillBusy, status(503))
	f(prefillBusy, status(429))
	f(prefillRefused, status(400))
	f(prefillRefused, status(401))
	f(prefillTimeout, hang)
	f(prefillLost, hang)
}

func TestOnlyTwoPodsAreAsked(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var asked atomic.Int64
	for i := range 4 {
		r.pod(fmt.Sprint(i)).answers(func(w http.ResponseWriter, req *http.Request, b []byte) {
			asked.Add(1)
			status(500)(w, req, b)
		})
	}
	require.Equal(t, 200, r.do("POST", completionsPath, long("")).status)
	assert.EqualValues(t, 2, asked.Load())
	r.idle()
}

func TestBreakerAndRetryBudget(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	bad := r.pod("bad")
	bad.answers(status(500))
	for range breakAfter + 2 {
		require.Equal(t, 200, r.do("POST", completionsPath, long("")).status)
	}
	assert.Len(t, bad.got(), breakAfter)
	assert.Equal(t, "2", r.decided(reasonBroken))
	assert.Equal(t, "1", r.metric("membrane_proxy_breakers_open"))
	r.idle()

	b := newBudget()
	for range maxBudget {
		assert.True(t, b.second())
	}
	assert.False(t, b.second())
	for range 9 {
		b.first()
	}
	assert.False(t, b.second())
	b.first()
	b.first() // the tenths do not add up to a whole in binary
	assert.True(t, b.second())
	assert.False(t, b.second())
}

// A pod that says when to come again is left alone until then.
func TestRetryAfterIsHeeded(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pod := r.pod("p")
	pod.answers(func(w http.ResponseWriter, req *http.Request, b []byte) {
		w.Header().Set("Retry-After", "9")
		status(503)(w, req, b)
	})
	r.do("POST", completionsPath, long(""))
	r.do("POST", completionsPath, long(""))
	assert.Len(t, pod.got(), 1)
	assert.Equal(t, "1", r.decided(reasonBroken))
	r.idle()
}

func TestPodIsChosenByPrefixAndLoad(t *testing.T) {
	t.Parallel()
	pods := make([]*pod, 3)
	for i := range pods {
		pods[i] = newPod(Pod{Name: fmt.Sprint(i), Addr: fmt.Sprint(i)})
	}
	cache := &fakeCache{at: map[string]int{"1": 60, "2": 30}}
	prefix := &fakePrefix{cache, 100}
	assert.Same(t, pods[1], choose(pods, nil, prefix, 100))
	assert.Same(t, pods[2], choose(pods, map[*pod]bool{pods[1]: true}, prefix, 100))
	pods[1].reported.Store(1) // 40 + 100 against 70
	assert.Same(t, pods[2], choose(pods, nil, prefix, 100))
	pods[2].mine.Store(1) // and 100
	assert.Same(t, pods[0], choose(pods, nil, prefix, 100))
	assert.Same(t, pods[0], choose(pods, nil, nil, 100), "without tokens by load alone")
	pods[0].suspect.Store(true)
	assert.Same(t, pods[1], choose(pods, nil, prefix, 100))
	assert.Nil(t, choose(nil, nil, prefix, 100))

	h := http.Header{}
	h.Set(loadHeader, "99999999999")
	pods[0].learn(h)
	h.Set(loadHeader, "4294967295")
	pods[0].learn(h)
	assert.EqualValues(t, maxLoad, pods[0].reported.Load())
}

func TestRoutersNameThePod(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	one, two := r.pod("1"), r.pod("2")
	r.cache.at["1"] = 50
	r.do("POST", completionsPath, long(""), "x-prefiller-host-port", two.addr())
	assert.Empty(t, one.got())
	require.Len(t, two.got(), 1)
	assert.Empty(t, two.got()[0].header.Get(prefillerHeader))
	assert.Empty(t, r.engine.got()[0].header.Get(prefillerHeader))
	r.do("POST", completionsPath, `{"prompt":"short"}`, "X-Prefiller-Host-Port", two.addr())
	assert.Len(t, two.got(), 2, "the router has decided, whatever the length")
	// A pod that the mesh does not know is not called.
	stranger := newEngine(t)
	r.do("POST", completionsPath, long(""), prefillerHeader, stranger.addr())
	assert.Empty(t, stranger.got())
	assert.Len(t, one.got(), 1)
	r.do("POST", completionsPath, `{"prompt":"x"}`, prefillerHeader, "nonsense")
	assert.Len(t, r.engine.got(), 4)
	r.idle()
}

func TestPrefillLegsTellTheLoad(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	got := r.do("POST", completionsPath, `{"prompt":"x","kv_transfer_params":{"do_remote_decode":true}}`)
	assert.Equal(t, "1", got.header.Get(loadHeader))
	assert.Empty(t, r.do("POST", completionsPath, `{"prompt":"x"}`).header.Get(loadHeader))
	r.idle()
}

func TestTokenizing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pod := r.pod("p")
	var asked atomic.Int64
	tokens := 99
	r.engine.tokenize = func(w http.ResponseWriter, body []byte) {
		asked.Add(1)
		assert.JSONEq(t, `{"model":"m","prompt":"`+strings.Repeat("a", 300)+`"}`, string(body))
		writeTokens(w, tokens)
	}
	r.do("POST", completionsPath, long(""))
	assert.Equal(t, "1", r.decided(reasonCached), "300 bytes are 99 tokens")
	r.do("POST", completionsPath, long(`,"temperature":0`))
	assert.EqualValues(t, 1, asked.Load(), "the second is remembered")
	assert.Equal(t, "1", r.metric(`membrane_proxy_tokenize_total{how="remembered"}`))
	assert.Empty(t, pod.got())
	r.idle()
}

func TestWithoutTokenizerBytesCount(t *testing.T) {
	t.Parallel()
	f := func(how string, tokenize func(http.ResponseWriter, []byte), timeout time.Duration) {
		t.Helper()
		r := newRig(t, func(c *Config) { c.tokenizeTimeout = timeout })
		pod := r.pod("p")
		r.engine.tokenize = tokenize
		r.do("POST", completionsPath, `{"prompt":"`+strings.Repeat("a", 390)+`"}`)
		assert.Empty(t, pod.got(), "about 98 tokens")
		r.do("POST", completionsPath, `{"prompt":"`+strings.Repeat("a", 400)+`"}`)
		assert.Len(t, pod.got(), 1, "about 100")
		want := "3"        // the last one when the other pod has prefilled
		if how == "none" { // an engine without the route is not asked again
			want = "1"
		}
		assert.Equal(t, want, r.metric(fmt.Sprintf("membrane_proxy_tokenize_total{how=%q}", how)))
		r.idle()
	}
	f("none", func(w http.ResponseWriter, _ []byte) { w.WriteHeader(404) }, patience)
	f("error", func(w http.ResponseWriter, _ []byte) { w.WriteHeader(500) }, patience)
	f("error", func(w http.ResponseWriter, _ []byte) { _, _ = io.WriteString(w, `{"tokens":"x"}`) }, patience)
	end := make(chan struct{})
	defer close(end)
	f("timeout", func(http.ResponseWriter, []byte) { <-end }, tokenizeTimeout)
}

// Tokens that come too late for the decision are in time to fetch the pages.
func TestLateTokensNameThePages(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *Config) { c.tokenizeTimeout = tokenizeTimeout })
	pod := r.pod("p")
	prefilled := make(chan struct{})
	r.engine.tokenize = func(w http.ResponseWriter, _ []byte) { <-prefilled; writeTokens(w, 400) }
	pod.answers(func(w http.ResponseWriter, req *http.Request, b []byte) { close(prefilled); plainAnswer(w, req, b) })
	r.do("POST", completionsPath, `{"prompt":"`+strings.Repeat("a", 400)+`"}`)
	assert.Equal(t, []string{"p"}, r.cache.fetched)
	assert.Equal(t, "1", r.metric(`membrane_proxy_tokenize_total{how="timeout"}`))
	r.idle()
}

func TestRecallForgetsTheOldest(t *testing.T) {
	t.Parallel()
	r := newRecall(10)
	key := func(i int) (k [32]byte) { k[0], k[1] = byte(i), byte(i>>8); return k }
	r.put(key(1), make([]uint32, 5))
	r.put(key(2), make([]uint32, 5))
	_, ok := r.get(key(1))
	assert.True(t, ok)
	r.put(key(3), make([]uint32, 1))
	_, ok = r.get(key(2))
	assert.False(t, ok)
	_, ok = r.get(key(1))
	assert.True(t, ok)
	r.put(key(4), make([]uint32, 11))
	_, ok = r.get(key(4))
	assert.False(t, ok, "more than all may have")
	for i := range 2 * recallEntries {
		r.put(key(100+i), nil)
	}
	assert.Len(t, r.by, recallEntries)
	assert.Equal(t, recallEntries, r.order.Len())
}

// After many requests that were given up, nothing is left of them.
func TestAbortedRequestsLeaveNothing(t *testing.T) {
	t.Parallel()
	const n, at = 300, 20
	r := newRig(t)
	pod := r.pod("p")
	r.engine.answers(func(w http.ResponseWriter, req *http.Request, _ []byte) {
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	})
	done := make(chan error, at)
	for w := range at {
		go func() {
			for i := range n / at {
				body := long(`,"stream":true`)
				if (i+w)%2 == 0 {
					body = `{"prompt":"x","stream":true}`
				}
				res, err := http.Post(r.url+completionsPath, "application/json", strings.NewReader(body))
				if err != nil {
					done <- err
					return
				}
				_, _ = res.Body.Read(make([]byte, 4))
				_ = res.Body.Close() // before its end: the connection goes
			}
			done <- nil
		}()
	}
	for range at {
		require.NoError(t, <-done)
	}
	r.idle()
	require.Eventually(t, func() bool { return r.engine.aborted.Load() == n }, patience, tick)
	assert.Len(t, pod.got(), n/2)
	assert.True(t, r.server.bodies.TryAcquire(maxBodies))
	for _, p := range r.server.pods.by {
		assert.Zero(t, p.mine.Load())
	}
}
