package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/sidecar/auth"
)

// send writes a request as it stands and returns the answer.
func (r *rig) send(text string) reply {
	r.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	require.NoError(r.t, err)
	defer func() { _ = c.Close() }()
	_, err = io.WriteString(c, text)
	require.NoError(r.t, err)
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(r.t, err)
	defer func() { _ = res.Body.Close() }()
	b, _ := io.ReadAll(res.Body)
	return reply{res.StatusCode, res.Header, string(b)}
}

func post(target, body string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", target, len(body), body)
}

// An engine decodes its path, so that each of these is the completion route to it.
func TestNoSpellingOfARouteKeepsACacheSalt(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, target := range []string{
		"/v1/%63ompletions", "/v1%2Fcompletions", "/%76%31/chat/completions", "/v1/chat%2fcompletions", "http://h/v1/%63ompletions", "HTTP://h/v1/completions",
		"/v1/completions?x=//a/b", "/v1/completions?x=http://a/b", "/v1/completions?a#//c/d", "//v1/completions", "/v1//completions", "/v1/./completions", "/v1/x/../completions",
		"/v1/completions/", "http://h/v1/completions?x=//a/b", "/v1/completions#//c/d", "/v1/%2563ompletions", "/V1/Completions", "x://h@/v1/completions", "///v1/completions",
	} {
		got := r.send(post(target, `{"prompt":"a","messages":[],"cache_salt":"stolen"}`))
		if got.status != 200 {
			assert.Equal(t, 400, got.status, target)
			continue
		}
		all := r.engine.got()
		assert.Len(t, all[len(all)-1].field(t, "cache_salt"), 64, target)
	}
	r.idle()
}

func TestNoSpellingOfARouteNeedsLessThanAdmin(t *testing.T) {
	t.Parallel()
	key, line, err := auth.Generate("acme", auth.ScopeRead|auth.ScopeWrite)
	require.NoError(t, err)
	keys, err := auth.ParseKeyfile([]byte(line + "\n"))
	require.NoError(t, err)
	r := newRig(t, func(c *Config) { c.Keys = keys })
	for _, target := range []string{
		"/reset", "/v1/../reset", "/v1/%2e%2e/reset", "/v1%2f..%2freset", "/v1/%252e%252e/reset", "/%76%31/..//reset", "http://h/v1/../reset", "http://v1/reset", "/reset?x=//h/v1/a", "/reset?x=http://h/v1/a",
		"/reset#//h/v1/a", "/reset%3f/v1/", "/reset/..;/v1", "//v1/../reset", "/v1", "/v1/..", "*", "http://h", "/\\..\\v1/a", "//h/health?", "/health/../reset", "/health%2f..%2freset",
	} {
		for _, host := range []string{"h", ""} {
			got := r.send("GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\nAuthorization: Bearer " + key + "\r\n\r\n")
			assert.Contains(t, []int{400, 403}, got.status, "%s, host %q", target, host)
		}
	}
	assert.Empty(t, r.engine.got())
	r.idle()
}

// accepting gives each connection to the function, which closes it by returning.
func accepting(t *testing.T, serve func(c net.Conn, connection int)) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				serve(c, n)
			}()
		}
	}()
	return "http://" + l.Addr().String()
}

// scripted answers each connection with what the function writes for each request.
func scripted(t *testing.T, serve func(c net.Conn, connection, request int, body string)) (url string) {
	t.Helper()
	return accepting(t, func(c net.Conn, n int) {
		in := bufio.NewReader(c)
		for i := 0; ; i++ {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			b, _ := io.ReadAll(req.Body)
			serve(c, n, i, string(b))
		}
	})
}

func says(c net.Conn, text string) { _, _ = io.WriteString(c, text) }

// What an engine says beyond its answer must never be the answer to somebody
// else's request.
func TestNoAnswerIsThatOfAnotherRequest(t *testing.T) {
	t.Parallel()
	const secret = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret"
	for name, first := range map[string]string{
		"a second answer":       "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + secret,
		"after chunks":          "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + secret,
		"after trailers":        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n2\r\nok\r\n0\r\nX: 1\r\n\r\n" + secret,
		"a body behind 204":     "HTTP/1.1 204 No Content\r\nContent-Length: 69\r\n\r\n" + secret,
		"a body behind 304":     "HTTP/1.1 304 Not Modified\r\n\r\n" + secret,
		"another protocol":      "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n" + secret,
		"lengths that differ":   "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 50\r\n\r\nok" + secret,
		"a length and chunks":   "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + secret,
		"HTTP/1.0 and a length": "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok" + secret,
		"hints":                 "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + secret,
		"no length":             "HTTP/1.1 200 OK\r\n\r\nok",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(cfg *Config) {
				cfg.Engine = scripted(t, func(c net.Conn, _, _ int, body string) {
					if strings.Contains(body, "first") {
						says(c, first)
						if strings.Contains(first, "200 OK\r\n\r\nok") {
							_ = c.Close()
						}
						return
					}
					says(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nright")
				})
			})
			got := r.send(post(completionsPath, `{"prompt":"first"}`))
			t.Log(got)
			r.idle()
			for range 3 {
				got := r.do("POST", completionsPath, `{"prompt":"second"}`)
				assert.Equal(t, 200, got.status)
				assert.Equal(t, "right", got.body)
				r.idle()
			}
		})
	}
}

// A request of which the engine has answered a part is not sent again.
func TestARequestIsNotSentTwiceOnceItWasAnswered(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"H", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1"} {
		var mu sync.Mutex
		sent := 0
		r := newRig(t, func(cfg *Config) {
			cfg.Engine = scripted(t, func(c net.Conn, _, _ int, body string) {
				if !strings.Contains(body, "second") {
					says(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
					return
				}
				mu.Lock()
				defer mu.Unlock()
				sent++
				says(c, part)
				_ = c.Close()
			})
		})
		require.Equal(t, 200, r.do("POST", completionsPath, `{"prompt":"first"}`).status)
		r.idle()
		assert.Equal(t, 502, r.do("POST", completionsPath, `{"prompt":"second"}`).status)
		r.idle()
		mu.Lock()
		assert.Equal(t, 1, sent, "%q", part)
		mu.Unlock()
	}
}

func TestAnAnswersHeadMayBeAsLongAsARequests(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.engine.answers(func(w http.ResponseWriter, req *http.Request, _ []byte) { // as vLLM does if asked to
		w.Header().Set("X-Request-Id", req.Header.Get("X-Request-Id"))
		_, _ = io.WriteString(w, "{}")
	})
	id := strings.Repeat("i", MaxHeaders-1024)
	got := r.do("POST", completionsPath, `{"prompt":"x"}`, "X-Request-Id", id)
	assert.Equal(t, 200, got.status)
	assert.Equal(t, id, got.header.Get("X-Request-Id"))
	r.idle()
}

// However a client frames its body, the engine sees no request inside it.
func TestNoRequestIsSmuggledInABody(t *testing.T) {
	t.Parallel()
	const inner = "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
	chunk := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(inner), inner)
	for _, path := range []string{"/v1/embeddings", completionsPath} {
		for _, head := range []string{
			"Content-Length: 5\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nContent-Length: 5", "Content-Length: 5\r\nContent-Length: 500", "Content-Length: 500\r\nContent-Length: 5",
			"Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, identity", "Transfer-Encoding: identity", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
			"Transfer-Encoding : chunked", "Transfer-Encoding\t: chunked", "Transfer-Encoding:\x0bchunked", "Transfer-Encoding: \"chunked\"", " Transfer-Encoding: chunked", "X: y\n Transfer-Encoding: chunked",
			"X: y\r\n\tContent-Length: 5", "Content-Length: +5", "Content-Length: 5, 5", "Content-Length: -1", "Content-Length: 0x5", "Content-Length: 5\r\nConnection: Content-Length", "Content-Length:",
			"Transfer-Encoding: chunked\r\nConnection: Transfer-Encoding", "Content-Length: 99999999999999999999", "Content_Length: 5", "X: a\rTransfer-Encoding: chunked", "X: a\nTransfer-Encoding: chunked",
			"Content-Length: 0\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue", "Content-Length : 5", "Content-Length\x00: 5", "Content-Length: 5\r\nUpgrade: h2c\r\nConnection: upgrade, HTTP2-Settings", "X: y",
		} {
			for _, body := range []string{chunk, inner + inner, "0\r\n\r\n" + inner, "5;ext=\"\r\n\"\r\n{....\r\n0\r\nContent-Length: 3\r\n\r\n" + inner, "ffffffffffffffff1\r\n" + inner, "0x5\r\n" + inner, "-5\r\n" + inner, "5 \r\n" + inner} {
				var mu sync.Mutex
				var bad []string
				r := newRig(t, func(cfg *Config) {
					cfg.Engine = scriptedRequests(t, func(req *http.Request) {
						mu.Lock()
						defer mu.Unlock()
						if req.URL.Path != path {
							bad = append(bad, req.URL.Path)
						}
					})
				})
				r.raw("POST " + path + " HTTP/1.1\r\nConnection: close\r\nHost: h\r\nA: b\r\n" + head + "\r\n\r\n" + body)
				r.idle()
				mu.Lock()
				assert.Empty(t, bad, "%q %q", head, body)
				mu.Unlock()
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				_ = r.server.Close(ctx)
			}
		}
	}
}

func (r *rig) raw(text string) {
	c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	require.NoError(r.t, err)
	defer func() { _ = c.Close() }()
	_, _ = io.WriteString(c, text)
	_ = c.(*net.TCPConn).CloseWrite()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, _ = io.Copy(io.Discard, c)
}

func scriptedRequests(t *testing.T, see func(*http.Request)) string {
	t.Helper()
	return accepting(t, func(c net.Conn, _ int) {
		in := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			see(req)
			_, _ = io.Copy(io.Discard, req.Body)
			says(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	})
}

func TestEveryConnectionHeaderNamesWhatEndsHere(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.engine.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header()["Connection"] = []string{"X-C", "X-D"}
		w.Header().Set("X-C", "no")
		w.Header().Set("X-D", "no")
		_, _ = io.WriteString(w, "{}")
	})
	got := r.do("GET", "/v1/models", "", "Connection", "X-A", "Connection", "x-b , close", "X-A", "no", "X-B", "no", "Keep-Alive", "no")
	for _, name := range []string{"X-A", "X-B", "Keep-Alive", "Connection"} {
		assert.Empty(t, r.engine.got()[0].header.Values(name), name)
	}
	assert.Empty(t, got.header.Values("X-C"))
	assert.Empty(t, got.header.Values("X-D"))
	r.idle()
}

// An HTTP/1.0 client knows no chunks: the end of the connection ends its answer,
// and one that the engine cuts has no end that looks like one.
func TestAStreamForAnOldClientHasNoChunks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ask := func() (string, error) {
		c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		body := `{"prompt":"x","stream":true}`
		_, err = fmt.Fprintf(c, "POST %s HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%s", completionsPath, len(body), body)
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		all, err := io.ReadAll(c)
		r.idle()
		return string(all), err
	}
	all, err := ask()
	require.NoError(t, err)
	head, body, _ := strings.Cut(all, "\r\n\r\n")
	assert.Contains(t, head, "HTTP/1.1 200 OK\r\n")
	assert.Contains(t, head, "Connection: close")
	assert.NotContains(t, strings.ToLower(head), "chunked")
	assert.True(t, strings.HasPrefix(body, "data: {"), all)
	assert.True(t, strings.HasSuffix(body, "}\n\ndata: [DONE]\n\n"), all)
	assert.Equal(t, "0", r.metric("membrane_proxy_answers_cut_total"))

	r.engine.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	_, err = ask()
	require.ErrorIs(t, err, syscall.ECONNRESET)
	assert.Equal(t, "1", r.metric("membrane_proxy_answers_cut_total"))

	// The client goes away.
	r.engine.answers(func(w http.ResponseWriter, req *http.Request, _ []byte) {
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	})
	c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	require.NoError(t, err)
	_, err = fmt.Fprintf(c, "GET /v1/models HTTP/1.0\r\n\r\n")
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return r.engine.aborted.Load() == 1 }, patience, tick)
	r.idle()
}

// Connections from one address that never say anything must not take all of
// those that others need.
func TestOneAddressCannotTakeEveryConnection(t *testing.T) {
	t.Parallel()
	const most = 4 // half of the connections
	r := newRig(t, func(c *Config) { c.MaxInFlight = most / 2 })
	dial := func(from string) net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: patience}
		c, err := d.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	health := func(c net.Conn) string {
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		line, _ := bufio.NewReader(c).ReadString('\n')
		return line
	}
	for range most {
		_, err := io.WriteString(dial("127.0.0.2"), "GET /hea")
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return strings.Contains(health(dial("127.0.0.2")), " 429 ") }, patience, tick)
	assert.Contains(t, health(dial("127.0.0.3")), " 200 ")
}
