package proxy

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"membrane/sidecar/roles"
)

const (
	patience = 10 * time.Second
	tick     = 5 * time.Millisecond
)

func TestMain(m *testing.M) {
	// fasthttp keeps a clock for the life of the process, and its worker pool
	// notices its stop only after a sleep of ten seconds.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"), // of the benchmark's clients
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*Client).mCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*TCPDialer).tcpAddrsClean"))
}

// seen is a request as an engine got it.
type seen struct {
	method, uri string
	header      http.Header
	body        []byte
}

func (s seen) field(t testing.TB, name string) any {
	t.Helper()
	var fields map[string]any
	require.NoError(t, json.Unmarshal(s.body, &fields), "%s", s.body)
	return fields[name]
}

// fakeEngine is an OpenAI-compatible server that does as it is told.
type fakeEngine struct {
	*httptest.Server
	mu       sync.Mutex
	requests []seen
	answer   func(w http.ResponseWriter, r *http.Request, body []byte) // nil: plainAnswer
	aborted  atomic.Int64                                              // requests whose client went away
	tokenize func(w http.ResponseWriter, body []byte)                  // nil: bytes of the prompt
}

func newEngine(t testing.TB) *fakeEngine {
	t.Helper()
	e := &fakeEngine{}
	e.Server = httptest.NewServer(http.HandlerFunc(e.serve))
	t.Cleanup(func() { e.CloseClientConnections(); e.Close() })
	return e
}

func (e *fakeEngine) addr() string { return strings.TrimPrefix(e.URL, "http://") }

func (e *fakeEngine) serve(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if r.URL.Path == "/tokenize" {
		e.mu.Lock()
		f := e.tokenize
		e.mu.Unlock()
		if f != nil {
			f(w, body)
			return
		}
		var req struct {
			Prompt   string          `json:"prompt"`
			Messages json.RawMessage `json:"messages"`
		}
		_ = json.Unmarshal(body, &req)
		writeTokens(w, len(req.Prompt)+len(req.Messages))
		return
	}
	e.mu.Lock()
	e.requests = append(e.requests, seen{r.Method, r.RequestURI, r.Header.Clone(), body})
	f := e.answer
	e.mu.Unlock()
	if f == nil {
		f = plainAnswer
	}
	f(w, r, body)
	if r.Context().Err() != nil {
		e.aborted.Add(1)
	}
}

func writeTokens(w io.Writer, n int) {
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"count":%d,"max_model_len":100000,"tokens":[`, n)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprint(&b, i%500)
	}
	b.WriteString("]}")
	_, _ = w.Write(b.Bytes())
}

func (e *fakeEngine) answers(f func(w http.ResponseWriter, r *http.Request, body []byte)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answer = f
}

func (e *fakeEngine) got() []seen {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]seen(nil), e.requests...)
}

// plainAnswer streams where it is asked to.
func plainAnswer(w http.ResponseWriter, _ *http.Request, body []byte) {
	var req struct {
		Stream bool `json:"stream"`
	}
	_ = json.Unmarshal(body, &req)
	if !req.Stream {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"text":"ok"}],"kv_transfer_params":{"remote_engine_id":"e","remote_block_ids":[1,2]}}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range 3 {
		fmt.Fprintf(w, "data: {\"choices\":[{\"text\":\"%d\"}]}\n\n", i)
		w.(http.Flusher).Flush()
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

// status answers with a status and an error.
func status(code int) func(http.ResponseWriter, *http.Request, []byte) {
	return func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, `{"error":{"message":"no"}}`)
	}
}

// hang answers when the client has gone.
func hang(_ http.ResponseWriter, r *http.Request, _ []byte) { <-r.Context().Done() }

// fakeCache holds what it is told.
type fakeCache struct {
	mu      sync.Mutex
	here    int
	at      map[string]int
	none    bool // no engine has registered
	full    bool
	fetched []string
	salts   []string
}

func (c *fakeCache) Prefix(salt string, tokens []uint32) Prefix {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.salts = append(c.salts, salt)
	if c.none {
		return nil
	}
	return &fakePrefix{c, len(tokens)}
}

func (c *fakeCache) PinsFull() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.full
}

type fakePrefix struct {
	c      *fakeCache
	tokens int
}

func (p *fakePrefix) Here() int {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	return p.c.here
}

func (p *fakePrefix) At(pod string) int {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	return p.c.at[pod]
}

func (p *fakePrefix) Fetch(_ context.Context, pod string) int {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	p.c.fetched = append(p.c.fetched, pod)
	return p.tokens
}

// rig is a proxy in front of an engine, and other pods.
type rig struct {
	t      testing.TB
	engine *fakeEngine
	cache  *fakeCache
	server *Server
	url    string
	set    *metrics.Set
	mu     sync.Mutex
	pods   []Pod
	role   roles.Role
}

func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	r := &rig{t: t, engine: newEngine(t), cache: &fakeCache{at: map[string]int{}}, set: metrics.NewSet(), role: roles.RoleDecode}
	cfg := Config{
		Engine: r.engine.URL, Threshold: 100, ClusterKey: []byte("key"), Cache: r.cache, Metrics: r.set, Log: zerolog.Nop(),
		Pods: func() []Pod { r.mu.Lock(); defer r.mu.Unlock(); return r.pods },
		Role: func() roles.Role { r.mu.Lock(); defer r.mu.Unlock(); return r.role },
		// A loaded machine must not change what is decided.
		tokenizeTimeout: patience,
	}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	r.server, err = New(cfg)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r.url = "http://" + l.Addr().String()
	r.server.Serve(l)
	t.Cleanup(func() {
		client.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = r.server.Close(ctx)
	})
	return r
}

// pod adds a prefill pod and returns its engine, which stands for the other
// node's proxy, too.
func (r *rig) pod(name string) *fakeEngine {
	e := newEngine(r.t)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pods = append(r.pods[:len(r.pods):len(r.pods)], Pod{Name: name, Addr: e.addr(), Role: roles.RolePrefill})
	return e
}

func (r *rig) setRole(role roles.Role) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.role = role
}

func (r *rig) metric(name string) string {
	var b bytes.Buffer
	r.set.WritePrometheus(&b)
	lines := bufio.NewScanner(&b)
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return v
		}
	}
	return ""
}

func (r *rig) decided(why reason) string {
	return r.metric(fmt.Sprintf("membrane_proxy_decisions_total{reason=%q}", why))
}

func (r *rig) prefills(how outcome) string {
	return r.metric(fmt.Sprintf("membrane_proxy_prefills_total{outcome=%q}", how))
}

var client = &http.Client{Timeout: 30 * time.Second}

type reply struct {
	status int
	header http.Header
	body   string
}

func (r *rig) do(method, path, body string, headers ...string) reply {
	r.t.Helper()
	req, err := http.NewRequest(method, r.url+path, strings.NewReader(body))
	require.NoError(r.t, err)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	res, err := client.Do(req)
	require.NoError(r.t, err)
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	require.NoError(r.t, err)
	return reply{res.StatusCode, res.Header, string(b)}
}

// long is a completion whose prompt is above the threshold.
func long(extra string) string {
	return `{"model":"m","prompt":"` + strings.Repeat("a", 300) + `","max_tokens":5` + extra + `}`
}

func (r *rig) idle() {
	r.t.Helper()
	require.Eventually(r.t, func() bool { return r.server.InFlight() == 0 }, patience, tick)
}
