package mesh

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"membrane/kvwire"
)

// errUnauthorized is a peer that does not hold our cluster key, or says that
// we do not hold its.
var errUnauthorized = errors.New("peer and node do not hold the same cluster key")

var longAgo = time.Unix(1, 0)

// dataConn is an authenticated connection to a peer's data port. It belongs to
// one goroutine at a time.
type dataConn struct {
	c      net.Conn
	r      *bufio.Reader
	id     uint32
	out    []byte
	in     []byte
	pooled bool      // it was used before
	since  time.Time // of its last use
}

// dialData connects to a data port and does the challenge. The peer must have
// the name that gossip gave it: its address may be another's by now.
func dialData(ctx context.Context, addr, name, own string, key []byte) (*dataConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("cannot reach the data port of %q at %q: %w", name, addr, err)
	}
	dc := &dataConn{c: c, r: bufio.NewReaderSize(c, 4<<10)}
	stop := dc.watch(ctx)
	err = dc.challenge(name, own, key)
	if !stop() || err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("cannot open a data connection to %q at %q: %w", name, addr, errors.Join(err, ctx.Err()))
	}
	return dc, nil
}

// watch ends all reading and writing when ctx ends, until stop. stop reports
// whether the connection can still be used.
func (d *dataConn) watch(ctx context.Context) (stop func() bool) {
	if !guard.pullDeadline() {
		return func() bool { return true }
	}
	deadline, _ := ctx.Deadline() // the zero time is no deadline
	_ = d.c.SetDeadline(deadline)
	return context.AfterFunc(ctx, func() { _ = d.c.SetDeadline(longAgo) })
}

func (d *dataConn) challenge(name, own string, key []byte) error {
	ours := kvwire.Challenge{Nonce: kvwire.NewNonce(), Node: own}
	body, err := d.call(kvwire.TypeChallenge, kvwire.AppendChallenge(nil, ours))
	if err != nil {
		return asUnauthorized(err)
	}
	a, err := kvwire.ParseChallengeAnswer(body)
	if err != nil {
		return err
	}
	if !kvwire.CheckProof(a.Proof, kvwire.Proof(key, kvwire.SideAnswerer, ours, a.Challenge)) {
		return errUnauthorized
	}
	if a.Node != name {
		return fmt.Errorf("node %q answers there", a.Node)
	}
	proof := kvwire.Proof(key, kvwire.SideAsker, ours, a.Challenge)
	_, err = d.call(kvwire.TypeProof, proof[:])
	return asUnauthorized(err)
}

func asUnauthorized(err error) error {
	if kvwire.CodeOf(err) == kvwire.CodeUnauthorized {
		return fmt.Errorf("%w: %w", errUnauthorized, err)
	}
	return err
}

// send writes one request.
func (d *dataConn) send(t kvwire.Type, body []byte) error {
	d.id++
	d.out = kvwire.AppendHeader(d.out[:0], kvwire.Header{Type: t, ID: d.id, Length: uint32(len(body))})
	d.out = append(d.out, body...)
	_, err := d.c.Write(d.out)
	if cap(d.out) > 64<<10 {
		d.out = nil
	}
	return err
}

// call writes one request and reads its answer, which is valid until the next.
func (d *dataConn) call(t kvwire.Type, body []byte) ([]byte, error) {
	if err := d.send(t, body); err != nil {
		return nil, err
	}
	h, err := kvwire.ReadHeader(d.r)
	if err != nil {
		return nil, err
	}
	return d.answer(h, t)
}

// answer reads the body of an answer to a request of type t whose header has
// been read.
func (d *dataConn) answer(h kvwire.Header, t kvwire.Type) ([]byte, error) {
	if h.ID != d.id || h.Length > kvwire.MaxControl {
		return nil, kvwire.Errorf(kvwire.CodeBadFrame, "id", "a %s frame of %d bytes answers %d instead of %d", h.Type, h.Length, h.ID, d.id)
	}
	if h.Type != t|kvwire.AnswerBit && h.Type != kvwire.TypeError|kvwire.AnswerBit {
		return nil, kvwire.Errorf(kvwire.CodeBadFrame, "type", "a %s frame answers a %s", h.Type, t)
	}
	body, err := kvwire.ReadBody(d.r, h, d.in)
	if err != nil {
		return nil, err
	}
	if cap(body) <= 64<<10 {
		d.in = body[:0]
	}
	if h.Type == kvwire.TypeError|kvwire.AnswerBit {
		e, err := kvwire.ParseError(body)
		if err != nil {
			return nil, err
		}
		return nil, e
	}
	return body, nil
}

// payloadStep is how much of an object is read between two looks at the
// clock.
const payloadStep = 1 << 20

// read fills b. With stall above 0, it fails when nothing comes for so long.
func (d *dataConn) read(ctx context.Context, b []byte, stall time.Duration) error {
	for len(b) > 0 {
		step := b[:min(len(b), payloadStep)]
		if err := d.allow(ctx, stall); err != nil {
			return err
		}
		if _, err := io.ReadFull(d.r, step); err != nil {
			return err
		}
		b = b[len(step):]
	}
	return nil
}

// allow sets by when the next bytes must come.
func (d *dataConn) allow(ctx context.Context, stall time.Duration) error {
	if stall > 0 {
		_ = d.c.SetReadDeadline(time.Now().Add(stall))
	}
	// After the deadline was set: watch may have set its own just before, and
	// ctx tells.
	return ctx.Err()
}

func (d *dataConn) close() { _ = d.c.Close() }
