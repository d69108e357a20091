package proxy

import (
	"net/http"
	"strings"

	"github.com/valyala/fasthttp"
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

// copyHeaders copies what goes on to the next server. Host and Content-Length
// are the request's own.
func copyHeaders(to http.Header, from *fasthttp.RequestHeader) {
	connection := string(from.Peek(fasthttp.HeaderConnection))
	for key, value := range from.All() {
		name := http.CanonicalHeaderKey(string(key))
		if name == "Host" || name == "Content-Length" || isHopByHop(name) || named(connection, name) {
			continue
		}
		to[name] = append(to[name], string(value))
	}
	if _, ok := to["User-Agent"]; !ok {
		to["User-Agent"] = nil // net/http would put in its own
	}
}

func deleteHeader(h http.Header, name string) {
	for key := range h {
		if strings.EqualFold(key, name) {
			delete(h, key)
		}
	}
}

// copyAnswerHeaders copies an answer's headers to the client.
func copyAnswerHeaders(to *fasthttp.ResponseHeader, from http.Header) {
	connection := strings.Join(from["Connection"], ",")
	for name, values := range from {
		if name == "Content-Length" || name == loadHeader || isHopByHop(name) || named(connection, name) {
			continue
		}
		for _, v := range values {
			to.Add(name, v)
		}
	}
}
