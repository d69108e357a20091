package resp

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sock is the socket of one connection. Reads and writes are made with the
// system calls themselves, so that many pieces of memory go out in one of them
// and none is allocated. One goroutine reads and writes; shut may be called by
// others.
type sock struct {
	nc  *net.TCPConn
	raw syscall.RawConn

	// Arguments and results of the callbacks, which are made once.
	in      []byte
	out     []unix.Iovec
	hdr     unix.Msghdr
	wait    bool
	lanes   chan struct{}
	inLane  bool
	waits   int // in the lane
	n       int
	errno   syscall.Errno
	receive func(fd uintptr) bool
	send    func(fd uintptr) bool
}

// newSock returns the socket of a connection; lanes may be nil. What is on its
// way between two processes of one machine needs no more of a buffer than stays
// in the processor's caches; the kernel's own choice grows to megabytes.
func newSock(nc *net.TCPConn, lanes chan struct{}) (*sock, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &sock{nc: nc, raw: raw, lanes: lanes}
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

// read waits for bytes, until the read deadline.
func (s *sock) read(p []byte) (int, error) {
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

// writev writes everything, or fails when the other side takes nothing for the
// length of timeout. It changes iov.
func (s *sock) writev(iov []unix.Iovec, timeout time.Duration) error {
	s.wait = false
	limit := timeout
	for len(iov) > 0 {
		s.out = iov[:min(len(iov), maxIov)]
		err := s.raw.Write(s.send)
		s.out = nil
		switch {
		case err != nil && s.inLane && isTimeout(err):
			s.leave() // others need not wait for a slow reader
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
			s.leave()
		}
		if s.inLane {
			limit = lanePatience
		}
		if len(iov) > 0 {
			err = s.nc.SetWriteDeadline(time.Now().Add(limit))
		}
		if err != nil && !isTimeout(err) {
			return err
		}
	}
	if s.wait {
		return s.nc.SetWriteDeadline(time.Time{})
	}
	return nil
}

// enter waits for a lane: only so many long values are on their way at a time,
// so that what is copied to and from the sockets' buffers stays in the
// processor's caches. Whoever does not read gives his up.
func (s *sock) enter() {
	if s.lanes != nil {
		s.lanes <- struct{}{}
		s.inLane, s.waits = true, 0
	}
}

func (s *sock) leave() {
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

func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// shut ends both directions, whatever is under way. The owner of the socket
// closes it.
func (s *sock) shut() {
	_ = s.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	_ = s.nc.SetDeadline(time.Unix(1, 0))
}
