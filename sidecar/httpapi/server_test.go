package httpapi

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/goleak"

	"membrane/cache"
	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
	"membrane/sidecar/fragments"
	"membrane/sidecar/roles"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"), // sleeps ten seconds, then ends
	)
}

type api struct {
	*Server
	url string
	set *metrics.Set

	cache *cache.Cache
}

func newAPI(t *testing.T, keys *auth.Keys, change ...func(*Config)) *api {
	t.Helper()
	c, err := cache.New(cache.Config{Budget: 16 << 20})
	require.NoError(t, err)
	set := metrics.NewSet()
	fs, err := fragments.New(fragments.Config{Cache: c, Metrics: set})
	require.NoError(t, err)
	ds := newDisagg(t, c, fs, set)
	cfg := Config{
		NodeID: "n1", Fragments: fs, Disagg: ds, Keys: keys, Metrics: set, WriteMetrics: set.WritePrometheus, Log: zerolog.Nop(),
		Peers:   func() Peers { return Peers{Peers: []Peer{{NodeID: "n2", Host: "10.0.0.2", Port: 8080}}} },
		Status:  func() any { return map[string]string{"node": "n1"} },
		Summary: func() any { return map[string]string{"node_id": "n1"} },
		MeshAddress: func(method, path, authorization string, _ time.Time) (int, []byte) {
			return http.StatusUnauthorized, fmt.Appendf(nil, `{"got":%q}`, method+" "+path+" "+authorization)
		},
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.Serve(l)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, s.Close(ctx))
		ds.Close()
		fs.Close()
		require.NoError(t, c.Close())
	})
	return &api{s, "http://" + l.Addr().String(), set, c}
}

func newDisagg(t testing.TB, c *cache.Cache, fs *fragments.Service, set *metrics.Set) *disagg.Service {
	t.Helper()
	role, err := roles.New(roles.Config{Setting: "both"})
	require.NoError(t, err)
	ds, err := disagg.New(disagg.Config{Cache: c, Backend: disagg.Embedded(fs), Roles: role, Metrics: set, Log: zerolog.Nop()})
	require.NoError(t, err)
	return ds
}

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Minute}

type reply struct {
	code   int
	header http.Header
	body   map[string]any
}

func (a *api) do(t *testing.T, method, path, body string, header ...string) reply {
	t.Helper()
	req, err := http.NewRequest(method, a.url+path, strings.NewReader(body))
	require.NoError(t, err)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := client.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	r := reply{code: res.StatusCode, header: res.Header}
	if strings.HasPrefix(res.Header.Get("Content-Type"), "application/json") {
		require.NoError(t, json.Unmarshal(b, &r.body), "%s", b)
	} else {
		r.body = map[string]any{"text": string(b)}
	}
	assert.NotEmpty(t, res.Header.Get("X-Request-ID"))
	if r.code >= 400 && r.code != 503 && path != "/mesh/address" {
		assert.NotEmpty(t, r.body["error"])
		assert.NotEmpty(t, r.body["detail"])
	}
	return r
}

func numbers(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, ",%d", i)
	}
	return "[" + b.String()[1:] + "]"
}

func TestHomePage(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	r := a.do(t, "POST", "/prefill", `{"prompt_tokens": `+numbers(300)+`, "model_id": "llama-3-8b"}`, "Content-Type", "application/x-www-form-urlencoded")
	require.Equal(t, 200, r.code)
	assert.Equal(t, true, r.body["success"])
	stored := r.body["fragments"].([]any)
	require.Len(t, stored, 3)
	identity := stored[2].(map[string]any)["identity"].(map[string]any)
	assert.Len(t, identity, 10)
	assert.Equal(t, []any{256.0, 299.0}, identity["token_span"])

	r = a.do(t, "POST", "/reconstruct", `{"tokens": `+numbers(300)+`, "model_id": "llama-3-8b"}`)
	assert.Equal(t, map[string]any{
		"fragments": stored, "coverage": 1.0, "missing": []any{}, "prefilled": false, "prefetch": []any{},
	}, r.body)

	hash := identity["payload_hash"].(string)
	r = a.do(t, "GET", "/retrieve?content_hash="+hash, "")
	assert.Equal(t, map[string]any{"found": true, "fragment": stored[2]}, r.body)
	r = a.do(t, "GET", "/retrieve?content_hash=none", "")
	assert.Equal(t, 200, r.code)
	assert.Equal(t, map[string]any{"found": false, "fragment": nil}, r.body)

	r = a.do(t, "GET", "/inventory?limit=2", "")
	assert.Equal(t, "n1", r.body["node_id"])
	require.Len(t, r.body["digest"], 2)
	rest := a.do(t, "GET", "/inventory?limit=2&after="+r.body["next"].(string), "")
	require.Len(t, rest.body["digest"], 1)
	assert.Equal(t, "", rest.body["next"])
	all := a.do(t, "GET", "/inventory", "")
	assert.Equal(t, 1.0, all.body["digest"].(map[string]any)[hash])

	assert.Equal(t, "n2", a.do(t, "GET", "/peers", "").body["peers"].([]any)[0].(map[string]any)["node_id"])
	assert.Equal(t, map[string]any{"status": "alive"}, a.do(t, "GET", "/livez", "").body)
	assert.Equal(t, map[string]any{"status": "ready"}, a.do(t, "GET", "/readyz", "").body)
	assert.Equal(t, map[string]any{"node_id": "n1"}, a.do(t, "GET", "/metrics.json", "").body)
	assert.Equal(t, map[string]any{"node": "n1"}, a.do(t, "GET", "/statusz", "").body)
	text := a.do(t, "GET", "/metrics", "").body["text"]
	assert.Contains(t, text, `membrane_requests_total{endpoint="prefill",method="POST",status="200"} 1`)
	assert.Contains(t, text, `membrane_request_duration_seconds_bucket{endpoint="prefill",le="`)
}

func TestDefaultModel(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	r := a.do(t, "POST", "/prefill", `{"prompt_tokens":[1,2,3]}`)
	f := r.body["fragments"].([]any)[0].(map[string]any)
	assert.Equal(t, "default", f["identity"].(map[string]any)["model_id"])
}

func TestErrors(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	f := func(method, path, body string, code int, name, field string) {
		t.Helper()
		r := a.do(t, method, path, body)
		assert.Equal(t, code, r.code)
		assert.Equal(t, name, r.body["error"])
		if field == "" {
			assert.NotContains(t, r.body, "field")
		} else {
			assert.Equal(t, field, r.body["field"])
		}
	}
	f("GET", "/nothing", "", 404, "not_found", "")
	f("GET", "/prefill/", "", 404, "not_found", "")
	f("GET", "/prefill", "", 405, "method_not_allowed", "")
	f("DELETE", "/inventory", "", 405, "method_not_allowed", "")
	f("POST", "/prefill", "", 400, "bad_request", "body")
	f("POST", "/prefill", "tokens=1", 400, "bad_request", "body")
	f("POST", "/prefill", `{"prompt_tokens":[1]} x`, 400, "bad_request", "body")
	f("POST", "/prefill", `{}`, 422, "bad_field", "prompt_tokens")
	f("POST", "/prefill", `{"prompt_tokens":null}`, 422, "bad_field", "prompt_tokens")
	f("POST", "/prefill", `{"prompt_tokens":"1 2"}`, 422, "bad_field", "prompt_tokens")
	f("POST", "/prefill", `{"prompt_tokens":[1,1.5]}`, 422, "bad_field", "prompt_tokens")
	f("POST", "/prefill", `{"prompt_tokens":[1,99999999999999999999]}`, 422, "bad_field", "prompt_tokens")
	f("POST", "/prefill", `{"prompt_tokens":[1,-1]}`, 422, "bad_field", "prompt_tokens[1]")
	f("POST", "/prefill", `{"prompt_tokens":[4294967296]}`, 422, "bad_field", "prompt_tokens[0]")
	f("POST", "/prefill", `{"prompt_tokens":[1],"model":"m"}`, 422, "bad_field", "model")
	f("POST", "/prefill", `{"prompt_tokens":[1],"model_id":""}`, 422, "bad_field", "model_id")
	f("POST", "/prefill", `{"prompt_tokens":[1],"model_id":"`+strings.Repeat("m", 257)+`"}`, 422, "bad_field", "model_id")
	f("POST", "/prefill", `{"prompt_tokens":`+numbers(32769)+`}`, 422, "too_large", "prompt_tokens")
	f("POST", "/reconstruct", `{"tokens":`+numbers(131073)+`}`, 422, "too_large", "tokens")
	f("POST", "/reconstruct", `{"tokens":[1],"prefill":"yes"}`, 422, "bad_field", "prefill")
	f("GET", "/retrieve", "", 422, "bad_field", "content_hash")
	f("GET", "/retrieve?content_hash="+strings.Repeat("x", 257), "", 422, "too_large", "content_hash")
	f("GET", "/inventory?limit=-1", "", 422, "bad_field", "limit")
	f("GET", "/inventory?limit=100001", "", 422, "bad_field", "limit")
	f("GET", "/inventory?limit=x", "", 422, "bad_field", "limit")
	assert.Equal(t, 200, a.do(t, "GET", "/inventory?limit=100000", "").code)
	assert.Equal(t, 200, a.do(t, "POST", "/reconstruct", `{"tokens":`+numbers(131072)+`}`).code)
	assert.Equal(t, "POST", a.do(t, "GET", "/prefill", "").header.Get("Allow"))
}

func TestBodyOverTheLimit(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = fmt.Fprintf(conn, "POST /reconstruct HTTP/1.1\r\nHost: n1\r\nContent-Length: %d\r\n\r\n%s", MaxBody+1, strings.Repeat(" ", 8<<10))
	require.NoError(t, err)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	assert.Equal(t, 413, res.StatusCode)
	var body map[string]string
	require.NoError(t, json.NewDecoder(res.Body).Decode(&body))
	assert.Equal(t, "too_large", body["error"])
	assert.Equal(t, "body", body["field"])
	assert.NotEmpty(t, res.Header.Get("X-Request-ID"))
}

func TestWhatIsNoHTTP(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = conn.Write([]byte("MBRN\x01\x03\x00\x00\r\n\r\n"))
	require.NoError(t, err)
	line, err := bufio.NewReader(conn).ReadString('\n')
	require.NoError(t, err)
	assert.Contains(t, line, "400")
	assert.Equal(t, 200, a.do(t, "GET", "/livez", "").code)
}

func TestScopesAndTenants(t *testing.T) {
	t.Parallel()
	key := map[string]string{}
	var file strings.Builder
	for subject, scope := range map[string]auth.Scope{
		"reader": auth.ScopeRead, "acme": auth.ScopeWrite, "rival": auth.ScopeWrite, "ops": auth.ScopeAdmin, "vllm": auth.ScopeEngine,
	} {
		k, line, err := auth.Generate(subject, scope)
		require.NoError(t, err)
		key[subject] = k
		fmt.Fprintln(&file, line)
	}
	keys, err := auth.ParseKeyfile([]byte(file.String()))
	require.NoError(t, err)
	a := newAPI(t, keys)

	r := a.do(t, "GET", "/inventory", "")
	assert.Equal(t, 401, r.code)
	assert.Equal(t, "Bearer", r.header.Get("WWW-Authenticate"))
	for _, wrong := range []string{"Bearer nonsense", "Basic " + key["ops"], key["ops"], "Bearer"} {
		assert.Equal(t, 401, a.do(t, "GET", "/inventory", "", "Authorization", wrong).code)
	}
	as := func(who, method, path, body string) reply {
		t.Helper()
		return a.do(t, method, path, body, "Authorization", "Bearer "+key[who])
	}
	f := func(who, method, path, body string, code int) {
		t.Helper()
		assert.Equal(t, code, as(who, method, path, body).code, "%s %s %s", who, method, path)
	}
	prefill, look := `{"prompt_tokens":[1,2]}`, `{"tokens":[1,2]}`
	compute := `{"tokens":[1,2],"prefill":true}`
	f("reader", "POST", "/prefill", prefill, 403)
	f("reader", "POST", "/reconstruct", look, 200)
	f("reader", "POST", "/reconstruct", compute, 403)
	f("reader", "GET", "/peers", "", 200)
	f("reader", "GET", "/metrics", "", 200)
	f("reader", "GET", "/statusz", "", 403)
	f("acme", "POST", "/reconstruct", compute, 200)
	f("acme", "GET", "/statusz", "", 403)
	f("ops", "GET", "/statusz", "", 200)
	f("ops", "POST", "/prefill", prefill, 200)
	f("vllm", "GET", "/retrieve?content_hash=x", "", 403)
	for _, open := range []string{"/livez", "/readyz"} {
		assert.Equal(t, 200, a.do(t, "GET", open, "").code)
	}

	// A foreign tenant's fragment is a miss like any other.
	own := as("acme", "GET", "/inventory", "").body["digest"].(map[string]any)
	require.Len(t, own, 1)
	for name := range own {
		assert.True(t, strings.HasPrefix(name, "acme:"))
		assert.Equal(t, true, as("acme", "GET", "/retrieve?content_hash="+name, "").body["found"])
		foreign := as("rival", "GET", "/retrieve?content_hash="+name, "")
		miss := as("rival", "GET", "/retrieve?content_hash=acme:0", "")
		assert.Equal(t, miss.body, foreign.body)
		assert.Equal(t, miss.code, foreign.code)
		assert.Equal(t, false, as("rival", "GET", "/retrieve?content_hash="+strings.TrimPrefix(name, "acme:"), "").body["found"])
	}
	assert.Empty(t, as("rival", "GET", "/inventory", "").body["digest"])
	assert.Equal(t, 0.0, as("rival", "POST", "/reconstruct", look).body["coverage"])
}

func TestMeshAddressHasItsOwnCredential(t *testing.T) {
	t.Parallel()
	_, line, err := auth.Generate("ops", auth.ScopeAdmin)
	require.NoError(t, err)
	keys, err := auth.ParseKeyfile([]byte(line))
	require.NoError(t, err)
	a := newAPI(t, keys)
	r := a.do(t, "GET", "/mesh/address", "", "Authorization", "Peer x")
	assert.Equal(t, 401, r.code)
	assert.Equal(t, "GET /mesh/address Peer x", r.body["got"])
}

func TestRequestIDs(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	f := func(given string, kept bool) {
		t.Helper()
		got := a.do(t, "GET", "/livez", "", "X-Request-ID", given).header.Get("X-Request-ID")
		if kept {
			assert.Equal(t, given, got)
		} else {
			assert.Regexp(t, `^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, got)
		}
	}
	f("abc-1.2_Z", true)
	f(strings.Repeat("x", 128), true)
	f(strings.Repeat("x", 129), false)
	f("", false)
	f("a b", false)
	f("a\"b", false)
}

// Asked to drain, it is not ready and serves on.
func TestLeaveServesOn(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	for range 2 {
		r := a.do(t, "POST", "/drain", "")
		require.Equal(t, 200, r.code)
		assert.Equal(t, map[string]any{"draining": true, "in_flight": 0.0}, r.body)
	}
	assert.Equal(t, 503, a.do(t, "GET", "/readyz", "").code)
	assert.Equal(t, 200, a.do(t, "POST", "/prefill", `{"prompt_tokens":[1]}`).code)
}

func TestDrain(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	require.Equal(t, 200, a.do(t, "POST", "/prefill", `{"prompt_tokens":[1]}`).code)
	a.Drain()
	r := a.do(t, "GET", "/readyz", "")
	assert.Equal(t, 503, r.code)
	assert.Equal(t, map[string]any{"status": "draining"}, r.body)
	assert.Equal(t, "5", r.header.Get("Retry-After"))
	for path, body := range map[string]string{"/prefill": `{"prompt_tokens":[1]}`, "/reconstruct": `{"tokens":[1],"prefill":true}`} {
		r := a.do(t, "POST", path, body)
		assert.Equal(t, 503, r.code)
		assert.Equal(t, "draining", r.body["error"])
		assert.Equal(t, "1", r.header.Get("Retry-After"))
	}
	assert.Equal(t, 1.0, a.do(t, "POST", "/reconstruct", `{"tokens":[1]}`).body["coverage"])
	assert.Equal(t, 200, a.do(t, "GET", "/livez", "").code)
}

func TestPanicIsAnAnswer(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil, func(c *Config) { c.Status = func() any { panic("boom") } })
	r := a.do(t, "GET", "/statusz", "")
	assert.Equal(t, 500, r.code)
	assert.Equal(t, "internal", r.body["error"])
	assert.NotContains(t, r.body["detail"], "boom")
	assert.Zero(t, a.InFlight())
	assert.Equal(t, 200, a.do(t, "GET", "/livez", "").code)
}

func TestUnixSocket(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	path := filepath.Join(t.TempDir(), "h")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	a.Serve(l)
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}
	res, err := (&http.Client{Transport: tr}).Get("http://membrane/readyz")
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 200, res.StatusCode)
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	_, err := New(Config{})
	require.ErrorContains(t, err, "is nil")
}

func metricsSet() *metrics.Set { return metrics.NewSet() }

func newFuzzServer(f *testing.F) *Server {
	f.Helper()
	c, err := cache.New(cache.Config{Budget: 4 << 20})
	require.NoError(f, err)
	set := metrics.NewSet()
	fs, err := fragments.New(fragments.Config{Cache: c, Metrics: set})
	require.NoError(f, err)
	ds := newDisagg(f, c, fs, set)
	nothing := func() any { return nil }
	s, err := New(Config{
		Fragments: fs, Disagg: ds, Metrics: set, WriteMetrics: set.WritePrometheus, Log: zerolog.Nop(), Peers: func() Peers { return Peers{} },
		Status: nothing, Summary: nothing, MeshAddress: func(string, string, string, time.Time) (int, []byte) { return 401, nil },
	})
	require.NoError(f, err)
	f.Cleanup(func() {
		ds.Close()
		fs.Close()
		require.NoError(f, c.Close())
	})
	return s
}

func FuzzReconstruct(f *testing.F) {
	s := newFuzzServer(f)
	for _, body := range []string{`{"tokens":[1,2]}`, `{"tokens":[-1]}`, `{"tokens":{}}`, `{"tokens":[1e300]}`, `[]`, ``, `{"tokens":[],"model_id":"\ud800"}`} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var ctx fasthttp.RequestCtx
		ctx.Request.Header.SetMethod("POST")
		ctx.Request.SetRequestURI("/reconstruct")
		ctx.Request.SetBody(body)
		s.Handler(&ctx)
		code := ctx.Response.StatusCode()
		require.Contains(t, []int{200, 400, 422}, code)
		var answer map[string]any
		require.NoError(t, json.Unmarshal(ctx.Response.Body(), &answer))
		if code != 200 {
			require.NotEmpty(t, answer["error"])
			require.NotEmpty(t, answer["detail"])
		}
	})
}

// Who sees that nothing is under way finds every request in the counters.
func TestRequestsEndAfterTheyAreCounted(t *testing.T) {
	t.Parallel()
	var under atomic.Pointer[api]
	seen := make(chan int, 1)
	log := zerolog.New(io.Discard).Hook(zerolog.HookFunc(func(_ *zerolog.Event, _ zerolog.Level, message string) {
		if a := under.Load(); message == "request" && a != nil {
			seen <- a.InFlight()
		}
	}))
	a := newAPI(t, nil, func(c *Config) { c.Log = log })
	under.Store(a)
	require.Equal(t, 200, a.do(t, "GET", "/livez", "").code)
	assert.Equal(t, 1, <-seen)
}
