package httpapi

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/sidecar/auth"
)

// open sends the beginning of a request and leaves the rest to the caller.
func (a *api) open(t *testing.T, format string, args ...any) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	_, err = fmt.Fprintf(conn, format, args...)
	require.NoError(t, err)
	return conn
}

func replyOn(t *testing.T, conn net.Conn) (int, map[string]any) {
	t.Helper()
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	var body map[string]any
	require.NoError(t, json.NewDecoder(res.Body).Decode(&body))
	return res.StatusCode, body
}

// TestAnnouncedBodiesTakeNoMemory is not parallel: it looks at the heap.
func TestAnnouncedBodiesTakeNoMemory(t *testing.T) {
	a := newAPI(t, nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const n = 64
	for range n {
		a.open(t, "POST /prefill HTTP/1.1\r\nHost: n1\r\nContent-Length: %d\r\n\r\n%s", MaxBody, strings.Repeat(" ", 10<<10))
	}
	require.Eventually(t, func() bool { return a.InFlight() == n }, 5*time.Second, time.Millisecond)
	runtime.GC()
	runtime.ReadMemStats(&after)
	assert.Less(t, int64(after.HeapAlloc)-int64(before.HeapAlloc), int64(n*128<<10))
	assert.Equal(t, 200, a.do(t, "GET", "/livez", "").code)
}

func TestLargeBodiesUnderWayAreBounded(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	large := strings.Repeat(" ", MaxBody/2+1) // makes room for a body of MaxBody
	var slow []net.Conn
	for range maxBodies/(MaxBody+1) - 1 {
		slow = append(slow, a.open(t, "POST /prefill HTTP/1.1\r\nHost: n1\r\nContent-Length: %d\r\n\r\n%s", MaxBody, large))
	}
	most := func(n int64) bool {
		ok := a.bodies.TryAcquire(n)
		if ok {
			a.bodies.Release(n)
		}
		return ok
	}
	require.Eventually(t, func() bool { return !most(2 * (MaxBody + 1)) }, 10*time.Second, time.Millisecond)
	require.True(t, a.bodies.TryAcquire(MaxBody+1)) // leaves less than another takes
	body := `{"tokens":[1]}` + large
	got := a.do(t, "POST", "/reconstruct", body)
	assert.Equal(t, 503, got.code)
	assert.Equal(t, "busy", got.body["error"])
	assert.NotEmpty(t, got.header.Get("Retry-After"))
	assert.Equal(t, 200, a.do(t, "POST", "/reconstruct", `{"tokens":[1]}`).code, "small bodies go on")
	a.bodies.Release(MaxBody + 1)
	for _, c := range slow {
		require.NoError(t, c.Close())
	}
	require.Eventually(t, func() bool { return most(maxBodies) }, 10*time.Second, time.Millisecond)
	assert.Equal(t, 200, a.do(t, "POST", "/reconstruct", body).code)
}

func TestBodyIsReadAfterTheKey(t *testing.T) {
	t.Parallel()
	key, line, err := auth.Generate("acme", auth.ScopeRead)
	require.NoError(t, err)
	keys, err := auth.ParseKeyfile([]byte(line))
	require.NoError(t, err)
	a := newAPI(t, keys)
	code, body := replyOn(t, a.open(t, "POST /reconstruct HTTP/1.1\r\nHost: n1\r\nContent-Length: %d\r\n\r\n%s", MaxBody, strings.Repeat(" ", 10<<10)))
	assert.Equal(t, 401, code)
	assert.Equal(t, "unauthorized", body["error"])
	assert.Equal(t, 200, a.do(t, "POST", "/reconstruct", `{"tokens":[1]}`, "Authorization", "Bearer "+key).code)
}

func TestOddBodies(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	f := func(request string, code int, name string) {
		t.Helper()
		got, body := replyOn(t, a.open(t, "POST /reconstruct HTTP/1.1\r\nHost: n1\r\n%s", request))
		assert.Equal(t, code, got, "%.80q", request)
		if name != "" {
			assert.Equal(t, name, body["error"], "%.80q", request)
		}
	}
	chunk := func(n int) string { return fmt.Sprintf("%x\r\n%s\r\n", n, strings.Repeat(" ", n)) }
	f("Transfer-Encoding: chunked\r\n\r\ne\r\n{\"tokens\":[1]}\r\n0\r\n\r\n", 200, "")
	f("Transfer-Encoding: chunked\r\n\r\n"+chunk(MaxBody)+chunk(1)+"0\r\n\r\n", 413, "too_large")
	f("Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400, "bad_request")
	f("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400, "bad_request")
	f("Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 5\r\n\r\n--x\r\n", 400, "bad_request")
	f("Content-Length: 0\r\n\r\n", 400, "bad_request")
	f("\r\n", 400, "bad_request")
}
