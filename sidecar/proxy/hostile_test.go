package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

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
