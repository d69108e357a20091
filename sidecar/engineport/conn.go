package engineport

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"time"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
)

// keepBuffer is the most that a connection keeps of a buffer between requests,
// keepBuffers the most that all do of one kind.
const (
	keepBuffer  = 1 << 20
	keepBuffers = 32 << 20
)

// conn is one connection of an engine. Its goroutine owns all of it but the
// socket, which Close may close.
type conn struct {
	s        *Server
	id       cache.ClientID
	nc       net.Conn
	unix     *net.UnixConn // nil on the localhost port
	r        *bufio.Reader
	identity auth.Identity
	greeted  bool
	hurried  bool // the socket has a read deadline for the frame that is being read

	// Set by register.
	eng    *engine
	role   kvwire.Role
	shard  kvwire.Shard
	object int64 // size of this rank's object, in bytes
	inbox  *inbox

	in, out   []byte
	frames    kvwire.PageWriter
	files     []int // to be sent with the answer
	arrived   time.Time
	locations []cache.Location
	pages     []kvwire.PageRef
	commits   []kvwire.Commit
	refs      []ref
	bench     cache.Workbench
	forms     []kvwire.Form
}

// closing is an error after which nobody knows where the next frame begins.
type closing struct{ error }

func (e closing) Unwrap() error { return e.error }

func (c *conn) run() {
	defer c.end()
	defer func() {
		if p := recover(); p != nil {
			c.s.count.panics.Inc()
			c.s.cfg.Log.Error().Interface("panic", p).Bytes("stack", debug.Stack()).Msg("an engine's request failed")
		}
	}()
	if !c.greeted {
		_ = c.nc.SetReadDeadline(time.Now().Add(c.s.cfg.greetTimeout))
	}
	for {
		h, err := kvwire.ReadHeader(c.r)
		c.arrived = time.Now()
		if err != nil {
			c.hangUp(h, err)
			return
		}
		if c.serve(h) != nil {
			return
		}
	}
}

// hangUp answers a header that is none and lets the answer arrive.
func (c *conn) hangUp(h kvwire.Header, err error) {
	var e *kvwire.Error
	if !errors.As(err, &e) {
		return // the connection is lost
	}
	c.s.count.refuse(e)
	c.lastWords(h.ID, e)
}

// lastWords sends an error, then reads what the client has sent already: to
// close with unread bytes would reset the connection and lose the error.
func (c *conn) lastWords(id uint32, err error) {
	if c.write(errorFrame(nil, id, err)) != nil {
		return
	}
	if half, ok := c.nc.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
	_ = c.nc.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	_, _ = io.CopyN(io.Discard, c.nc, 1<<20)
}

// serve reads the body of one request, acts and answers. It returns an error
// when the connection cannot go on.
func (c *conn) serve(h kvwire.Header) error {
	c.s.busy.Add(1)
	defer c.s.busy.Add(-1)                                                                // also when it panics
	if h.Length > smallBody && h.Type != kvwire.TypeWrite && h.Type != kvwire.TypeMatch { // which are not kept

		if !c.s.bodies.take(int64(h.Length)) {
			return c.refuseBody(h)
		}
		defer c.s.bodies.give(int64(h.Length))
	}
	err := c.request(h)
	var fatal closing
	if errors.As(err, &fatal) {
		c.s.count.request(h.Type, c.arrived, fatal.error)
		var e *kvwire.Error
		if errors.As(fatal.error, &e) {
			c.lastWords(h.ID, e)
		}
		return err
	}
	if err != nil {
		var e *kvwire.Error
		if !errors.As(err, &e) {
			c.s.cfg.Log.Error().Err(err).Stringer("op", h.Type).Msg("an engine's request failed")
		}
		c.files = c.files[:0]
		c.out = errorFrame(c.out[:0], h.ID, err)
	}
	c.s.count.request(h.Type, c.arrived, err)
	if werr := c.flush(); werr != nil {
		return werr
	}
	c.trim()
	return nil
}

// refuseBody reads past the body of a request that there is no room for.
func (c *conn) refuseBody(h kvwire.Header) error {
	err := kvwire.Errorf(kvwire.CodeBusy, "length", "requests of %d bytes are under way: %d more are above %d", c.s.bodies.used.Load(), h.Length, maxBodies)
	c.s.count.request(h.Type, c.arrived, err)
	if !c.greeted { // no hello is so long
		c.lastWords(h.ID, err)
		return err
	}
	c.hurry(int(h.Length))
	if _, err := io.CopyN(io.Discard, c.r, int64(h.Length)); err != nil {
		return err
	}
	c.relax()
	return c.write(errorFrame(nil, h.ID, err))
}

// trim gives up buffers that are too large to be kept until the next request.
func (c *conn) trim() {
	most := int(min(keepBuffer, keepBuffers/max(1, c.s.connected.Load())))
	if cap(c.in) > most {
		c.in = nil
	}
	if cap(c.out) > most {
		c.out = nil
	}
	c.locations = atMost(c.locations, most/24)
	c.pages = atMost(c.pages, most/16)
	c.commits = atMost(c.commits, most/24)
	c.refs = atMost(c.refs, most/48)
}

func atMost[T any](s []T, n int) []T {
	if cap(s) > n {
		return nil
	}
	return s
}

// hurry bounds the time for the rest of a frame, if that is not here: until it
// is, it holds memory or a slot of the arena. A client that has not said hello has
// its own, shorter time.
func (c *conn) hurry(length int) {
	if c.greeted && c.r.Buffered() < length {
		_ = c.nc.SetReadDeadline(time.Now().Add(c.s.cfg.bodyTimeout))
		c.hurried = true
	}
}

// relax undoes hurry.
func (c *conn) relax() {
	if c.hurried {
		_ = c.nc.SetReadDeadline(noDeadline)
		c.hurried = false
	}
}

func (c *conn) request(h kvwire.Header) error {
	switch {
	case h.Type&kvwire.AnswerBit != 0, h.Type == kvwire.TypePage, h.Type == kvwire.TypeError:
		return closing{kvwire.Errorf(kvwire.CodeBadFrame, "type", "a %s frame is not a request", h.Type)}
	case !c.greeted && h.Length > kvwire.MaxJSON:
		return closing{kvwire.Errorf(kvwire.CodeUnauthorized, "key", "say hello first")}
	case h.Type == kvwire.TypeWrite:
		return c.handleWrite(h)
	case h.Type == kvwire.TypeMatch && c.greeted && c.eng != nil && !c.s.draining.Load():
		return c.handleMatch(h)
	}
	if h.Type == kvwire.TypeMatch { // one that is to be refused
		c.hurry(int(h.Length))
		if _, err := io.CopyN(io.Discard, c.r, int64(h.Length)); err != nil {
			return closing{err}
		}
		c.relax()
		h.Length = 0
	}
	c.hurry(int(h.Length))
	body, err := kvwire.ReadBody(c.r, h, c.in)
	if err != nil {
		return closing{err}
	}
	c.relax()
	c.in = body
	if !c.greeted && h.Type != kvwire.TypeHello {
		return kvwire.Errorf(kvwire.CodeUnauthorized, "key", "say hello first")
	}
	handle, ok := handlers[h.Type]
	if !ok {
		return kvwire.Errorf(kvwire.CodeBadField, "type", "%s is not spoken on this port", h.Type)
	}
	if c.eng == nil && !beforeRegister[h.Type] {
		return kvwire.Errorf(kvwire.CodeNotRegistered, "", "%s needs a registered connection", h.Type)
	}
	if c.s.draining.Load() && startsWork[h.Type] {
		return kvwire.Errorf(kvwire.CodeDraining, "", "the sidecar is stopping")
	}
	if h.Type == kvwire.TypeRead {
		return c.handleRead(h.ID, body) // writes its own frames
	}
	var begin int
	c.out, begin = kvwire.BeginFrame(c.out[:0], h.Type|kvwire.AnswerBit, h.ID)
	if err := handle(c, body); err != nil {
		return err
	}
	c.out = kvwire.EndFrame(c.out, begin)
	return nil
}

// handlers append the body of their answer to conn.out.
var handlers map[kvwire.Type]func(c *conn, body []byte) error

func init() { // not a composite literal: handlers refer to conn, whose methods refer to handlers
	handlers = map[kvwire.Type]func(c *conn, body []byte) error{
		kvwire.TypeHello: (*conn).handleHello, kvwire.TypeRegister: (*conn).handleRegister,
		kvwire.TypePing:  func(*conn, []byte) error { return nil },
		kvwire.TypeMatch: nil, kvwire.TypeExtend: (*conn).handleExtend,
		kvwire.TypeLease: (*conn).handleLease, kvwire.TypeRelease: (*conn).handleRelease,
		kvwire.TypeReserve: (*conn).handleReserve, kvwire.TypeCommit: (*conn).handleCommit,
		kvwire.TypeDrop: (*conn).handleDrop, kvwire.TypeReset: (*conn).handleReset,
		kvwire.TypeStats: (*conn).handleStats, kvwire.TypeRead: nil,
		kvwire.TypeMatchHashes: (*conn).handleMatchHashes,
	}
}

var (
	beforeRegister = map[kvwire.Type]bool{
		kvwire.TypeHello: true, kvwire.TypeRegister: true, kvwire.TypePing: true, kvwire.TypeStats: true,
	}
	startsWork = map[kvwire.Type]bool{
		kvwire.TypeRegister: true, kvwire.TypeMatch: true, kvwire.TypeMatchHashes: true, kvwire.TypeLease: true, kvwire.TypeReserve: true,
	}
)

func errorFrame(b []byte, id uint32, err error) []byte {
	b, begin := kvwire.BeginFrame(b, kvwire.TypeError|kvwire.AnswerBit, id)
	return kvwire.EndFrame(kvwire.AppendError(b, err), begin)
}

func (c *conn) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	out, files := c.out, c.files
	c.out, c.files = c.out[:0], c.files[:0]
	if len(files) > 0 {
		_ = c.nc.SetWriteDeadline(time.Now().Add(c.s.cfg.WriteTimeout))
		return kvwire.SendWithFiles(c.unix, out, files...)
	}
	return c.write(out)
}

func (c *conn) write(b []byte) error {
	_ = c.nc.SetWriteDeadline(time.Now().Add(c.s.cfg.WriteTimeout))
	_, err := c.nc.Write(b)
	return err
}

// watch returns a context that ends at the deadline, when the server closes,
// or when the client hangs up; stop must be called before the next read.
func (c *conn) watch(deadline time.Time) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithDeadline(c.s.ctx, deadline)
	if c.r.Buffered() > 0 { // the next request is here: the client is, too
		return ctx, cancel
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := c.r.Peek(1); err != nil && !isTimeout(err) {
			cancel()
		}
	}()
	return ctx, func() {
		cancel()
		_ = c.nc.SetReadDeadline(time.Unix(1, 0))
		<-done
		_ = c.nc.SetReadDeadline(noDeadline)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// end gives back whatever the connection took.
func (c *conn) end() {
	_ = c.nc.Close()
	c.leave()
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.forget(c)
}

func (c *conn) name() string {
	if c.unix != nil {
		return "socket"
	}
	return fmt.Sprint(c.nc.RemoteAddr())
}

var noDeadline time.Time
