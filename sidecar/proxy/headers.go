package proxy

import (
	"bytes"
	"net/http"
	"strings"

	"github.com/valyala/fasthttp"
	"golang.org/x/net/http/httpguts"
)

const requestIDHeader = "X-Request-Id"

// hopByHop are the headers that are about one connection (RFC 9110, §7.6.1).
// Expect is answered by this node.
var hopByHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Trailers", "Transfer-Encoding", "Upgrade", "Expect",
}

func isHopByHop(name string) bool {
	for _, h := range hopByHop {
		if strings.EqualFold(h, name) {
			return true
		}
	}
	return false
}

// named reports whether a header is one of those that Connection names.
func named(connection, name string) bool {
	if connection == "" {
		return false
	}
	for one := range strings.SplitSeq(connection, ",") {
		if strings.EqualFold(strings.TrimSpace(one), name) {
			return true
		}
	}
	return false
}

// connectionOf joins the headers that say which others are about one connection.
func connectionOf(lines [][]byte) string { return string(bytes.Join(lines, []byte(","))) }

// copyHeaders copies the head of a request that goes on to the next server.
func copyHeaders(to, from *fasthttp.RequestHeader) {
	connection := connectionOf(from.PeekAll(fasthttp.HeaderConnection))
	to.SetNoDefaultContentType(true)
	to.SetMethodBytes(from.Method())
	to.SetRequestURIBytes(from.RequestURI()) // as the client wrote it
	for key, value := range from.All() {
		if name := string(key); name != fasthttp.HeaderContentLength && !isHopByHop(name) && !named(connection, name) {
			to.AddBytesKV(key, value)
		}
	}
}

// legHeaders are those of a request that a prefill pod gets, too.
func legHeaders(from *fasthttp.RequestHeader) http.Header {
	var part fasthttp.RequestHeader
	copyHeaders(&part, from)
	to := make(http.Header)
	for key, value := range part.All() {
		switch name := string(key); name {
		case "Host", http.CanonicalHeaderKey(prefillerHeader), http.CanonicalHeaderKey(cacheSourceHeader), "Accept-Encoding":
		default:
			// net/http sends no request at all with one that it does not like,
			// which would count against the pod.
			if httpguts.ValidHeaderFieldName(name) && httpguts.ValidHeaderFieldValue(string(value)) {
				to[name] = append(to[name], string(value))
			}
		}
	}
	to.Set("Content-Type", "application/json")
	return to
}

// copyAnswerHeaders copies an answer's headers to the client.
func copyAnswerHeaders(to, from *fasthttp.ResponseHeader) {
	connection := connectionOf(from.PeekAll(fasthttp.HeaderConnection))
	for key, value := range from.All() {
		if name := string(key); name != fasthttp.HeaderContentLength && name != loadHeader && !isHopByHop(name) && !named(connection, name) {
			to.AddBytesKV(key, value)
		}
	}
}
