package httpapi

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/kvwire"
	"membrane/sidecar/auth"
)

const (
	requestIDHeader = "X-Request-ID"
	maxRequestID    = 128
)

// handler answers a request of a known caller.
type handler func(c *fasthttp.RequestCtx, who auth.Identity)

// wrap gives a route what all have: a request id, counters, a log line, the
// check of the credential, and an answer when the handler panics, for which
// fasthttp would end the process. Scope 0 needs no credential.
func (s *Server) wrap(name string, need auth.Scope, h handler) fasthttp.RequestHandler {
	e := s.endpoint(name)
	return func(c *fasthttp.RequestCtx) {
		began := time.Now()
		s.inFlight.Add(1)
		defer s.inFlight.Add(-1) // last: who sees it ended sees it counted
		id := requestID(c)
		defer func() {
			if p := recover(); p != nil {
				s.cfg.Log.Error().Interface("panic", p).Str("request_id", id).Bytes("stack", debug.Stack()).Msg("a request failed")
				c.Response.ResetBody()
				fail(c, http.StatusInternalServerError, "internal", "", "the sidecar failed; its log has the request id")
			}
			e.count(c, began)
			if line := s.cfg.Log.Debug(); line.Enabled() {
				line.Str("request_id", id).Bytes("method", c.Method()).Str("endpoint", name).
					Int("status", c.Response.StatusCode()).Dur("took", time.Since(began)).Msg("request")
			}
		}()
		who := auth.Anonymous()
		if need != 0 && s.cfg.Keys != nil {
			var ok bool
			if who, ok = s.identify(c); !ok {
				c.Response.Header.Set("WWW-Authenticate", "Bearer")
				fail(c, http.StatusUnauthorized, "unauthorized", "", "an API key is needed: Authorization: Bearer KEY")
				return
			}
			if !who.Scopes.Allows(need) {
				forbid(c, need)
				return
			}
		}
		h(c, who)
	}
}

func forbid(c *fasthttp.RequestCtx, need auth.Scope) {
	fail(c, http.StatusForbidden, "forbidden", "", fmt.Sprintf("this needs a key with the scope %s", need))
}

func (s *Server) identify(c *fasthttp.RequestCtx) (auth.Identity, bool) {
	scheme, key, _ := strings.Cut(string(c.Request.Header.Peek("Authorization")), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return auth.Identity{}, false
	}
	return s.cfg.Keys.Lookup(strings.TrimSpace(key))
}

// requestID returns the caller's request id if it is well formed, else a new
// one, and puts it into the answer.
func requestID(c *fasthttp.RequestCtx) string {
	id := string(c.Request.Header.Peek(requestIDHeader))
	if !wellFormed(id) {
		id = newRequestID(time.Now())
	}
	c.Response.Header.Set(requestIDHeader, id)
	return id
}

func wellFormed(id string) bool {
	if id == "" || len(id) > maxRequestID {
		return false
	}
	for _, r := range []byte(id) {
		if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r == '.') {
			return false
		}
	}
	return true
}

// newRequestID returns a UUID of version 7 (RFC 9562): they sort by time.
func newRequestID(now time.Time) string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	ms := now.UnixMilli()
	for i := range 6 {
		b[i] = byte(ms >> (40 - 8*i))
	}
	b[6] = b[6]&0x0f | 0x70
	b[8] = b[8]&0x3f | 0x80
	var text [36]byte
	t := hex.AppendEncode(text[:0], b[:4])
	for _, part := range [][]byte{b[4:6], b[6:8], b[8:10], b[10:]} {
		t = hex.AppendEncode(append(t, '-'), part)
	}
	return string(t)
}

// problem is the body of an error.
type problem struct {
	Error  string `json:"error"`
	Field  string `json:"field,omitempty"`
	Detail string `json:"detail"`
}

func fail(c *fasthttp.RequestCtx, code int, name, field, detail string) {
	c.Response.SetStatusCode(code)
	write(c, problem{name, field, detail})
}

// unavailable is a fail that says when to try again.
func unavailable(c *fasthttp.RequestCtx, name, detail string, after time.Duration) {
	c.Response.Header.Set("Retry-After", strconv.Itoa(int(after.Seconds())))
	fail(c, http.StatusServiceUnavailable, name, "", detail)
}

// failWith answers an error of a service.
func (s *Server) failWith(c *fasthttp.RequestCtx, err error) {
	var e *kvwire.Error
	if !errors.As(err, &e) {
		s.cfg.Log.Error().Err(err).Bytes("request_id", c.Response.Header.Peek(requestIDHeader)).Msg("a request failed")
		fail(c, http.StatusInternalServerError, "internal", "", "the sidecar failed; its log has the request id")
		return
	}
	switch e.Code {
	case kvwire.CodeBadField, kvwire.CodeTooLarge:
		fail(c, http.StatusUnprocessableEntity, e.Code.String(), e.Field, e.Message)
	case kvwire.CodeBusy, kvwire.CodeDraining:
		unavailable(c, e.Code.String(), e.Message, time.Second)
	default:
		fail(c, http.StatusInternalServerError, e.Code.String(), e.Field, e.Message)
	}
}

func answer(c *fasthttp.RequestCtx, v any) {
	c.Response.SetStatusCode(http.StatusOK)
	write(c, v)
}

func write(c *fasthttp.RequestCtx, v any) {
	b, err := json.Marshal(v)
	send(c, b, err)
}

func pretty(c *fasthttp.RequestCtx, v any) {
	b, err := json.MarshalIndent(v, "", "  ")
	send(c, append(b, '\n'), err)
}

func send(c *fasthttp.RequestCtx, body []byte, err error) {
	if err != nil { // a number that JSON does not have
		c.Response.SetStatusCode(http.StatusInternalServerError)
		body = []byte(`{"error":"internal","detail":"the answer has no JSON form"}`)
	}
	c.Response.Header.SetContentType("application/json")
	c.Response.SetBodyRaw(body)
}

func clip(s string) string {
	if len(s) > 100 {
		return s[:100] + "…"
	}
	return s
}
