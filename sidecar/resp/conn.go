package resp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"time"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
	"membrane/sidecar/listener"
)

// conn is one connection. Its goroutine owns all of it but the socket, which
// Close may shut.
type conn struct {
	s    *Server
	id   int64
	sock *listener.Sock
	pace *listener.Pace
	in   *reader
	out  writer

	known    bool // may send commands
	identity auth.Identity
	space    *cache.Space // of the identity's tenant
	wrong    int          // keys
	name     string

	q       request
	cmd     *command
	refusal string // why the command that is being read will not be run
	store   incoming
	mset    msetResult

	quit bool
}

func newConn(s *Server, nc *net.TCPConn) (*conn, error) {
	sock, err := listener.NewSock(nc, s.lanes)
	if err != nil {
		return nil, err
	}
	c := &conn{s: s, id: s.lastID.Add(1), sock: sock, pace: listener.NewPace(sock, &s.busy, s.cfg.stallTimeout)}
	c.in = newReader(c)
	c.out = writer{s: s, sock: sock, proto: 2, text: make([]byte, 0, writeBuffer)}
	if s.cfg.Keys == nil {
		return c, c.become(auth.Anonymous())
	}
	return c, nil
}

// become gives the connection to somebody.
func (c *conn) become(id auth.Identity) error {
	space, err := c.s.cfg.Cache.Space(id.Tenant, namespace)
	if err != nil {
		return err
	}
	c.identity, c.space, c.known = id, space, true
	return nil
}

// Shut ends the connection, whatever is under way.
func (c *conn) Shut() { c.sock.Shut() }

// Run serves the connection until it ends.
func (c *conn) Run() {
	c.s.busy.Add(1)
	defer c.end()
	defer func() {
		if p := recover(); p != nil {
			c.s.count.panics.Inc()
			c.s.cfg.Log.Error().Interface("panic", p).Bytes("stack", debug.Stack()).Msg("a Redis client's command failed")
		}
	}()
	if !c.known {
		_ = c.pace.Bind(c.s.cfg.greetTimeout)
	}
	for !c.quit {
		err := c.next()
		if err != nil {
			c.hangUp(err)
			return
		}
	}
	_ = c.out.flush()
	c.linger()
}

// next reads one command and runs it.
func (c *conn) next() error {
	c.pace.Await()
	if len(c.in.Unread()) == 0 {
		if err := c.in.Fill(); err != nil {
			return err
		}
	}
	c.pace.Begin()
	defer c.store.abort() // also when it panics
	if err := c.command(); err != nil {
		return err
	}
	return c.pace.Done()
}

// Read is the reader's source. Nothing is kept back from somebody who may wait
// for it before he goes on.
func (c *conn) Read(p []byte) (int, error) {
	if err := c.out.flush(); err != nil {
		return 0, err
	}
	return c.pace.Read(p)
}

// hangUp ends a connection that cannot go on.
func (c *conn) hangUp(err error) {
	var bad protocolError
	switch {
	case errors.As(err, &bad):
		c.out.fail("ERR " + bad.Error())
		_ = c.out.flush()
		c.linger()
	case listener.IsTimeout(err) && c.out.err == nil:
		c.s.count.slow.Inc()
		c.out.fail("ERR timeout: the rest of a command or a credential did not come")
		_ = c.out.flush()
	default:
		_ = c.out.flush() // half closed: who sent commands still reads
	}
}

// linger lets the last reply arrive: to close with unread bytes would reset
// the connection and lose it.
func (c *conn) linger() {
	if c.out.err != nil || c.sock.TCP.CloseWrite() != nil {
		return
	}
	_ = c.sock.TCP.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	_, _ = io.CopyN(io.Discard, c.sock.TCP, 1<<20)
}

func (c *conn) end() {
	c.store.abort()
	_ = c.out.flush() // lets go of views after a panic
	_ = c.sock.TCP.Close()
	c.s.busy.Add(-1)
}

// command reads one command, which has begun to arrive, and runs it.
func (c *conn) command() error {
	c.q.reset()
	c.refusal, c.cmd, c.mset = "", nil, msetResult{}
	if c.in.Unread()[0] != '*' {
		return c.inline()
	}
	argc, err := c.in.count('*')
	switch {
	case err != nil:
		return err
	case argc > MaxArgs:
		return protocolError(fmt.Sprintf("%d arguments are more than %d", argc, MaxArgs))
	case !c.known && argc > maxStrangerArgs:
		return protocolError("unauthenticated multibulk length")
	}
	for i := range int(argc) {
		if err := c.argument(i, int(argc)); err != nil {
			return err
		}
	}
	if argc > 0 {
		c.exec()
	}
	return nil
}

// argument reads one argument of a command.
func (c *conn) argument(i, argc int) error {
	n, err := c.in.count('$')
	switch {
	case err != nil:
		return err
	case n < 0:
		return protocolError("invalid bulk length")
	case !c.known && n > maxStrangerArg:
		return protocolError("unauthenticated bulk length")
	case n > MaxSkip:
		return protocolError(fmt.Sprintf("an argument of %d bytes is above %d", n, MaxSkip))
	}
	limit := int64(MaxArg)
	value := false
	if i > 0 && c.refusal == "" {
		value = c.cmd.value != nil && c.cmd.value(i)
		if c.cmd.key(i) {
			limit = MaxKey
		}
	}
	switch {
	case c.refusal != "":
		err = c.skip(n)
	case value:
		c.q.spans = append(c.q.spans, span{len(c.q.memory), len(c.q.memory)})
		if err = c.receive(c.q.arg(i-1), n); err == nil {
			err = c.in.end()
		}
		if err == nil {
			c.received(argc)
		}
		return err
	case n > limit:
		c.refusal = fmt.Sprintf("ERR argument %d of %d bytes is above the limit of %d", i, n, limit)
		err = c.skip(n)
	case int64(len(c.q.memory))+n > MaxArgBytes:
		c.refusal = fmt.Sprintf("ERR the arguments together are above the limit of %d bytes", MaxArgBytes)
		err = c.skip(n)
	default:
		from := len(c.q.memory)
		c.q.memory = grow(c.q.memory, int(n))
		err = c.in.Full(c.q.memory[from:])
		c.q.spans = append(c.q.spans, span{from, len(c.q.memory)})
	}
	if err == nil {
		err = c.in.end()
	}
	if err == nil && i == 0 {
		c.lookUp(argc)
	}
	return err
}

// grow extends b by n bytes.
func grow(b []byte, n int) []byte {
	if len(b)+n <= cap(b) {
		return b[:len(b)+n]
	}
	return append(b, make([]byte, n)...)
}

// skip throws away an argument that is not wanted.
func (c *conn) skip(n int64) error {
	if n > readBuffer {
		if err := c.pace.Hurry(n); err != nil {
			return err
		}
	}
	return c.in.Skip(n)
}

// lookUp finds the command of the first argument and says in refusal why it
// will not be run.
func (c *conn) lookUp(argc int) {
	var name [16]byte
	arg := c.q.arg(0)
	if len(arg) <= len(name) {
		for i, b := range arg {
			if b >= 'A' && b <= 'Z' {
				b += 'a' - 'A'
			}
			name[i] = b
		}
		c.cmd = commands[string(name[:len(arg)])]
	}
	switch cmd := c.cmd; {
	case cmd == nil:
		c.s.count.unknown.Inc()
		c.refusal = fmt.Sprintf("ERR unknown command '%.128s'", arg)
		if !c.known {
			c.refusal = noAuth
		}
	case !c.known && !cmd.open:
		c.refusal = noAuth
	case argc < cmd.least || cmd.most > 0 && argc > cmd.most:
		c.refusal = fmt.Sprintf("ERR wrong number of arguments for '%s' command", cmd.name)
	case c.known && !c.identity.Scopes.Allows(cmd.need):
		c.refusal = fmt.Sprintf("NOPERM this key has not the scope %s, which '%s' needs", cmd.need, cmd.name)
	case cmd.need != 0 && cmd.need != auth.ScopeAdmin && c.s.draining.Load():
		if cmd.need == auth.ScopeWrite {
			c.s.count.refuse(kvwire.ReasonDraining)
		} else {
			c.s.count.miss(kvwire.ReasonDraining)
		}
		c.refusal = "ERR draining: this sidecar is stopping"
	}
}

const noAuth = "NOAUTH Authentication required."

// inline reads a command that is one line of words.
func (c *conn) inline() error {
	line, err := c.in.line()
	if err != nil {
		return err
	}
	if err := words(line, &c.q); err != nil {
		return err
	}
	if c.q.len() == 0 {
		return nil
	}
	// What a web page can make a browser send ends here.
	if c.q.is(0, "POST") || c.q.is(0, "HOST:") {
		return protocolError("this is not HTTP")
	}
	c.lookUp(c.q.len())
	if c.refusal == "" && c.cmd.value != nil {
		for i := 1; i < c.q.len(); i++ {
			if c.cmd.value(i) {
				c.take(c.q.arg(i-1), c.q.arg(i))
				c.received(c.q.len())
			}
		}
	}
	c.exec()
	return nil
}

// exec runs the command or says why not.
func (c *conn) exec() {
	if c.cmd != nil {
		c.s.count.requests[c.cmd.name].Inc()
	}
	if c.refusal != "" {
		c.out.fail(c.refusal)
		return
	}
	c.cmd.run(c)
}
