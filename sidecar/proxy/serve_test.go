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
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/sidecar/auth"
	"membrane/sidecar/roles"
)

func TestWhatIsPassedOnIsPassedByteByByte(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	body := "\x00\xff not JSON"
	r.engine.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("X-Answer", "a b")
		w.Header().Add("Set-Cookie", "a=1")
		w.Header().Add("Set-Cookie", "b=2")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.WriteHeader(418)
		_, _ = w.Write([]byte("\x01\x02\xff"))
	})
	got := r.do("PUT", "/v1/files/a%2Fb%20c/../d?x=%41&y=a+b&&z", body, "X-Custom", "v1", "X-Custom", "v2", "Connection", "close, X-Hop", "X-Hop", "no",
		"Te", "trailers", "Authorization", "Bearer engines-own", "Content-Type", "x/y", "Accept-Encoding", "zstd")
	assert.Equal(t, 418, got.status)
	assert.Equal(t, "\x01\x02\xff", got.body)
	assert.Equal(t, "a b", got.header.Get("X-Answer"))
	assert.Equal(t, []string{"a=1", "b=2"}, got.header.Values("Set-Cookie"))
	assert.Empty(t, got.header.Get("Keep-Alive"))
	require.Len(t, r.engine.got(), 1)
	seen := r.engine.got()[0]
	assert.Equal(t, "PUT", seen.method)
	assert.Equal(t, "/v1/files/a%2Fb%20c/../d?x=%41&y=a+b&&z", seen.uri)
	assert.Equal(t, body, string(seen.body))
	assert.Equal(t, []string{"v1", "v2"}, seen.header.Values("X-Custom"))
	assert.Equal(t, "Bearer engines-own", seen.header.Get("Authorization"))
	assert.Equal(t, "zstd", seen.header.Get("Accept-Encoding"))
	assert.Equal(t, "x/y", seen.header.Get("Content-Type"))
	for _, hop := range []string{"X-Hop", "Te", "Connection"} {
		assert.Empty(t, seen.header.Values(hop), hop)
	}
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "DELETE", "PATCH"} {
		r.do(method, "/v1/models", "")
		last := r.engine.got()[len(r.engine.got())-1]
		assert.Equal(t, method, last.method)
		assert.Equal(t, "/v1/models", last.uri)
	}
	r.do("GET", "//double?", "")
	assert.Contains(t, r.engine.got()[len(r.engine.got())-1].uri, "//double?")
	r.idle()
}

func TestLargeUploadsAreStreamed(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	whole := bytes.Repeat([]byte("0123456789abcdef"), (MaxBody+1<<20)/16)
	for _, chunked := range []bool{false, true} {
		var body io.Reader = bytes.NewReader(whole)
		if chunked {
			body = io.MultiReader(body)
		}
		res, err := client.Post(r.url+"/v1/files", "x/y", body)
		require.NoError(t, err)
		_ = res.Body.Close()
		require.Equal(t, 200, res.StatusCode)
		got := r.engine.got()
		assert.True(t, bytes.Equal(whole, got[len(got)-1].body), "chunked: %v", chunked)
	}
	// An engine that answers before it has read all.
	r.engine.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(413) })
	res, err := client.Post(r.url+"/v1/files", "x/y", bytes.NewReader(whole))
	if err == nil { // net/http may fail to send the rest
		assert.Equal(t, 413, res.StatusCode)
		_ = res.Body.Close()
	}
	client.CloseIdleConnections()
	r.idle()
}

func TestBodyLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	at := func(n int) string {
		return `{"prompt":[1],"x":"` + strings.Repeat("a", n-len(`{"prompt":[1],"x":""}`)) + `"}`
	}
	assert.Equal(t, 200, r.do("POST", completionsPath, at(MaxBody)).status)
	for _, body := range []io.Reader{strings.NewReader(at(MaxBody + 1)), io.MultiReader(strings.NewReader(at(MaxBody + 1)))} {
		res, err := client.Post(r.url+completionsPath, "application/json", body)
		if err != nil { // the answer can be overtaken by the reset of what was not read
			continue
		}
		b, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		assert.Equal(t, 413, res.StatusCode)
		assert.Contains(t, string(b), "a body has at most 16777216 bytes")
	}
	assert.Len(t, r.engine.got(), 1)
	r.idle()
	assert.True(t, r.server.bodies.TryAcquire(maxBodies), "all room was given back")
}

// The room for large bodies is for those on their way: an answer may stream for
// minutes after its request is with the engine.
func TestAStreamedAnswerKeepsNoRoomForBodies(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	more := make(chan struct{})
	r.engine.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-more
	})
	res, err := client.Post(r.url+completionsPath, "application/json", strings.NewReader(`{"stream":true,"prompt":"`+strings.Repeat("a", 1<<20)+`"}`))
	require.NoError(t, err)
	_, err = io.ReadFull(res.Body, make([]byte, 9))
	require.NoError(t, err)
	require.True(t, r.server.bodies.TryAcquire(maxBodies))
	close(more)
	_, err = io.ReadAll(res.Body)
	require.NoError(t, err)
	_ = res.Body.Close()
	r.idle()
	r.server.bodies.Release(maxBodies) // which fails where more was given back than taken
}

func TestHeadLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	head := func(total int) int {
		conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		text := "GET /v1/models HTTP/1.1\r\nHost: h\r\nX: "
		text += strings.Repeat("a", total-len(text)-4) + "\r\n\r\n"
		_, err = io.WriteString(conn, text)
		require.NoError(t, err)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		_ = res.Body.Close()
		return res.StatusCode
	}
	assert.Equal(t, 200, head(MaxHeaders))
	assert.Equal(t, 431, head(MaxHeaders+1))
}

func TestSaltIsTheTenants(t *testing.T) {
	t.Parallel()
	key := func(subject string, scope auth.Scope) (string, string) {
		k, line, err := auth.Generate(subject, scope)
		require.NoError(t, err)
		return k, line + "\n"
	}
	a, lineA := key("acme", auth.ScopeWrite)
	b, lineB := key("other", auth.ScopeWrite)
	reader, lineR := key("reader", auth.ScopeRead)
	admin, lineS := key("admin", auth.ScopeAdmin)
	keys, err := auth.ParseKeyfile([]byte(lineA + lineB + lineR + lineS))
	require.NoError(t, err)
	r := newRig(t, func(c *Config) { c.Keys = keys })
	salt := func(key, body string) any {
		got := r.do("POST", completionsPath, body, "Authorization", "Bearer "+key)
		require.Equal(t, 200, got.status, got.body)
		last := r.engine.got()[len(r.engine.got())-1]
		assert.Empty(t, last.header.Get("Authorization"), "the key ends here")
		return last.field(t, "cache_salt")
	}
	plain := salt(a, `{"prompt":"x"}`)
	assert.Regexp(t, `^[0-9a-f]{64}$`, plain)
	assert.Equal(t, plain, salt(a, `{"prompt":"x","cache_salt":null}`))
	seen := map[any]bool{plain: true}
	for _, s := range []any{salt(b, `{"prompt":"x"}`), salt(a, `{"prompt":"x","cache_salt":""}`), salt(a, `{"prompt":"x","cache_salt":"s"}`), salt(b, `{"prompt":"x","cache_salt":"s"}`)} {
		assert.False(t, seen[s])
		seen[s] = true
	}
	assert.Equal(t, salt(a, `{"prompt":"x","cache_salt":"s"}`), salt(a, `{"cache_salt":"\u0073","prompt":"y"}`))

	for _, bad := range []string{`{"prompt":"x","cache_salt":5}`, `{"prompt":"x","cache_salt":"a","cache_salt":"b"}`, `{"prompt":"x","Cache_salt":"a"}`, `[]`} {
		got := r.do("POST", completionsPath, bad, "Authorization", "Bearer "+a)
		assert.Equal(t, 400, got.status, bad)
	}
	// Scopes, as on the HTTP port.
	f := func(key, method, path string, want int) {
		t.Helper()
		var headers []string
		if key != "" {
			headers = []string{"Authorization", "Bearer " + key}
		}
		assert.Equal(t, want, r.do(method, path, `{"prompt":"x"}`, headers...).status, "%s %s", method, path)
	}
	f("", "POST", completionsPath, 401)
	f("wrong", "POST", chatPath, 401)
	f(reader, "POST", completionsPath, 403)
	f(reader, "GET", "/v1/models", 200)
	f("", "GET", "/v1/models", 401)
	f(reader, "POST", "/v1/embeddings", 403)
	f(a, "POST", "/v1/embeddings", 200)
	f(a, "POST", "/reset_prefix_cache", 403)
	f(admin, "POST", "/reset_prefix_cache", 200)
	f("", "GET", "/health", 200)
	r.idle()
}

func TestSaltIsMadeWithTheClusterKey(t *testing.T) {
	t.Parallel()
	b, err := parseBody([]byte(`{"cache_salt":"s"}`))
	require.NoError(t, err)
	one, err := newSalts([]byte("key")).of("t", b.get("cache_salt"))
	require.NoError(t, err)
	two, err := newSalts([]byte("another")).of("t", b.get("cache_salt"))
	require.NoError(t, err)
	assert.NotEqual(t, one, two)
}

func TestStreamsAreWellFormedAndComeAsTheyAreMade(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	next := make(chan struct{})
	r.engine.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			<-next
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	res, err := client.Post(r.url+chatPath, "application/json", strings.NewReader(`{"messages":[],"stream":true}`))
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	assert.Equal(t, "text/event-stream", res.Header.Get("Content-Type"))
	lines := bufio.NewReader(res.Body)
	for i := range 3 {
		line, err := lines.ReadString('\n') // before the next one is made
		require.NoError(t, err)
		assert.Equal(t, fmt.Sprintf("data: %d\n", i), line)
		_, err = lines.ReadString('\n')
		require.NoError(t, err)
		next <- struct{}{}
	}
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	assert.Equal(t, "data: [DONE]\n\n", string(rest))
	assert.Equal(t, true, r.engine.got()[0].field(t, "stream"))
	r.idle()
}

// A stream that the engine cuts is cut for the client: never an end that looks
// like one.
func TestCutAnswersAreCut(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.engine.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	res, err := client.Post(r.url+completionsPath, "application/json", strings.NewReader(`{"prompt":"x","stream":true}`))
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	_, err = io.ReadAll(res.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	r.idle()
	assert.Equal(t, "1", r.metric("membrane_proxy_answers_cut_total"))
}

func TestEngineErrorsAreTheEngines(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.engine.answers(status(429))
	got := r.do("POST", completionsPath, `{"prompt":"x"}`)
	assert.Equal(t, 429, got.status)
	assert.JSONEq(t, `{"error":{"message":"no"}}`, got.body)
	r.engine.Close()
	got = r.do("POST", completionsPath, `{"prompt":"x"}`)
	assert.Equal(t, 502, got.status)
	var p problem
	require.NoError(t, json.Unmarshal([]byte(got.body), &p))
	assert.Equal(t, "engine_unreachable", p.Error.Type)
	assert.NotEmpty(t, got.header.Get("Retry-After"))
	assert.Equal(t, 502, r.do("GET", "/health", "").status)
	r.idle()
}

func TestClientGoneEndsTheRequestEverywhere(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"before the answer", "in a stream", "during a prefill elsewhere", "passed on"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			pod := r.pod("p")
			begun := make(chan struct{}, 1)
			waits := func(w http.ResponseWriter, req *http.Request, _ []byte) {
				if where == "in a stream" {
					_, _ = io.WriteString(w, "data: 1\n\n")
					w.(http.Flusher).Flush()
				}
				begun <- struct{}{}
				<-req.Context().Done()
			}
			path, body, at := completionsPath, `{"prompt":"x","stream":true}`, r.engine
			switch where {
			case "during a prefill elsewhere":
				body, at = long(""), pod
			case "passed on":
				path = "/v1/other"
			}
			at.answers(waits)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, "POST", r.url+path, strings.NewReader(body))
			require.NoError(t, err)
			go func() {
				<-begun
				cancel()
			}()
			res, err := client.Do(req)
			if err == nil {
				_, err = io.ReadAll(res.Body)
				_ = res.Body.Close()
			}
			require.ErrorIs(t, err, context.Canceled)
			require.Eventually(t, func() bool { return at.aborted.Load() == 1 }, patience, tick)
			r.idle()
			if where == "during a prefill elsewhere" {
				assert.Empty(t, r.engine.got(), "nobody waits for an answer")
				assert.Equal(t, "1", r.prefills(prefillGone))
				assert.Equal(t, "1", r.metric("membrane_proxy_client_gone_total"))
			}
		})
	}
}

func TestSaturationAndDrain(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *Config) { c.MaxInFlight = 2 })
	release := make(chan struct{})
	r.engine.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) { <-release; _, _ = io.WriteString(w, "{}") })
	done := make(chan int, 2)
	for range 2 {
		go func() {
			res, err := http.Post(r.url+completionsPath, "application/json", strings.NewReader(`{"prompt":"x"}`))
			if err != nil {
				done <- 0
				return
			}
			_ = res.Body.Close()
			done <- res.StatusCode
		}()
	}
	require.Eventually(t, func() bool { return len(r.engine.got()) == 2 }, patience, tick)
	got := r.do("POST", completionsPath, `{"prompt":"x"}`)
	assert.Equal(t, 503, got.status)
	assert.Equal(t, "1", got.header.Get("Retry-After"))
	assert.Contains(t, got.body, "saturated")
	assert.Equal(t, "1", r.metric(`membrane_proxy_refused_total{why="saturated"}`))

	r.server.Leave()
	assert.Equal(t, 503, r.do("GET", "/health", "").status)
	close(release)
	assert.Equal(t, 200, <-done)
	assert.Equal(t, 200, <-done)
	r.idle()
	assert.Equal(t, 200, r.do("POST", completionsPath, `{"prompt":"x"}`).status, "clients are served on while routers look away")
	leg := `{"prompt":"x","kv_transfer_params":{"do_remote_decode":true}}`
	assert.Equal(t, 503, r.do("POST", completionsPath, leg).status)
	r.server.Drain()
	got = r.do("POST", completionsPath, `{"prompt":"x"}`)
	assert.Equal(t, 503, got.status)
	assert.Equal(t, "1", got.header.Get("Retry-After"))
	r.idle()
}

func TestPinsAtTheirCapRefusePrefillsForOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.full = true
	leg := `{"prompt":"x","kv_transfer_params":{"do_remote_decode":true}}`
	got := r.do("POST", completionsPath, leg)
	assert.Equal(t, 503, got.status)
	assert.Equal(t, "1", got.header.Get("Retry-After"))
	assert.Equal(t, 200, r.do("POST", completionsPath, `{"prompt":"x"}`).status, "an ordinary request needs no pin")
	assert.Len(t, r.engine.got(), 1)
	assert.Equal(t, "1", r.metric(`membrane_proxy_refused_total{why="pins"}`))
	r.idle()
}

func TestBadConfigurations(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"", "localhost:8000", "ftp://a", "http://", "http://a/b", "http://u@a", "http://a?x", "http://a#x", "http://[::1"} {
		require.Error(t, CheckEngineURL(url), url)
	}
	require.NoError(t, CheckEngineURL("http://127.0.0.1:8000/"))
	good := Config{Engine: "http://a", Pods: func() []Pod { return nil }, Role: func() roles.Role { return "" }, Cache: &fakeCache{}}
	for _, f := range []func(*Config){
		func(c *Config) { c.Engine = "a" }, func(c *Config) { c.Threshold = -1 }, func(c *Config) { c.PrefillTimeout = -1 },
		func(c *Config) { c.MaxInFlight = -1 }, func(c *Config) { c.Pods = nil }, func(*Config) {},
	} {
		c := good
		f(&c)
		_, err := New(c)
		require.ErrorContains(t, err, "cannot make the serving proxy")
	}
}

func TestMalformedRequestsAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = io.WriteString(conn, "what\r\n\r\n")
	require.NoError(t, err)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 400, res.StatusCode)
}
