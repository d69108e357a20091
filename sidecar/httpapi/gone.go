package httpapi

import (
	"context"
	"errors"
	"net"
	"reflect"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/sys/unix"

	"membrane/sidecar/disagg"
)

// goneEvery is how often a connection is looked at while a request is under
// way.
const goneEvery = 50 * time.Millisecond

// whileConnected returns a context that ends when the client has gone away,
// which fasthttp does not tell: nobody reads the connection while a handler
// runs. The body must have been read. stop ends the watch and may be called
// twice.
func (s *Server) whileConnected(c *fasthttp.RequestCtx) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(s.ctx)
	raw, ok := rawConn(c.Conn())
	if !ok {
		return ctx, cancel
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		ticker := time.NewTicker(goneEvery)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			if gone(raw) {
				cancel()
				return
			}
		}
	})
	return ctx, func() {
		cancel()
		wg.Wait() // the connection is fasthttp's again
	}
}

// rawConn returns the connection below fasthttp's wrapper, whose type is not
// exported; its field Conn is.
func rawConn(c net.Conn) (syscall.RawConn, bool) {
	for c != nil {
		if sc, ok := c.(syscall.Conn); ok {
			raw, err := sc.SyscallConn()
			return raw, err == nil
		}
		v := reflect.Indirect(reflect.ValueOf(c))
		if v.Kind() != reflect.Struct {
			return nil, false
		}
		field := v.FieldByName("Conn")
		if !field.IsValid() || !field.CanInterface() {
			return nil, false
		}
		c, _ = field.Interface().(net.Conn)
	}
	return nil, false
}

// gone reports whether the other side has closed the connection. A client that
// only sends its next request early has not.
func gone(raw syscall.RawConn) (closed bool) {
	err := raw.Control(func(fd uintptr) { // unlike Read, whatever the read deadline is
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case err == nil:
			closed = n == 0
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		default:
			closed = true
		}
	})
	return closed || err != nil
}

func asDisagg(err error) (*disagg.Error, bool) {
	var e *disagg.Error
	return e, errors.As(err, &e)
}
