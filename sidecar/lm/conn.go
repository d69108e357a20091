package lm

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime/debug"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/listener"
)

// conn is one connection. Its goroutine owns all of it but the socket, which
// Close may shut.
type conn struct {
	s    *Server
	sock *listener.Sock
	pace *listener.Pace
	in   *listener.Reader

	raw    [requestSize]byte
	reply  [replySize]byte
	header [maxHeader]byte
	vector [2]unix.Iovec
	view   cache.View
	slot   *cache.Slot
	room   int64 // of Server.receiving
	sums   cache.PartSums
}

func newConn(s *Server, nc *net.TCPConn) (*conn, error) {
	sock, err := listener.NewSock(nc, s.lanes)
	if err != nil {
		return nil, err
	}
	pace := listener.NewPace(sock, &s.busy, s.cfg.stallTimeout)
	return &conn{s: s, sock: sock, pace: pace, in: listener.NewReader(pace, readBuffer)}, nil
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
			c.s.cfg.Log.Error().Interface("panic", p).Bytes("stack", debug.Stack()).Msg("an LMCache client's request failed")
		}
	}()
	for {
		if err := c.next(); err != nil {
			c.hangUp(err)
			return
		}
	}
}

// next reads one request and answers it.
func (c *conn) next() error {
	c.pace.Await()
	if len(c.in.Unread()) == 0 {
		if err := c.in.Fill(); err != nil {
			return err
		}
	}
	c.pace.Begin()
	if err := c.in.Full(c.raw[:]); err != nil {
		return err
	}
	q, err := parseRequest(c.raw[:])
	if err != nil {
		return err
	}
	c.s.count.requests[q.command].Inc()
	switch q.command {
	case put:
		err = c.put(&q)
	case get:
		err = c.get(&q)
	case exist:
		err = c.answer(c.exists(&q))
	case health:
		err = c.answer(!c.s.draining.Load())
	default: // LMCache's own server has no list either
		err = c.answer(false)
	}
	if err == nil {
		err = c.pace.Done()
	}
	return err
}

// hangUp counts why a connection cannot go on.
func (c *conn) hangUp(err error) {
	switch {
	case errors.Is(err, errRequest):
		c.s.count.bad.Inc()
		c.s.cfg.Log.Debug().Err(err).Stringer("from", c.sock.TCP.RemoteAddr()).Msg("an LMCache client is not understood")
	case listener.IsTimeout(err):
		c.s.count.slow.Inc()
	}
	// To close with unread bytes would reset the connection and lose replies.
	if !errors.Is(err, errCorrupt) && c.sock.TCP.CloseWrite() == nil {
		_ = c.sock.TCP.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		_, _ = io.CopyN(io.Discard, c.sock.TCP, 1<<20)
	}
}

func (c *conn) end() {
	c.abort()
	c.view.Close()
	c.sock.Leave()
	_ = c.sock.TCP.Close()
	c.s.busy.Add(-1)
}

// abort gives back what a store has left behind.
func (c *conn) abort() {
	if c.slot != nil {
		c.slot.Abort()
		c.slot = nil
	}
	if c.room > 0 {
		c.s.receiving.Release(c.room)
		c.room = 0
	}
}

// put stores a value, which follows its request. There is no reply.
func (c *conn) put(q *request) (err error) {
	defer c.abort()
	n := int64(q.length)
	if int64(len(c.in.Unread())) < n {
		if err := c.pace.Hurry(n); err != nil {
			return err
		}
	}
	defer func() {
		if err == nil { // what a client only announces was not received
			c.s.count.received.AddInt64(n)
		}
	}()
	why := kvwire.ReasonNone
	header := headerSize(q.key)
	total := int64(header) + n
	switch {
	case c.s.draining.Load():
		why = kvwire.ReasonDraining
	case n > c.s.maxValue:
		why = kvwire.ReasonTooLarge
	case !c.claim(total):
		why = kvwire.ReasonOverBudget
	}
	if why != kvwire.ReasonNone {
		c.s.count.refuse(why)
		return c.in.Skip(n)
	}
	hash := hashKey(q.key)
	slot, res, err := c.s.space.Reserve(shard, form, hash, total)
	c.slot = slot
	c.sums.Reset()
	switch {
	case err != nil:
		c.s.cfg.Log.Warn().Err(err).Msg("cannot store an LMCache client's value")
		return c.in.Skip(n)
	case slot == nil && res.Exists:
		putHeader(c.header[:], q.key, q.format)
		if err := c.in.Compare(c.header[:header], n, &c.sums); err != nil {
			return err
		}
		c.existing(res.Sum)
		return nil
	case slot == nil:
		c.s.count.refuse(res.Reason)
		return c.in.Skip(n)
	}
	putHeader(slot.Bytes(), q.key, q.format)
	if err := c.in.Parts(slot.Bytes(), header, &c.sums); err != nil {
		return err
	}
	c.slot = nil
	switch res = slot.Commit(cache.IfAbsent, c.sums.Sum()); {
	case res.Stored:
		c.s.count.stored.Inc()
	case res.Exists: // somebody was faster
		c.existing(res.Sum)
	default:
		c.s.count.refuse(res.Reason)
	}
	return nil
}

// claim takes n bytes of what values under way may occupy together.
func (c *conn) claim(n int64) bool {
	if !c.s.receiving.TryAcquire(n) {
		ctx, cancel := context.WithTimeout(c.s.clients.Context(), roomTimeout)
		defer cancel()
		if c.s.receiving.Acquire(ctx, n) != nil {
			return false
		}
	}
	c.room = n
	return true
}

// existing counts a value of a key that has one already.
func (c *conn) existing(have kvwire.Checksum) {
	c.s.count.existing.Inc()
	if have != c.sums.Sum() {
		c.s.count.conflicts.Inc()
	}
}

func (c *conn) exists(q *request) bool {
	if c.s.draining.Load() {
		return false
	}
	_, _, why := c.s.space.Head(c.header[:headerFixed], shard, form, hashKey(q.key))
	return why == kvwire.ReasonNone
}

// answer sends a reply without a value.
func (c *conn) answer(yes bool) error {
	code := int32(codeFail)
	if yes {
		code = codeSuccess
	}
	putReply(c.reply[:], code, 0, format{layout: noFormat, dtype: noType})
	return c.send(c.reply[:], nil)
}

// get sends a value, or says that there is none.
func (c *conn) get(q *request) error {
	f, value, why := c.load(q)
	if why != kvwire.ReasonNone {
		c.s.count.miss(why)
		return c.answer(false)
	}
	defer c.view.Close()
	c.s.count.hits.Inc()
	putReply(c.reply[:], codeSuccess, len(value), f)
	return c.value(value)
}

// load takes the view of a value. Bytes of one part are checked, longer ones
// as they are sent.
func (c *conn) load(q *request) (format, []byte, kvwire.Reason) {
	if c.s.draining.Load() {
		return format{}, nil, kvwire.ReasonDraining
	}
	v := &c.view
	if why := c.s.space.Borrow(v, shard, form, hashKey(q.key), false); why != kvwire.ReasonNone {
		return format{}, nil, why
	}
	b := v.Bytes()
	if len(b) <= cache.PartSize && guard.getSum() && !v.Check(cache.SumParts(b)) {
		v.Close()
		return format{}, nil, kvwire.ReasonCorrupt
	}
	f, at, err := parseHeader(b)
	if err != nil { // flipped in a value whose checksum was not taken yet
		v.Remove()
		v.Close()
		return format{}, nil, kvwire.ReasonCorrupt
	}
	return f, b[at:], kvwire.ReasonNone
}

var errCorrupt = errors.New("cannot send the end of a value: its checksum is wrong")

// value sends the reply and the value of c.view. One of several parts is sent
// part by part, each as soon as its sum is taken, while it is in the
// processor's cache; the last only if the checksum of all is right. If not,
// the connection ends without it.
func (c *conn) value(value []byte) error {
	all := c.view.Bytes()
	first := c.reply[:]
	if len(all) > cache.PartSize {
		c.sums.Reset()
		c.sock.Enter()
		defer c.sock.Leave()
		for i := 0; len(all)-i*cache.PartSize > cache.PartSize; i++ {
			end := (i + 1) * cache.PartSize
			c.sums.Set(i, all[i*cache.PartSize:end])
			part := value[:len(value)-(len(all)-end)]
			if err := c.send(first, part); err != nil {
				return err
			}
			first, value = nil, value[len(part):]
		}
		last := (len(all) - 1) / cache.PartSize
		c.sums.Set(last, all[last*cache.PartSize:])
		if guard.getSum() && !c.view.Check(c.sums.Sum()) {
			c.s.count.miss(kvwire.ReasonCorrupt)
			return errCorrupt
		}
	}
	return c.send(first, value)
}

// send writes both in one go.
func (c *conn) send(reply, value []byte) error {
	n := 0
	for _, b := range [...][]byte{reply, value} {
		if len(b) > 0 {
			c.vector[n] = unix.Iovec{Base: unsafe.SliceData(b)}
			c.vector[n].SetLen(len(b))
			n++
		}
	}
	err := c.sock.Writev(c.vector[:n], c.s.cfg.writeTimeout)
	clear(c.vector[:])
	if err == nil {
		c.s.count.sent.Add(len(value))
	}
	return err
}
