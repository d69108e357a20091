package proxy

import (
	"bytes"
	"path"
	"strings"

	"github.com/valyala/fasthttp"
)

// pathOf returns where a request target leads, however it is spelled: engines
// decode a path, and what is in front of them or inside may decode it again,
// merge slashes, or resolve dots. What is read and what a key may do must not
// depend on the spelling, since the target goes on as the client wrote it.
func pathOf(target []byte) string {
	if i := bytes.Index(target, []byte("://")); i >= 0 && bytes.IndexByte(target[:i], '/') < 0 {
		target = target[i+len("://"):]
		at := bytes.IndexAny(target, "/?#")
		if at < 0 {
			return "/"
		}
		target = target[at:]
	}
	if i := bytes.IndexAny(target, "?#"); i >= 0 {
		target = target[:i]
	}
	text := string(target)
	if !strings.Contains(text, "%") && path.Clean(text) == text {
		return text
	}
	for range maxDecodings {
		next := decoded(text)
		if next == text {
			break
		}
		text = next
	}
	return path.Clean("/" + text)
}

// maxDecodings is more than there are servers in a row.
const maxDecodings = 8

// decoded resolves %XX and leaves alone what is none.
func decoded(text string) string {
	if !strings.Contains(text, "%") {
		return text
	}
	out := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if text[i] == '%' && i+2 < len(text) {
			high, low := hexDigit(text[i+1]), hexDigit(text[i+2])
			if high >= 0 && low >= 0 {
				out = append(out, byte(high<<4|low))
				i += 2
				continue
			}
		}
		out = append(out, text[i])
	}
	return string(out)
}

func hexDigit(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	default:
		return -1
	}
}

// serve routes a request. The router of other ports would compare the path as it
// is spelled.
func (s *Server) serve(c *fasthttp.RequestCtx) {
	at := pathOf(c.Request.Header.RequestURI())
	switch {
	case c.IsPost() && strings.EqualFold(at, completionsPath):
		s.complete(c, completions)
	case c.IsPost() && strings.EqualFold(at, chatPath):
		s.complete(c, chat)
	case c.IsGet() && at == healthPath:
		s.health(c)
	default:
		s.pass(c, at)
	}
}
