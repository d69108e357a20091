package proxy

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
)

// writeTimeout is how long a client may take to accept a part of an answer.
const writeTimeout = 30 * time.Second

// newTransport returns connections to engines. They are given up before uvicorn,
// which waits five seconds for a next request, closes them: a request that is
// sent at that moment could not be sent again.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:        (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		DisableCompression: true, // bytes pass as they are
		MaxIdleConns:       0, MaxIdleConnsPerHost: 1024, IdleConnTimeout: 4 * time.Second,
		MaxResponseHeaderBytes: 64 << 10, ForceAttemptHTTP2: false,
	}
}

// target returns the client's request target for the engine, byte by byte.
func (s *Server) target(c *fasthttp.RequestCtx) *url.URL {
	raw := string(c.Request.Header.RequestURI())
	if i := strings.Index(raw, "://"); i >= 0 && !strings.HasPrefix(raw, "/") { // absolute form
		raw = raw[i+3:]
		if i = strings.IndexAny(raw, "/?"); i < 0 {
			raw = "/"
		} else {
			raw = raw[i:]
		}
	}
	path, query, has := strings.Cut(raw, "?")
	if strings.HasPrefix(path, "//") { // else it would be read as a host
		path = "//" + s.engine.Host + path
	}
	return &url.URL{Scheme: s.engine.Scheme, Host: s.engine.Host, Opaque: path, RawQuery: query, ForceQuery: has && query == ""}
}

// forward sends the request to the engine and makes its answer the client's.
// flight ends when the last byte is written, or here when there is no answer.
func (s *Server) forward(ctx context.Context, f *flight, body io.Reader, length int64) {
	c := f.c
	req := (&http.Request{
		Method: string(c.Method()), URL: s.target(c), Host: string(c.Host()), Header: make(http.Header, 16),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: length,
	}).WithContext(ctx)
	if body != nil {
		req.Body = io.NopCloser(body)
	}
	if b, ok := body.(*bytes.Reader); ok { // it can be sent again where the connection was closed meanwhile
		whole := *b
		req.GetBody = func() (io.ReadCloser, error) {
			again := whole
			return io.NopCloser(&again), nil
		}
	}
	copyHeaders(req.Header, &c.Request.Header)
	deleteHeader(req.Header, prefillerHeader)
	if s.cfg.Keys != nil {
		delete(req.Header, fasthttp.HeaderAuthorization)
	}
	if f.id != "" {
		req.Header.Set(requestIDHeader, f.id)
	}
	res, err := s.engineTransport.RoundTrip(req)
	if err != nil {
		if ctx.Err() != nil {
			s.abandoned(f)
		} else {
			s.count.engineDown.Inc()
			s.strange.Warn().Err(err).Str("engine", s.cfg.Engine).Msg("the engine cannot be reached")
			unavailable(c, http.StatusBadGateway, "engine_unreachable", "the engine of this pod cannot be reached")
		}
		f.end()
		return
	}
	c.Response.Header.DisableNormalizing()
	c.Response.SetStatusCode(res.StatusCode)
	copyAnswerHeaders(&c.Response.Header, res.Header)
	if f.leg == prefillLeg {
		c.Response.Header.Set(loadHeader, s.inFlightText())
	}
	if string(c.Method()) == http.MethodHead || res.StatusCode == http.StatusNoContent || res.StatusCode == http.StatusNotModified {
		c.Response.SkipBody = true
		c.Response.Header.SetContentLength(int(max(res.ContentLength, 0)))
		_ = res.Body.Close()
		f.end()
		return
	}
	c.Response.ImmediateHeaderFlush = res.ContentLength < 0
	c.Response.SetBodyStream(&answer{s: s, f: f, body: res.Body, conn: c.Conn()}, int(res.ContentLength))
}

// abandoned notes that the client has gone, or that this node ends at once. What
// is answered then is read by nobody, or says so.
func (s *Server) abandoned(f *flight) {
	if s.ctx.Err() == nil {
		s.count.gone.Inc()
		f.c.SetStatusCode(499) // nginx's number for it
		f.c.SetConnectionClose()
		return
	}
	unavailable(f.c, http.StatusServiceUnavailable, "stopping", "this node is stopping")
}

// flight is one request from its head to the last byte of its answer.
type flight struct {
	s     *Server
	c     *fasthttp.RequestCtx
	route route
	leg   leg
	id    string // X-Request-Id where this node gives one
	began time.Time
	stop  func() // of the watch on the client's connection
	taken int64  // of s.bodies
	up    *upload
	ended atomic.Bool
}

func (f *flight) end() {
	if f.ended.Swap(true) {
		return
	}
	f.stop()
	if f.up != nil {
		f.up.detach()
	}
	f.s.bodies.Release(f.taken)
	f.s.inFlight.Add(-1)
	f.s.count.answered(f.route, f.c.Response.StatusCode(), f.began)
}

// rescue ends the flight of a handler that panics, which goes on.
func (f *flight) rescue() {
	if p := recover(); p != nil {
		f.end()
		panic(p) //nolint:forbidigo // the handler around answers it
	}
}

// answer is the engine's, on its way to the client. Read returns what has come.
type answer struct {
	s    *Server
	f    *flight
	body io.ReadCloser
	conn net.Conn
	err  error
}

// Read reads the next part and gives the client time to take it.
func (a *answer) Read(p []byte) (int, error) {
	n, err := a.body.Read(p)
	if n > 0 {
		_ = a.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	}
	if err != nil {
		a.err = err
	}
	return n, err
}

// Close ends the request to the engine, wherever its answer is.
func (a *answer) Close() error {
	if a.err != io.EOF { //nolint:errorlint // Read's contract: the value itself
		a.s.count.cut.Inc()
	}
	err := a.body.Close()
	a.f.end()
	return err
}
