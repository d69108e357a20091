package proxy

import (
	"bufio"
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
)

// A client may keep its connection, and an engine may think, for longer than a
// client may take to accept a part of an answer.
func TestAnAnswerMayComeLongAfterTheOneBefore(t *testing.T) {
	t.Parallel()
	const short = time.Second // a loaded machine may take its time between two lines
	r := newRig(t, func(c *Config) { c.writeTimeout = short })
	later := func() { <-time.After(3 * short) }
	r.engine.answers(func(w http.ResponseWriter, q *http.Request, _ []byte) {
		switch q.Header.Get("X-Case") {
		case "late head":
			later()
		case "no body":
			w.WriteHeader(http.StatusNoContent)
			return
		}
		_, _ = io.WriteString(w, "a")
		w.(http.Flusher).Flush()
		if q.Header.Get("X-Case") == "late end" {
			later()
		}
	})
	for _, c := range []struct {
		name, body string
		status     int
		idle       bool
	}{
		{"stream", `{"prompt":"a"}`, http.StatusOK, true},
		{"no body", `{"prompt":"a"}`, http.StatusNoContent, true},
		{"refused", `[]`, http.StatusBadRequest, true},
		{"late head", `{"prompt":"a"}`, http.StatusOK, false},
		{"late end", `{"prompt":"a"}`, http.StatusOK, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
			require.NoError(t, err)
			defer func() { _ = conn.Close() }()
			require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
			in := bufio.NewReader(conn)
			ask := func(name, body string) (int, string) {
				_, err := fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Case: %s\r\nContent-Length: %d\r\n\r\n%s", name, len(body), body)
				require.NoError(t, err)
				res, err := http.ReadResponse(in, nil)
				require.NoError(t, err)
				b, err := io.ReadAll(res.Body)
				require.NoError(t, err)
				return res.StatusCode, string(b)
			}
			status, _ := ask("first", `{"prompt":"a"}`)
			require.Equal(t, http.StatusOK, status)
			if c.idle {
				later()
			}
			status, _ = ask(c.name, c.body)
			assert.Equal(t, c.status, status)
		})
	}
}

// An answer of known length whose client takes no more ends at once, also where
// the engine stands in the middle of it.
func TestAnAnswerEndsWhereItsEngineStands(t *testing.T) {
	t.Parallel()
	done := make(chan struct{})
	defer close(done)
	r := newRig(t, func(c *Config) {
		c.Engine = scripted(t, func(c net.Conn, _, _ int, _ string) {
			says(c, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab")
			<-done
		})
	})
	var req fasthttp.Request
	req.SetRequestURI(r.server.cfg.Engine + "/v1/files")
	x, err := r.server.pool.send(t.Context(), &req)
	require.NoError(t, err)
	near, far := net.Pipe()
	defer func() { _, _ = near.Close(), far.Close() }()
	r.server.inFlight.Add(1)
	f := &flight{s: r.server, c: new(fasthttp.RequestCtx), began: time.Now(), stop: func() {}}
	a := &answer{s: r.server, f: f, x: x, conn: near}
	_, err = io.ReadFull(a, make([]byte, 2))
	require.NoError(t, err)
	go func() { _ = a.Close() }()
	r.idle()
}
