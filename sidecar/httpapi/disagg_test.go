package httpapi

import (
	"bufio"
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
	"github.com/valyala/fasthttp"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
	"membrane/sidecar/roles"
)

const promptJSON = `{"request_id": "r1", "model_id": "llama-3-8b", "token_ids": [1, 2, 3]}`

// The predecessor's page, as its reader types it.
func TestPrefillThenDecode(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	assert.Equal(t, map[string]any{"status": "ok"}, a.do(t, "GET", "/disagg/healthz", "").body)
	r := a.do(t, "POST", "/disagg/prefill", promptJSON)
	require.Equal(t, 200, r.code, r.body)
	handle := r.body["kv_handle"].(string)
	assert.Len(t, handle, 64)
	assert.Equal(t, "r1", r.body["request_id"])
	assert.EqualValues(t, 3, r.body["prompt_len"])
	assert.EqualValues(t, 0, r.body["cached_prefix_len"])
	assert.Positive(t, r.body["prefill_ms"])
	expires, err := time.Parse(time.RFC3339, r.body["expires_at"].(string))
	require.NoError(t, err)
	assert.WithinDuration(t, time.Now().Add(disagg.DefaultTTL), expires, time.Minute)

	d := a.do(t, "POST", "/disagg/decode", `{"request_id": "r2", "kv_handle": "`+handle+`", "model_id": "llama-3-8b", "max_tokens": 8}`)
	require.Equal(t, 200, d.code, d.body)
	assert.Equal(t, "r2", d.body["request_id"])
	assert.Len(t, d.body["token_ids"], 8)
	assert.Equal(t, true, d.body["finished"])
	assert.Equal(t, "length", d.body["finish_reason"])
	assert.EqualValues(t, 0, d.body["recomputed_tokens"])
	assert.Equal(t, r.body["expires_at"], d.body["expires_at"])
	assert.Len(t, a.do(t, "POST", "/disagg/decode", `{"request_id": "r", "kv_handle": "`+handle+`", "model_id": "llama-3-8b"}`).body["token_ids"], 256)

	b := a.do(t, "POST", "/disagg/prefill/batch", `{"requests": [`+promptJSON+`,`+strings.ReplaceAll(promptJSON, "[1,", "[9,")+`]}`)
	require.Equal(t, 200, b.code, b.body)
	rs := b.body["responses"].([]any)
	require.Len(t, rs, 2)
	assert.Equal(t, handle, rs[0].(map[string]any)["kv_handle"])
	assert.EqualValues(t, 3, rs[0].(map[string]any)["cached_prefix_len"])
	assert.Contains(t, b.body, "elapsed_ms")
	// What was prefilled for a handle is a fragment, too.
	assert.Equal(t, 1.0, a.do(t, "POST", "/reconstruct", `{"tokens": [1, 2, 3], "model_id": "llama-3-8b"}`).body["coverage"])
	assert.Len(t, a.do(t, "GET", "/inventory", "").body["digest"], 2)
}

func TestDisaggRefusals(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	f := func(code int, field, detail, path, body string) {
		t.Helper()
		r := a.do(t, "POST", path, body)
		assert.Equal(t, code, r.code, r.body)
		if field != "" {
			assert.Equal(t, field, r.body["field"])
		}
		assert.Contains(t, r.body["detail"], detail)
	}
	const prefill, batch, decode = "/disagg/prefill", "/disagg/prefill/batch", "/disagg/decode"
	unknown := strings.Repeat("ab", 32)
	f(400, "body", "not JSON", prefill, `{`)
	f(400, "token_ids", "a string is not allowed here", prefill, `{"token_ids": "1"}`)
	f(400, "wrong", "is not a field", prefill, `{"wrong": 1}`)
	f(400, "request_id", "missing", prefill, `{"model_id": "m", "token_ids": [1]}`)
	f(400, "model_id", "missing", prefill, `{"request_id": "r", "token_ids": [1]}`)
	f(400, "token_ids", "at least one", prefill, `{"request_id": "r", "model_id": "m"}`)
	f(400, "token_ids[1]", "4294967296 is not a token id", prefill, `{"request_id": "r", "model_id": "m", "token_ids": [1, 4294967296]}`)
	f(400, "deadline_ms", "not between", prefill, `{"request_id": "r", "model_id": "m", "token_ids": [1], "deadline_ms": 0}`)
	f(400, "requests", "0 requests", batch, `{"requests": []}`)
	f(400, "requests", "0 requests", batch, `{}`)
	f(400, "requests", "65 requests", batch, `{"requests": [`+promptJSON+strings.Repeat(","+promptJSON, 64)+`]}`)
	f(400, "requests[1].token_ids", "is empty", batch, `{"requests": [`+promptJSON+`, {"request_id": "r", "model_id": "m"}]}`)
	c, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	require.NoError(t, err)
	defer c.Close()
	_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", prefill, MaxBody+1, strings.Repeat(" ", 64<<10))
	require.NoError(t, err)
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 413, res.StatusCode)
	f(404, "kv_handle", "prefill again", decode, `{"request_id": "r", "model_id": "m", "kv_handle": "`+unknown+`"}`)
	f(400, "kv_handle", "'/' is not allowed", decode, `{"request_id": "r", "model_id": "m", "kv_handle": "../x"}`)
	f(400, "kv_handle", "missing", decode, `{"request_id": "r", "model_id": "m"}`)
	for _, bad := range []string{`"max_tokens": 0`, `"max_tokens": -1`, `"max_tokens": 32769`, `"temperature": 3`, `"top_p": 0`, `"stop_token_ids": [-1]`, `"deadline_ms": 600001`} {
		f(400, "", "", decode, `{"request_id": "r", "model_id": "m", "kv_handle": "`+unknown+`", `+bad+`}`)
	}
	f(400, "max_tokens", "0 is not between", decode, `{"request_id": "r", "model_id": "m", "kv_handle": "`+unknown+`", "max_tokens": 0}`)
	f(400, "top_p", "0 is not above", decode, `{"request_id": "r", "model_id": "m", "kv_handle": "`+unknown+`", "top_p": 0}`)
	f(405, "", "takes GET, HEAD, PUT", "/kv/name", "")
	assert.Empty(t, a.do(t, "GET", "/inventory", "").body["digest"], "nothing is stored")

	r := a.do(t, "POST", prefill, promptJSON)
	f(400, "model_id", "another model", decode, `{"request_id": "r", "model_id": "m", "kv_handle": "`+r.body["kv_handle"].(string)+`"}`)
	a.Drain()
	f(503, "", "stopping", prefill, promptJSON)
	f(503, "", "stopping", decode, `{}`)
}

func TestDisaggRolesAndTenants(t *testing.T) {
	t.Parallel()
	key := func(subject string, scope auth.Scope) (string, string) {
		k, line, err := auth.Generate(subject, scope)
		require.NoError(t, err)
		return k, line
	}
	acme, l1 := key("acme", auth.ScopeWrite)
	other, l2 := key("other", auth.ScopeWrite)
	reader, l3 := key("acme", auth.ScopeRead)
	keys, err := auth.ParseKeyfile([]byte(l1 + "\n" + l2 + "\n" + l3))
	require.NoError(t, err)
	a := newAPI(t, keys)
	as := func(k string) []string { return []string{"Authorization", "Bearer " + k} }
	assert.Equal(t, 200, a.do(t, "GET", "/disagg/healthz", "").code)
	assert.Equal(t, 401, a.do(t, "POST", "/disagg/prefill", promptJSON).code)
	assert.Equal(t, 403, a.do(t, "POST", "/disagg/prefill", promptJSON, as(reader)...).code)
	r := a.do(t, "POST", "/disagg/prefill", promptJSON, as(acme)...)
	require.Equal(t, 200, r.code)
	decode := `{"request_id": "r", "model_id": "llama-3-8b", "max_tokens": 2, "kv_handle": "` + r.body["kv_handle"].(string) + `"}`
	assert.Equal(t, 404, a.do(t, "POST", "/disagg/decode", decode, as(other)...).code)
	assert.Equal(t, 200, a.do(t, "POST", "/disagg/decode", decode, as(acme)...).code)

	assert.Equal(t, 403, a.do(t, "PUT", "/kv/h", "x", as(reader)...).code)
	assert.Equal(t, 200, a.do(t, "PUT", "/kv/h", "x", as(acme)...).code)
	assert.Equal(t, 200, a.do(t, "GET", "/kv/h", "", as(reader)...).code)
	assert.Equal(t, 404, a.do(t, "GET", "/kv/h", "", as(other)...).code)

	role, err := roles.New(roles.Config{Setting: "decode"})
	require.NoError(t, err)
	b := newAPI(t, nil, func(c *Config) {
		kv, err := cache.New(cache.Config{Budget: cache.MinBudget})
		require.NoError(t, err)
		c.Disagg, err = disagg.New(disagg.Config{Cache: kv, Backend: disagg.Embedded(c.Fragments), Roles: role, Metrics: metricsSet()})
		require.NoError(t, err)
		t.Cleanup(func() { c.Disagg.Close(); require.NoError(t, kv.Close()) })
	})
	wrong := b.do(t, "POST", "/disagg/prefill", promptJSON)
	assert.Equal(t, 409, wrong.code)
	assert.Equal(t, "wrong_role", wrong.body["error"])
	assert.Contains(t, wrong.body["detail"], "send prefill to a node with the role prefill or both")
}

func TestPrefillAtTheCapOfPins(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil) // a cache of 16 MiB, half of which may be pinned
	fillPins(t, a.cache)
	r := a.do(t, "POST", "/disagg/prefill", `{"request_id": "r", "model_id": "m", "token_ids": `+numbers(128)+`}`)
	assert.Equal(t, 503, r.code)
	assert.Equal(t, "pinned", r.body["error"])
	assert.Equal(t, "60", r.header.Get("Retry-After"))
	assert.Contains(t, r.body["detail"], "give the cache more memory")
}

// fillPins pins pages of nobody's up to the cap.
func fillPins(t *testing.T, c *cache.Cache) {
	t.Helper()
	space, err := c.Space("pins", kvwire.Namespace{1})
	require.NoError(t, err)
	for i := range 200 {
		h := []kvwire.Hash{{byte(i), 1}}
		_, err := space.Put(kvwire.Shard{Count: 1}, kvwire.Form{1}, h[0], make([]byte, 128<<10))
		require.NoError(t, err)
		_, why, err := space.Pin(kvwire.Form{1}, h, time.Minute)
		require.NoError(t, err)
		if why == kvwire.ReasonPinned {
			return
		}
	}
	require.Fail(t, "the pins have no cap")
}

// event is one event of a stream.
type event struct {
	name string
	data string
}

func events(t *testing.T, r io.Reader, got func(event) bool) {
	t.Helper()
	lines := bufio.NewScanner(r)
	var e event
	for lines.Scan() {
		switch line := lines.Text(); {
		case line == "":
			if !got(e) {
				return
			}
			e = event{}
		case strings.HasPrefix(line, "event: "):
			e.name = line[len("event: "):]
		case strings.HasPrefix(line, "data: "):
			e.data = line[len("data: "):]
		default:
			require.Fail(t, "not an event", line)
		}
	}
}

func (a *api) stream(t *testing.T, ctx context.Context, body string) *http.Response { //nolint:revive // as the test reads it
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", a.url+"/disagg/decode", strings.NewReader(body))
	require.NoError(t, err)
	res, err := client.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = res.Body.Close() })
	return res
}

func TestDecodeStreams(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	handle := a.do(t, "POST", "/disagg/prefill", promptJSON).body["kv_handle"].(string)
	ask := func(more string) string {
		return `{"request_id": "s", "model_id": "llama-3-8b", "kv_handle": "` + handle + `"` + more + `}`
	}
	whole := a.do(t, "POST", "/disagg/decode", ask(`, "max_tokens": 10`)).body["token_ids"].([]any)

	res := a.stream(t, context.Background(), ask(`, "max_tokens": 10, "stream": true`))
	assert.Equal(t, 200, res.StatusCode)
	assert.Equal(t, "text/event-stream", res.Header.Get("Content-Type"))
	var tokens []any
	var last map[string]any
	done := false
	events(t, res.Body, func(e event) bool {
		assert.False(t, done, "nothing follows [DONE]")
		if e.data == "[DONE]" {
			done = true
			return true
		}
		last = map[string]any{}
		require.NoError(t, json.Unmarshal([]byte(e.data), &last))
		assert.Equal(t, "s", last["request_id"])
		if token, ok := last["token_id"]; ok {
			tokens = append(tokens, token)
		}
		return true
	})
	assert.True(t, done)
	assert.Equal(t, whole, tokens)
	assert.Equal(t, whole, last["token_ids"])
	assert.Equal(t, "length", last["finish_reason"])
	assert.Contains(t, last, "expires_at")

	// No token at all is a stream, too; an error before the first has a status.
	res = a.stream(t, context.Background(), ask(fmt.Sprintf(`, "stream": true, "stop_token_ids": [%v]`, whole[0])))
	n := 0
	events(t, res.Body, func(e event) bool {
		if n++; n == 1 {
			assert.Contains(t, e.data, `"finish_reason":"stop"`)
			assert.Contains(t, e.data, `"token_ids":[]`)
		}
		return true
	})
	assert.Equal(t, 2, n)
	bad := a.do(t, "POST", "/disagg/decode", `{"request_id": "s", "model_id": "llama-3-8b", "stream": true, "kv_handle": "`+strings.Repeat("ab", 32)+`"}`)
	assert.Equal(t, 404, bad.code)
	require.Eventually(t, func() bool { return a.InFlight() == 0 }, 10*time.Second, time.Millisecond)
}

func TestAStreamForAnOldClientHasNoChunks(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	c, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	body := strings.Replace(promptJSON, "{", `{"stream": true, `, 1)
	_, err = fmt.Fprintf(c, "POST /disagg/prefill HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	require.NoError(t, err)
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	head, text, _ := strings.Cut(string(got), "\r\n\r\n")
	assert.NotContains(t, strings.ToLower(head), "transfer-encoding")
	assert.True(t, strings.HasPrefix(text, "data: {"), text)
	assert.True(t, strings.HasSuffix(text, "}\n\ndata: [DONE]\n\n"), text)
}

func TestPrefillStreamsItsHandleFirst(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	body := strings.TrimSuffix(promptJSON, "}") + `, "stream": true}`
	var got []map[string]any
	done := false
	res := a.do(t, "POST", "/disagg/prefill", body)
	require.Equal(t, 200, res.code)
	events(t, strings.NewReader(res.body["text"].(string)), func(e event) bool {
		if e.data == "[DONE]" {
			done = true
			return true
		}
		var v map[string]any
		require.NoError(t, json.Unmarshal([]byte(e.data), &v))
		got = append(got, v)
		return true
	})
	require.Len(t, got, 2)
	assert.True(t, done)
	assert.Equal(t, got[1]["kv_handle"], got[0]["kv_handle"])
	assert.Equal(t, got[1]["prompt_len"], got[0]["prompt_len"])
	assert.NotContains(t, got[0], "expires_at")
	assert.Contains(t, got[1], "expires_at")

	assert.Equal(t, 400, a.do(t, "POST", "/disagg/prefill", `{"request_id": "s", "model_id": "m", "token_ids": [], "stream": true}`).code)
	batch := a.do(t, "POST", "/disagg/prefill/batch", `{"requests": [`+body+`]}`)
	assert.Equal(t, 400, batch.code)
	assert.Equal(t, "requests[0].stream", batch.body["field"])
}

// A client that goes away ends the work for it: streaming, waiting, or waiting
// for a prefill.
func TestClientsThatGoAwayFreeEverything(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	handle := a.do(t, "POST", "/disagg/prefill", promptJSON).body["kv_handle"].(string)
	long := `{"request_id": "s", "model_id": "llama-3-8b", "max_tokens": 32768, "kv_handle": "` + handle + `"`
	idle := func() {
		t.Helper()
		require.Eventually(t, func() bool { return a.InFlight() == 0 }, 10*time.Second, time.Millisecond)
	}

	ctx, cancel := context.WithCancel(context.Background())
	res := a.stream(t, ctx, long+`, "stream": true}`)
	events(t, res.Body, func(event) bool { return false }) // after the first token
	cancel()
	idle()

	for _, body := range []string{long + `}`, long + `, "stream": true}`} {
		c, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
		require.NoError(t, err)
		_, err = fmt.Fprintf(c, "POST /disagg/decode HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return a.InFlight() > 0 }, 10*time.Second, time.Millisecond)
		require.NoError(t, c.Close())
		idle()
	}
	prompt := `{"request_id": "s", "model_id": "m", "token_ids": ` + numbers(20000) + `}`
	c, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	require.NoError(t, err)
	_, err = fmt.Fprintf(c, "POST /disagg/prefill HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(prompt), prompt)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return a.InFlight() > 0 }, 10*time.Second, time.Millisecond)
	require.NoError(t, c.Close())
	idle()
	text := a.do(t, "GET", "/metrics", "").body["text"].(string)
	assert.Contains(t, text, `membrane_requests_total{endpoint="disagg_prefill",method="POST",status="499"} 1`)
	assert.Contains(t, text, "membrane_disagg_handles 1\n", "what was cut off is kept under no handle")
}

func TestNamedBundles(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	big := strings.Repeat("0123456789abcdef", 300<<10/16) // more than a buffer
	r := a.do(t, "PUT", "/kv/h:1.a?model_id=m", big)
	require.Equal(t, 200, r.code, r.body)
	hash := r.body["content_hash"]
	assert.Len(t, hash, 64)
	got := a.do(t, "GET", "/kv/h:1.a?model_id=m", "")
	assert.Equal(t, 200, got.code)
	assert.Equal(t, big, got.body["text"])
	assert.Equal(t, "application/octet-stream", got.header.Get("Content-Type"))
	assert.Equal(t, hash, got.header.Get("X-Content-SHA256"))
	assert.NotEmpty(t, got.header.Get("X-Membrane-Expires"))
	head := a.do(t, "HEAD", "/kv/h:1.a?model_id=m", "")
	assert.Equal(t, 200, head.code)
	assert.Equal(t, fmt.Sprint(len(big)), head.header.Get("Content-Length"))
	assert.Equal(t, 404, a.do(t, "GET", "/kv/h:1.a", "").code, "the model is default")
	assert.Equal(t, 200, a.do(t, "PUT", "/kv/h:1.a?model_id=m", "new").code)
	assert.Equal(t, "new", a.do(t, "GET", "/kv/h:1.a?model_id=m", "").body["text"])

	for path, code := range map[string]int{
		"/kv/a/b": 400, "/kv/a%2fb": 400, "/kv/..%2fx": 400, "/kv/a%20b": 400, "/kv/" + strings.Repeat("x", 257): 400,
		"/kv/a?model_id=": 400, "/kv/a?model_id=" + strings.Repeat("x", 257): 400,
	} {
		assert.Equal(t, code, a.do(t, "PUT", path, "x").code, path)
		assert.Equal(t, code, a.do(t, "GET", path, "").code, path)
	}
	assert.Equal(t, 400, a.do(t, "PUT", "/kv/empty", "").code)

	send := func(head, body string) int {
		t.Helper()
		c, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
		require.NoError(t, err)
		defer c.Close()
		_, err = io.WriteString(c, "PUT /kv/x HTTP/1.1\r\nHost: x\r\n"+head+"\r\n\r\n"+body)
		require.NoError(t, err)
		if body == "short" {
			require.NoError(t, c.(*net.TCPConn).CloseWrite())
		}
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		_ = res.Body.Close()
		return res.StatusCode
	}
	assert.Equal(t, 413, send(fmt.Sprint("Content-Length: ", disagg.MaxBundle+1), strings.Repeat("x", 64<<10)))
	assert.Equal(t, 413, send(fmt.Sprint("Content-Length: ", disagg.MaxBundle), strings.Repeat("x", 64<<10)), "more than this cache has")
	assert.Equal(t, 411, send("Transfer-Encoding: chunked", "1\r\nx\r\n0\r\n\r\n"))
	assert.Equal(t, 400, send("Content-Length: 10", "short"))
	assert.Equal(t, 404, a.do(t, "GET", "/kv/x", "").code, "nothing is stored")
	a.Drain()
	assert.Equal(t, 503, a.do(t, "PUT", "/kv/x", "x").code)
}

func FuzzDisagg(f *testing.F) {
	a := newFuzzServer(f)
	for _, body := range []string{promptJSON, `{"requests":[{}]}`, `{"request_id":"r","model_id":"m","kv_handle":"..","seed":1e99}`, `[]`, ``, `{"top_p":null,"stop_token_ids":[-1]}`} {
		f.Add(uint8(0), []byte(body))
		f.Add(uint8(1), []byte(body))
		f.Add(uint8(2), []byte(body))
	}
	paths := []string{"/disagg/prefill", "/disagg/prefill/batch", "/disagg/decode"}
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		var ctx fasthttp.RequestCtx
		ctx.Request.Header.SetMethod("POST")
		ctx.Request.SetRequestURI(paths[int(which)%len(paths)])
		ctx.Request.SetBody(body)
		a.Handler(&ctx)
		code := ctx.Response.StatusCode()
		require.Contains(t, []int{200, 400, 404, 503}, code)
	})
}
