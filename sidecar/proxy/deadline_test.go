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
)

// A client may keep its connection, and an engine may think, for longer than a
// client may take to accept a part of an answer.
func TestAnAnswerMayComeLongAfterTheOneBefore(t *testing.T) {
	t.Parallel()
	const short = 100 * time.Millisecond
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
