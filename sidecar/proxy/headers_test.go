package proxy

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A header that only one of two HTTP libraries takes must not cost the prefill
// pods their good name.
func TestAClientsHeadersDoNotCountAgainstThePods(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pod := r.pod("p")
	for _, line := range []string{"X A: b", "X-A: b\x80", "X\"A: b", "X-A: b\x7f"} {
		// This proxy or the engine may say 400 to it.
		r.send(strings.Replace(post(completionsPath, long("")), "\r\n", "\r\n"+line+"\r\n", 1))
		r.idle()
	}
	assert.NotEmpty(t, pod.got())
	assert.Equal(t, "0", r.prefills(prefillUnreachable))
}

// What the engine does not say about its answer, the proxy does not make up.
func TestNoHeaderIsMadeUp(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"no type":           "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
		"nothing":           "HTTP/1.1 204 No Content\r\n\r\n",
		"HEAD of a stream":  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
		"HEAD of no length": "HTTP/1.1 200 OK\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(cfg *Config) {
				cfg.Engine = scripted(t, func(c net.Conn, _, _ int, _ string) { says(c, answer) })
			})
			method := "GET"
			if strings.HasPrefix(name, "HEAD") {
				method = "HEAD"
			}
			req, err := http.NewRequest(method, r.url+"/v1/models", nil)
			require.NoError(t, err)
			res, err := client.Do(req)
			require.NoError(t, err)
			_ = res.Body.Close()
			assert.NotContains(t, res.Header, "Content-Type")
			if method == "HEAD" {
				assert.NotContains(t, res.Header, "Content-Length")
			}
			r.idle()
		})
	}
}
