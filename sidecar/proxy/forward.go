package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
)

// writeTimeout is how long a client may take to accept a part of an answer.
const writeTimeout = 30 * time.Second

// forward sends the request to the engine and makes its answer the client's.
// The flight ends when the last byte is written, or here when there is no
// answer. The body is whole, or streamed as the client's own.
func (s *Server) forward(ctx context.Context, f *flight, whole []byte, stream io.Reader, length int) {
	c := f.c
	var req fasthttp.Request
	copyHeaders(&req.Header, &c.Request.Header)
	req.Header.Del(prefillerHeader)
	if len(req.Header.Host()) == 0 {
		req.Header.SetHost(s.engine.Host)
	}
	if s.cfg.Keys != nil {
		req.Header.Del(fasthttp.HeaderAuthorization)
	}
	if f.id != "" {
		req.Header.Set(requestIDHeader, f.id)
	}
	var sent *upload
	if stream != nil {
		sent = &upload{s: s, c: c, from: stream}
		req.SetBodyStream(sent, length)
	} else {
		req.SetBodyRaw(whole)
	}
	x, err := s.pool.send(ctx, &req)
	if err != nil {
		switch {
		case ctx.Err() != nil:
			s.abandoned(f)
		case sent != nil && sent.err != nil:
			s.refuseBody(f, sent.err)
			return
		default:
			s.count.engineDown.Inc()
			s.strange.Warn().Err(err).Str("engine", s.cfg.Engine).Msg("the engine cannot be reached")
			unavailable(c, http.StatusBadGateway, "engine_unreachable", "the engine of this pod cannot be reached")
		}
		f.end()
		return
	}
	c.Response.SetStatusCode(x.res.StatusCode())
	copyAnswerHeaders(&c.Response.Header, &x.res.Header)
	if f.leg == prefillLeg {
		c.Response.Header.Set(loadHeader, s.inFlightText())
	}
	if x.body == nil { // HEAD, or a status without a body
		c.Response.SkipBody = true
		if size := x.res.Header.ContentLength(); size >= 0 || c.Request.Header.IsHTTP11() {
			c.Response.Header.SetContentLength(max(size, -1)) // of what a GET would get
		}
		x.close()
		f.end()
		return
	}
	size := max(x.res.Header.ContentLength(), -1)
	a := &answer{s: s, f: f, x: x, conn: c.Conn()}
	if size < 0 && !c.Request.Header.IsHTTP11() {
		s.untilClosed(ctx, a)
		return
	}
	c.Response.ImmediateHeaderFlush = size < 0
	c.Response.SetBodyStream(a, size)
}

// upload is a client's body on its way to the engine. It may take as long as it
// wants if each part comes in time.
type upload struct {
	s    *Server
	c    *fasthttp.RequestCtx
	from io.Reader
	err  error // why the client's part ended early
}

func (u *upload) Read(p []byte) (int, error) {
	_ = u.c.SetReadDeadline(time.Now().Add(u.s.cfg.readTimeout))
	n, err := u.from.Read(p)
	if err != nil && err != io.EOF {
		u.err = err
	}
	return n, err
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
	stop  func()       // of the watch on the client's connection
	taken atomic.Int64 // of s.bodies
	ended atomic.Bool

	buffers *buffers // while the handler runs
}

func (f *flight) end() {
	if f.ended.Swap(true) {
		return
	}
	f.stop()
	f.releaseBody()
	f.s.count.answered(f.route, f.c.Response.StatusCode(), f.began)
	f.s.inFlight.Add(-1) // last: who sees it ended sees it counted
}

// releaseBody gives back the room that the body took, once the body is with the
// engine or not wanted: an answer may stream for much longer.
func (f *flight) releaseBody() { f.s.bodies.Release(f.taken.Swap(0)) }

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
	x    *exchange
	conn net.Conn
}

// Read reads the next part, or the end, and gives the client time to take it.
func (a *answer) Read(p []byte) (int, error) {
	n, err := a.x.Read(p)
	_ = a.conn.SetWriteDeadline(time.Now().Add(a.s.cfg.writeTimeout))
	return n, err
}

// Close ends the request to the engine, wherever its answer is.
func (a *answer) Close() error {
	if !a.x.end && a.x.got == int64(a.x.res.Header.ContentLength()) { // fasthttp does not read on to the end of what it has counted
		_, _ = a.x.Read(make([]byte, 1))
	}
	if !a.x.end {
		a.s.count.cut.Inc()
	}
	a.x.close()
	a.f.end()
	return nil
}
