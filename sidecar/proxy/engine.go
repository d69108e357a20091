package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/engines/hangup"
)

const (
	dialTimeout = 2 * time.Second
	maxIdle     = 1024
	// idleFor is less than the five seconds after which uvicorn closes a
	// connection without a request.
	idleFor = 4 * time.Second
	// staleWithin is how soon a connection that the engine had closed already
	// shows it.
	staleWithin = time.Second
	engineRead  = MaxHeaders // an engine may repeat a request's
	engineWrite = 32 << 10   // head and body of most requests in one write
)

// engineConn is a connection to the engine, of one request at a time.
type engineConn struct {
	net.Conn
	r     *bufio.Reader
	w     *bufio.Writer
	since time.Time // idle
	used  bool      // before this request
	heard bool      // something of this request's answer
}

func (c *engineConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.heard = c.heard || n > 0
	return n, err
}

// enginePool keeps connections to the engine.
type enginePool struct {
	addr string
	tls  *tls.Config // nil: none

	mu     sync.Mutex
	idle   []*engineConn // the longest idle first
	timer  *time.Timer   // closes those; nil while none is idle
	closed bool
}

func newEnginePool(engine *url.URL) *enginePool {
	p := &enginePool{addr: engine.Host}
	port := "80"
	if engine.Scheme == "https" {
		port = "443"
		p.tls = &tls.Config{ServerName: engine.Hostname(), MinVersion: tls.VersionTLS12}
	}
	if engine.Port() == "" {
		p.addr = net.JoinHostPort(engine.Hostname(), port)
	}
	return p
}

// get returns an idle connection or, where there is none or fresh is set, a new
// one.
func (p *enginePool) get(ctx context.Context, fresh bool) (*engineConn, error) {
	for !fresh {
		c := p.takeIdle()
		if c == nil {
			break
		}
		// What came unasked would be taken for this request's answer.
		if hangup.Quiet(c.Conn) {
			c.used, c.heard = true, false
			return c, nil
		}
		_ = c.Close()
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var nc net.Conn
	var err error
	if p.tls != nil {
		nc, err = (&tls.Dialer{Config: p.tls}).DialContext(ctx, "tcp", p.addr)
	} else {
		nc, err = (&net.Dialer{}).DialContext(ctx, "tcp", p.addr)
	}
	if err != nil {
		return nil, err
	}
	c := &engineConn{Conn: nc, w: bufio.NewWriterSize(nc, engineWrite)}
	c.r = bufio.NewReaderSize(c, engineRead)
	return c, nil
}

// takeIdle returns the connection that is idle for the shortest time, nil if
// there is none.
func (p *enginePool) takeIdle() *engineConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.idle)
	if n == 0 {
		return nil
	}
	c := p.idle[n-1]
	p.idle = p.idle[:n-1]
	return c
}

// put takes back a connection whose answer was read to its end.
func (p *enginePool) put(c *engineConn) {
	c.since = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle) >= maxIdle {
		_ = c.Close()
		return
	}
	p.idle = append(p.idle, c)
	if p.timer == nil {
		p.timer = time.AfterFunc(idleFor, p.prune)
	}
}

// prune closes connections that were idle for long.
func (p *enginePool) prune() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = slices.DeleteFunc(p.idle, func(c *engineConn) bool {
		old := time.Since(c.since) >= idleFor
		if old {
			_ = c.Close()
		}
		return old
	})
	p.timer = nil
	if len(p.idle) > 0 && !p.closed {
		p.timer = time.AfterFunc(max(time.Until(p.idle[0].since.Add(idleFor)), time.Millisecond), p.prune)
	}
}

func (p *enginePool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, c := range p.idle {
		_ = c.Close()
	}
	p.idle = nil
}

// exchange is a request at the engine whose answer's head has come.
type exchange struct {
	pool *enginePool
	conn *engineConn
	res  *fasthttp.Response
	body io.Reader
	stop func() bool // of closing the connection with the context
	end  bool        // the body was read to its end
	got  int64       // bytes of the body so far
}

// send sends a request and reads the head of its answer. The end of ctx closes
// the connection, which is how the engine learns that nobody waits. A request
// that can be sent again is, once, when a connection turns out to have been
// closed by the engine while it was idle.
func (p *enginePool) send(ctx context.Context, req *fasthttp.Request) (*exchange, error) {
	streamed := req.IsBodyStream() // writing it takes the stream away
	for fresh := false; ; fresh = true {
		c, err := p.get(ctx, fresh)
		if err != nil {
			return nil, err
		}
		x := &exchange{pool: p, conn: c, res: &fasthttp.Response{StreamBody: true, SkipBody: req.Header.IsHead()}}
		x.res.Header.SetNoDefaultContentType(true)
		x.stop = context.AfterFunc(ctx, func() { _ = c.Close() })
		began := time.Now()
		if err = x.run(req); err == nil {
			return x, nil
		}
		x.stop()
		_ = c.Close()
		if !c.used || c.heard || streamed || ctx.Err() != nil || !stale(err) || time.Since(began) > staleWithin {
			return nil, err
		}
	}
}

func stale(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func (x *exchange) run(req *fasthttp.Request) error {
	wrote := req.Write(x.conn.w)
	if wrote == nil {
		wrote = x.conn.w.Flush()
	}
	if wrote != nil {
		// An engine may refuse a body before it has read all of it. If it was
		// the client that failed, nothing comes.
		x.res.Header.SetConnectionClose()
		_ = x.conn.SetReadDeadline(time.Now().Add(staleWithin))
	}
	if err := x.res.ReadLimitBody(x.conn.r, 0); err != nil {
		return errors.Join(err, wrote)
	}
	if wrote != nil {
		x.res.Header.SetConnectionClose()
	}
	switch x.body = x.res.BodyStream(); {
	case x.body == nil:
		x.end = true
	case x.res.Header.ContentLength() < -1: // up to the end of the connection
		x.body = x.conn.r
		x.res.Header.SetConnectionClose()
	}
	return nil
}

// Read reads the answer's body as it comes.
func (x *exchange) Read(p []byte) (int, error) {
	n, err := x.body.Read(p)
	x.got += int64(n)
	x.end = x.end || err == io.EOF
	return n, err
}

// close gives the connection back, or closes it where the answer has not been
// read to its end, or where the engine said more than an answer.
func (x *exchange) close() {
	whole := x.end && x.conn.r.Buffered() == 0 && x.res.StatusCode() != fasthttp.StatusSwitchingProtocols
	if x.stop() && whole && !x.res.ConnectionClose() {
		x.pool.put(x.conn)
		return
	}
	_ = x.conn.Close()
}
