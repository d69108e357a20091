package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"membrane/cache"
	"membrane/engines/llama"
	"membrane/kvwire"
	"membrane/sidecar/engineport"
)

func TestMain(m *testing.M) {
	// fasthttp keeps a clock for the life of the process, and its worker pool
	// notices its stop only after a sleep of ten seconds.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"))
}

// port is a real engine port over a real cache, which can be stopped and
// started again at the same path.
type port struct {
	t      *testing.T
	path   string
	cache  *cache.Cache
	server *engineport.Server
	set    *metrics.Set
	tcp    string
}

func newPort(t *testing.T) *port {
	t.Helper()
	p := &port{t: t, path: filepath.Join(t.TempDir(), "e", "engine.sock")}
	p.start()
	t.Cleanup(p.stop)
	return p
}

func (p *port) start() {
	p.t.Helper()
	var err error
	p.cache, err = cache.New(cache.Config{Budget: 64 << 20})
	require.NoError(p.t, err)
	p.set = metrics.NewSet()
	p.server, err = engineport.New(engineport.Config{
		Node: "n", Server: "test", Cache: p.cache, PageTokens: 64, InboxBytes: 8 << 20, Metrics: p.set, Log: zerolog.Nop(),
	})
	require.NoError(p.t, err)
	unix, err := engineport.ListenSocket(p.path)
	require.NoError(p.t, err)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(p.t, err)
	p.tcp = tcp.Addr().String()
	require.NoError(p.t, p.server.ServeSocket(unix))
	require.NoError(p.t, p.server.ServeTCP(tcp))
}

func (p *port) stop() {
	if p.server == nil {
		return
	}
	require.NoError(p.t, p.server.Close())
	require.NoError(p.t, p.cache.Close())
	p.server = nil
}

func newEngine(t *testing.T, sidecar string, change func(*Config)) *Engine {
	t.Helper()
	model, err := llama.Generate("test", llama.WithLayers(2), llama.WithHidden(64))
	require.NoError(t, err)
	cfg := Config{Model: model, Name: "e", Sidecar: sidecar, Log: zerolog.Nop()}
	if change != nil {
		change(&cfg)
	}
	e, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(e.Close)
	return e
}

func attached(t *testing.T, e *Engine, want bool) {
	t.Helper()
	require.Eventually(t, func() bool { return e.Attached() == want }, 5*time.Second, 5*time.Millisecond)
}

func prompt(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i*37+i*i) % 5000
	}
	return tokens
}

func completeOK(t *testing.T, e *Engine, req Request) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	res, err := e.Complete(ctx, req, nil)
	require.NoError(t, err)
	require.Len(t, res.Tokens, req.MaxTokens)
	return res
}

func TestReusesItsOwnPagesAndAnswersTheSame(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"shared memory":           nil,
		"verified on release":     func(c *Config) { c.Verify = true },
		"two blocks in a page":    func(c *Config) { c.BlockTokens = 32 },
		"one slot in the inbox":   func(c *Config) { c.InboxSlots = 1 },
		"a block of two pages":    func(c *Config) { c.BlockTokens = 128 },
		"localhost moves to shm":  func(c *Config) { c.Sidecar = "tcp" },
		"no sidecar is ever here": func(c *Config) { c.Sidecar = "" },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPort(t)
			e := newEngine(t, p.path, func(c *Config) {
				if change != nil {
					change(c)
				}
				if c.Sidecar == "tcp" {
					c.Sidecar = p.tcp
				}
			})
			alone := newEngine(t, "", nil)
			req := Request{Tokens: prompt(200), MaxTokens: 60}
			want := completeOK(t, alone, req)
			if e.session == nil {
				assert.Equal(t, kvwire.ReasonUnreachable, want.Reason)
				return
			}
			attached(t, e, true)
			page := max(64, e.cfg.BlockTokens)
			cold := completeOK(t, e, req)
			assert.Zero(t, cold.Reused)
			assert.Equal(t, kvwire.ReasonAbsent, cold.Reason)
			assert.Equal(t, 259/page, cold.Stored, "all full pages, those of generated tokens too")
			warm := completeOK(t, e, req)
			assert.Equal(t, 200/page*page, warm.Reused)
			assert.Equal(t, kvwire.ReasonNone, warm.Reason)
			assert.Equal(t, want.Tokens, cold.Tokens)
			assert.Equal(t, want.Tokens, warm.Tokens)
			longer := completeOK(t, e, Request{Tokens: append(prompt(200), want.Tokens[:59]...), MaxTokens: 4})
			assert.Equal(t, 259/page*page, longer.Reused, "generated tokens are reused as well")
		})
	}
}

func TestInlinePagesAreTheSame(t *testing.T) {
	p := newPort(t)
	want := completeOK(t, newEngine(t, "", nil), Request{Tokens: prompt(200), MaxTokens: 8})
	e := newEngine(t, p.tcp, nil)
	e.session.Close()
	reg := Registration(e.cfg.Model, "inline", 64, 0)
	reg.Inline = true
	e.session = NewSession(p.tcp, reg, kvwire.ClientOptions{Inline: true}, zerolog.Nop())
	attached(t, e, true)
	cold := completeOK(t, e, Request{Tokens: prompt(200), MaxTokens: 8})
	assert.Equal(t, 3, cold.Stored)
	warm := completeOK(t, e, Request{Tokens: prompt(200), MaxTokens: 8})
	assert.Equal(t, 192, warm.Reused)
	assert.Equal(t, want.Tokens, warm.Tokens)
}

func TestWholePromptHeldStillComputesTheLastToken(t *testing.T) {
	p := newPort(t)
	e := newEngine(t, p.path, nil)
	attached(t, e, true)
	req := Request{Tokens: prompt(128), MaxTokens: 4}
	cold := completeOK(t, e, req)
	warm := completeOK(t, e, req)
	assert.Equal(t, 127, warm.Reused)
	assert.Equal(t, cold.Tokens, warm.Tokens)
}

func TestSaltKeepsPagesApart(t *testing.T) {
	p := newPort(t)
	e := newEngine(t, p.path, nil)
	attached(t, e, true)
	salt := "alice"
	completeOK(t, e, Request{Tokens: prompt(128), MaxTokens: 1, CacheSalt: &salt})
	assert.Zero(t, completeOK(t, e, Request{Tokens: prompt(128), MaxTokens: 1}).Reused)
	assert.NotZero(t, completeOK(t, e, Request{Tokens: prompt(128), MaxTokens: 1, CacheSalt: &salt}).Reused)
}

func TestAnotherModelIsAMiss(t *testing.T) {
	p := newPort(t)
	e := newEngine(t, p.path, nil)
	attached(t, e, true)
	completeOK(t, e, Request{Tokens: prompt(128), MaxTokens: 1})
	twin, err := llama.Generate("twin", llama.WithLayers(2), llama.WithHidden(64))
	require.NoError(t, err)
	other := newEngine(t, p.path, func(c *Config) { c.Model, c.Name = twin, "other" })
	attached(t, other, true)
	res := completeOK(t, other, Request{Tokens: prompt(128), MaxTokens: 4})
	assert.Zero(t, res.Reused, "weights of equal shape must not share")
	want := completeOK(t, newEngine(t, "", func(c *Config) { c.Model = twin }), Request{Tokens: prompt(128), MaxTokens: 4})
	assert.Equal(t, want.Tokens, res.Tokens)
}

func TestSidecarMayComeAndGo(t *testing.T) {
	p := newPort(t)
	p.stop()
	e := newEngine(t, p.path, nil)
	req := Request{Tokens: prompt(128), MaxTokens: 4}
	want := completeOK(t, e, req)
	assert.Equal(t, kvwire.ReasonUnreachable, want.Reason)
	for range 2 {
		p.start()
		attached(t, e, true)
		assert.Equal(t, 2, completeOK(t, e, req).Stored)
		assert.Equal(t, want.Tokens, completeOK(t, e, req).Tokens)
		p.stop()
		res := completeOK(t, e, req)
		assert.Equal(t, want.Tokens, res.Tokens)
		assert.Zero(t, res.Reused)
		attached(t, e, false)
	}
}

func TestNothingIsLeftAtTheSidecar(t *testing.T) {
	p := newPort(t)
	e := newEngine(t, p.path, nil)
	attached(t, e, true)
	for range 3 {
		completeOK(t, e, Request{Tokens: prompt(128), MaxTokens: 1})
	}
	ctx, cancel := context.WithCancel(context.Background())
	_, err := e.Complete(ctx, Request{Tokens: prompt(4000), MaxTokens: 100}, func(uint32) bool { cancel(); return true })
	assert.ErrorIs(t, err, context.Canceled)
	st := p.server.Status()
	require.Len(t, st.Engines, 1)
	assert.Zero(t, st.Engines[0].Handles)
	assert.Zero(t, st.Engines[0].Leases)
	assert.Zero(t, p.cache.Stats().PinnedBytes)
}

func TestNewRefusesWhatIsMissing(t *testing.T) {
	_, err := New(Config{})
	assert.ErrorContains(t, err, "model and name")
	model, err := llama.Generate("m", llama.WithLayers(1), llama.WithHidden(64))
	require.NoError(t, err)
	_, err = New(Config{Model: model, Name: "e", BlockTokens: -1})
	assert.ErrorContains(t, err, "block_tokens")
	e := newEngine(t, "", nil)
	_, err = e.Complete(context.Background(), Request{}, nil)
	assert.ErrorContains(t, err, "no tokens")
}

// The vectors are those of test_rope_signature in engines/python.
func TestRopeSignature(t *testing.T) {
	t.Parallel()
	for theta, want := range map[float64]string{
		10000: "base=10000", 500000: "base=500000", 1e6: "base=1000000", 1e7: "base=10000000", 10000.5: "base=10000.5",
	} {
		assert.Equal(t, want, ropeSignature(theta))
	}
}

// serve starts an HTTP server for an engine without a sidecar.
func serve(t *testing.T) string {
	t.Helper()
	s := NewServer(newEngine(t, "", nil))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		assert.NoError(t, <-done)
		http.DefaultClient.CloseIdleConnections()
	})
	return "http://" + l.Addr().String()
}

func post(t *testing.T, url, body string) (int, []byte) {
	t.Helper()
	resp, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	var out strings.Builder
	_, err = bufio.NewReader(resp.Body).WriteTo(&out)
	require.NoError(t, err)
	return resp.StatusCode, []byte(out.String())
}

func TestCompletionsOverHTTP(t *testing.T) {
	url := serve(t)
	status, body := post(t, url, `{"prompt": [1,2,3,4000000000], "max_tokens": 5}`)
	require.Equal(t, http.StatusOK, status, string(body))
	var whole completion
	require.NoError(t, json.Unmarshal(body, &whole))
	require.Len(t, whole.Choices[0].TokenIDs, 5)
	assert.Equal(t, 4, whole.Usage.PromptTokens)
	assert.Equal(t, "unreachable", whole.Membrane.MissReason)

	assert.Nil(t, whole.Choices[0].Logprobs)

	status, body = post(t, url, `{"prompt": [1,2,3,4000000000], "max_tokens": 5, "logprobs": 0}`)
	require.Equal(t, http.StatusOK, status, string(body))
	var logged completion
	require.NoError(t, json.Unmarshal(body, &logged))
	assert.Equal(t, whole.Choices[0].TokenIDs, logged.Choices[0].TokenIDs)
	require.Len(t, logged.Choices[0].Logprobs.TokenLogprobs, 5)
	for _, p := range logged.Choices[0].Logprobs.TokenLogprobs {
		assert.True(t, p < 0 && p > -math.Log(float64(1024)), "%g is that of the likeliest of 1024 tokens", p)
	}

	status, body = post(t, url, `{"prompt": [1,2,3,4000000000], "max_tokens": 5, "stream": true}`)
	require.Equal(t, http.StatusOK, status)
	var streamed []uint32
	events := strings.Split(strings.TrimSpace(string(body)), "\n\n")
	require.Equal(t, "data: [DONE]", events[len(events)-1])
	for _, e := range events[:len(events)-1] {
		var c completion
		require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(e, "data: ")), &c))
		streamed = append(streamed, c.Choices[0].TokenIDs...)
	}
	assert.Equal(t, whole.Choices[0].TokenIDs, streamed)

	for _, path := range []string{"/v1/models", "/health"} {
		resp, err := http.Get(url + path)
		require.NoError(t, err)
		assert.Equal(t, http.StatusOK, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
	}
}

func TestCompletionsRefuseBadInputByField(t *testing.T) {
	url := serve(t)
	limit := newEngine(t, "", nil).Model().Config().MaxPositions
	for body, want := range map[string]string{
		`{`:                                 "not a completion request",
		`{"prompt": {}}`:                    "prompt: neither",
		`{"prompt": []}`:                    "prompt: has no tokens",
		`{"prompt": [1,-5]}`:                "prompt[1]: -5",
		`{"prompt": [4294967296]}`:          "prompt[0]: 4294967296",
		`{"prompt": [1], "max_tokens": 0}`:  "max_tokens: 0",
		`{"prompt": [1], "max_tokens": -1}`: "max_tokens: -1",
		fmt.Sprintf(`{"prompt": [1], "max_tokens": %d}`, limit):                                 "positions",
		fmt.Sprintf(`{"prompt": [1], "cache_salt": %q}`, strings.Repeat("s", kvwire.MaxSalt+1)): "cache_salt",
	} {
		status, got := post(t, url, body)
		assert.Equal(t, http.StatusBadRequest, status, body)
		assert.Contains(t, string(got), want, body)
	}
}

func TestTooManyWaitingIsBusy(t *testing.T) {
	e := newEngine(t, "", nil)
	<-e.turn // somebody computes
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, maxQueue)
	for range maxQueue {
		go func() { _, err := e.Complete(ctx, Request{Tokens: []uint32{1}, MaxTokens: 1}, nil); done <- err }()
	}
	require.Eventually(t, func() bool { return len(e.queue) == maxQueue }, 5*time.Second, time.Millisecond)
	_, err := e.Complete(ctx, Request{Tokens: []uint32{1}, MaxTokens: 1}, nil)
	assert.ErrorIs(t, err, ErrBusy)
	cancel()
	for range maxQueue {
		assert.ErrorIs(t, <-done, context.Canceled)
	}
	e.turn <- struct{}{}
}
