package hangup

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"reflect"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Every is how often a connection is looked at.
const Every = 50 * time.Millisecond

// Watch returns a context that ends when parent does, when stop is called, or
// soon after the other side has closed c, which may be one of fasthttp's
// wrappers. Nothing looks at c after stop has returned; it may be called twice,
// by any goroutine. A request that is done before [Every] costs a timer and no
// goroutine.
func Watch(parent context.Context, c net.Conn) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(parent)
	raw, ok := rawConn(c)
	if !ok {
		return ctx, cancel
	}
	w := &watch{raw: raw, cancel: cancel}
	w.mu.Lock() // look reads the timer
	w.timer = time.AfterFunc(Every, w.look)
	w.mu.Unlock()
	return ctx, w.stop
}

type watch struct {
	raw    syscall.RawConn
	cancel context.CancelFunc
	timer  *time.Timer

	mu      sync.Mutex
	stopped bool
}

func (w *watch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.stopped:
	case Gone(w.raw):
		w.cancel()
	default:
		w.timer.Reset(Every)
	}
}

// stop waits for a look that is under way.
func (w *watch) stop() {
	w.cancel()
	w.timer.Stop()
	w.mu.Lock()
	w.stopped = true
	w.mu.Unlock()
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

// Gone reports whether the other side has closed the connection, whatever it has
// sent before. A client that only sends its next request early has not.
func Gone(raw syscall.RawConn) bool {
	gone := false
	err := raw.Control(func(fd uintptr) { // a look at the bytes, as in Quiet, sees no end behind them
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0)
		gone = n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	return gone || err != nil
}

// Quiet reports whether the other side has neither closed the connection nor
// sent anything that nobody has read. It is false for a connection that is none
// of the operating system's.
func Quiet(c net.Conn) bool {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	raw, ok := rawConn(c)
	if !ok {
		return false
	}
	quiet := false
	err := raw.Control(func(fd uintptr) { // unlike Read, whatever the read deadline is
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		quiet = errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)
	})
	return quiet && err == nil
}

// ResetOnClose lets a connection be reset when it is closed, so that the other
// side does not take what it has for all there is. It does nothing for one that
// is none of the operating system's.
func ResetOnClose(c net.Conn) {
	raw, ok := rawConn(c)
	if !ok {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
}
