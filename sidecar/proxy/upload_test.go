package proxy

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A streamed body is gone once it has been written: sending its request again
// would send it without.
func TestAStreamedBodyIsNotSentAgainWithoutItself(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var bodies []string
	r := newRig(t, func(cfg *Config) {
		cfg.Engine = scripted(t, func(c net.Conn, _, request int, body string) {
			mu.Lock()
			bodies = append(bodies, body)
			mu.Unlock()
			if request > 0 { // it has closed the connection that was idle
				_ = c.Close()
				return
			}
			says(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		})
	})
	require.Equal(t, 200, r.do("GET", "/v1/models", "").status)
	r.idle()
	got := r.do("POST", "/v1/embeddings", `{"input":"a"}`)
	assert.Equal(t, 502, got.status)
	r.idle()
	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, []string{"", `{"input":"a"}`}, bodies)
}

// What an engine says before it has read all of a body is its answer, though it
// closes the connection.
func TestAnEngineMayRefuseABodyBeforeItHasReadIt(t *testing.T) {
	t.Parallel()
	engine := accepting(t, func(c net.Conn, _ int) { // which is reset: there is more to read
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			says(c, "HTTP/1.1 413 No\r\nContent-Length: 8\r\n\r\ntoo long")
		}
	})
	r := newRig(t, func(cfg *Config) { cfg.Engine = engine })
	for _, path := range []string{completionsPath, "/v1/embeddings"} {
		text := post(path, `{"prompt":"`+strings.Repeat("a", 8<<20)+`"}`)
		c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		require.NoError(t, err)
		go func() { _, _ = io.WriteString(c, text) }()
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		b := make([]byte, 8)
		_, err = io.ReadFull(res.Body, b)
		require.NoError(t, err)
		assert.Equal(t, 413, res.StatusCode, path)
		assert.Equal(t, "too long", string(b))
		_ = c.Close()
		r.idle()
	}
	assert.Equal(t, "0", r.metric("membrane_proxy_engine_unreachable_total"))
}

// A client that does not send what it has announced is told so; the engine is
// not at fault.
func TestAnUploadThatFailsIsTheClientsFault(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	got := r.send("POST /v1/embeddings HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n")
	assert.Equal(t, 400, got.status)
	assert.Contains(t, got.body, "not chunked as it says")
	r.idle()
	assert.Equal(t, "0", r.metric("membrane_proxy_engine_unreachable_total"))
	assert.Equal(t, "1", r.metric(`membrane_proxy_refused_total{why="bad_body"}`))
}

// Only a part that does not come ends an upload, however long the whole takes.
func TestAnUploadMayTakeLong(t *testing.T) {
	t.Parallel()
	const most = 2 * time.Second // a loaded machine may take its time between two lines
	r := newRig(t, func(c *Config) { c.readTimeout = most })
	c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	in := bufio.NewReader(c)
	says(c, "POST /v1/files HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
	for range 8 {
		<-time.After(most / 5)
		says(c, "4\r\npart\r\n")
	}
	says(c, "0\r\n\r\n")
	res, err := http.ReadResponse(in, nil)
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, res.Body)
	assert.Equal(t, 200, res.StatusCode)
	assert.Equal(t, strings.Repeat("part", 8), string(r.engine.got()[0].body))

	says(c, "POST /v1/files HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n")
	res, err = http.ReadResponse(in, nil)
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 408, res.StatusCode)
	r.idle()
}
