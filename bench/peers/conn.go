package peers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// Conn is one stream's connection to a system: what differs between systems.
// It is used by one goroutine at a time. Keys are numbers; each system turns
// them into names of its own.
type Conn interface {
	// Get reads the values of the keys from first on, one for each of dst, in
	// one request where the protocol has one. It fills dst and got: whether the
	// system has that key.
	Get(first int, dst [][]byte, got []bool) error
	// Set stores the values under the keys from first on and returns once the
	// system has acknowledged them.
	Set(first int, values [][]byte) error
	// Drop forgets n keys from first on. It may forget more of this size.
	Drop(first, n int) error
	// Close ends the connection.
	Close() error
}

// errNoDrop says that a protocol cannot delete.
var errNoDrop = errors.New("the protocol cannot delete")

// MixedUpError says that a system answered with bytes that are not those of
// the key.
type MixedUpError struct {
	Key       int
	Got, Want uint64
}

// Error returns the key and both sums.
func (e *MixedUpError) Error() string {
	return fmt.Sprintf("key %d has checksum %016x instead of %016x", e.Key, e.Got, e.Want)
}

// ioTime is how long one request may take. Only a system that hangs takes it.
const ioTime = 60 * time.Second

// readAhead is what a connection's buffer holds: an answer's head, and little
// of the payload, which is read where it belongs.
const readAhead = 512

// link is a TCP or Unix connection with a small read buffer, the same under
// every protocol.
type link struct {
	c   net.Conn
	r   *bufio.Reader
	out []byte
}

func dialLink(ctx context.Context, network, addr string) (*link, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("cannot reach %q: %w", addr, err)
	}
	return &link{c: c, r: bufio.NewReaderSize(c, readAhead)}, nil
}

// begin gives the next request its time.
func (l *link) begin() {
	l.out = l.out[:0]
	_ = l.c.SetDeadline(time.Now().Add(ioTime))
}

// flush sends what is in out, and bodies from where they are.
func (l *link) flush(bodies ...[]byte) error {
	if len(bodies) == 0 {
		_, err := l.c.Write(l.out)
		return err
	}
	parts := append(net.Buffers{l.out}, bodies...)
	_, err := parts.WriteTo(l.c)
	return err
}

func (l *link) full(b []byte) error {
	_, err := io.ReadFull(l.r, b)
	return err
}

// Close ends the connection.
func (l *link) Close() error { return l.c.Close() }
