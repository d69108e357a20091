package listener

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// loopbackBuffer is SO_SNDBUF, which the kernel doubles: what a process may
	// ask for by default (net.core.wmem_max).
	loopbackBuffer = 208 << 10
	// lanePatience is how long a reader may take nothing before others go on,
	// laneWaits how often for one value.
	lanePatience = 5 * time.Millisecond
	laneWaits    = 32
)

// Lanes bound how many long values are on their way out at a time: a token for
// each. Nil is no bound.
type Lanes chan struct{}

// NewLanes returns one more than there are processors.
func NewLanes() Lanes { return make(Lanes, runtime.GOMAXPROCS(0)+1) }

// Sock is the socket of one connection. Reads and writes are made with the
// system calls themselves, so that many pieces of memory go out in one of them
// and none is allocated. One goroutine reads and writes; Shut may be called by
// others.
type Sock struct {
	// TCP is for deadlines and for closing.
	TCP *net.TCPConn
	raw syscall.RawConn

	// Arguments and results of the callbacks, which are made once.
	in      []byte
	out     []unix.Iovec
	hdr     unix.Msghdr
	wait    bool
	lanes   Lanes
	inLane  bool
	waits   int // in the lane
	n       int
	errno   syscall.Errno
	receive func(fd uintptr) bool
	send    func(fd uintptr) bool
}

// NewSock returns the socket of a connection; lanes may be nil. What is on its
// way between two processes of one machine needs no more of a buffer than stays
// in the processor's caches; the kernel's own choice grows to megabytes.
func NewSock(nc *net.TCPConn, lanes Lanes) (*Sock, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &Sock{TCP: nc, raw: raw, lanes: lanes}
	if a, ok := nc.RemoteAddr().(*net.TCPAddr); ok && a.IP.IsLoopback() {
		if err := nc.SetWriteBuffer(loopbackBuffer); err != nil {
			return nil, err
		}
	}
	s.receive = func(fd uintptr) bool {
		for {
			n, _, e := syscall.Syscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(unsafe.SliceData(s.in))), uintptr(len(s.in)), unix.MSG_DONTWAIT, 0, 0)
			if e == syscall.EINTR {
				continue
			}
			s.n, s.errno = int(n), e
			return e != syscall.EAGAIN
		}
	}
	s.send = func(fd uintptr) bool {
		for {
			s.hdr.Iov, s.hdr.Iovlen = unsafe.SliceData(s.out), uint64(len(s.out))
			n, _, e := syscall.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&s.hdr)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if e == syscall.EINTR {
				continue
			}
			s.n, s.errno = int(n), e
			return e != syscall.EAGAIN || !s.wait
		}
	}
	return s, nil
}

// Read waits for bytes, until the read deadline.
func (s *Sock) Read(p []byte) (int, error) {
	s.in = p
	err := s.raw.Read(s.receive)
	s.in = nil
	switch {
	case err != nil:
		return 0, err
	case s.errno != 0:
		return 0, os.NewSyscallError("recvfrom", s.errno)
	case s.n == 0:
		return 0, io.EOF
	}
	return s.n, nil
}

// Writev writes everything, or fails when the other side takes nothing for the
// length of timeout. It changes iov.
func (s *Sock) Writev(iov []unix.Iovec, timeout time.Duration) error {
	s.wait = false
	limit := timeout
	for len(iov) > 0 {
		s.out = iov[:min(len(iov), maxIov)]
		err := s.raw.Write(s.send)
		s.out = nil
		switch {
		case err != nil && s.inLane && IsTimeout(err):
			s.Leave() // others need not wait for a slow reader
			s.errno, limit = syscall.EAGAIN, timeout-lanePatience
		case err != nil:
			return err
		case s.errno == 0:
			iov = advance(iov, s.n)
			limit = timeout
			if !s.wait {
				continue
			}
		case s.errno != syscall.EAGAIN:
			return os.NewSyscallError("sendmsg", s.errno)
		}
		s.wait = true
		if s.waits++; s.inLane && s.waits > laneWaits {
			s.Leave()
		}
		if s.inLane {
			limit = lanePatience
		}
		if len(iov) > 0 {
			err = s.TCP.SetWriteDeadline(time.Now().Add(limit))
		}
		if err != nil && !IsTimeout(err) {
			return err
		}
	}
	if s.wait {
		return s.TCP.SetWriteDeadline(time.Time{})
	}
	return nil
}

// Enter waits for a lane: only so many long values are on their way at a time,
// so that what is copied to and from the sockets' buffers stays in the
// processor's caches. Whoever does not read gives his up.
func (s *Sock) Enter() {
	if s.lanes != nil {
		s.lanes <- struct{}{}
		s.inLane, s.waits = true, 0
	}
}

// Leave gives the lane back, if it has one.
func (s *Sock) Leave() {
	if s.inLane {
		s.inLane = false
		<-s.lanes
	}
}

// maxIov is the most elements that the kernel takes (IOV_MAX).
const maxIov = 1024

// advance drops the first n bytes.
func advance(iov []unix.Iovec, n int) []unix.Iovec {
	for n > 0 {
		if have := int(iov[0].Len); n < have {
			iov[0].Base = (*byte)(unsafe.Add(unsafe.Pointer(iov[0].Base), n))
			iov[0].SetLen(have - n)
			return iov
		}
		n -= int(iov[0].Len)
		iov = iov[1:]
	}
	return iov
}

// IsTimeout reports whether a read or write ended at its deadline.
func IsTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// Shut ends both directions, whatever is under way. The owner of the socket
// closes it.
func (s *Sock) Shut() {
	_ = s.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	_ = s.TCP.SetDeadline(time.Unix(1, 0))
}
