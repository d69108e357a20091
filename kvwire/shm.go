package kvwire

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// SendWithFiles writes one whole frame to a Unix socket together with file
// descriptors, which arrive with the frame's first byte.
func SendWithFiles(conn *net.UnixConn, frame []byte, fds ...int) error {
	n, _, err := conn.WriteMsgUnix(frame, unix.UnixRights(fds...), nil)
	if err == nil && n < len(frame) {
		_, err = conn.Write(frame[n:])
	}
	return err
}

// readHeaderWithFiles reads one frame header and the file descriptors that
// come with it, at most two. The caller owns the descriptors.
func readHeaderWithFiles(conn *net.UnixConn) (Header, []int, error) {
	var b [HeaderSize]byte
	oob := make([]byte, unix.CmsgSpace(2*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(b[:], oob)
	if err != nil {
		return Header{}, nil, err
	}
	fds, err := parseFiles(oob[:oobn])
	if err != nil {
		return Header{}, nil, err
	}
	for n < HeaderSize {
		k, err := conn.Read(b[n:])
		if err != nil {
			closeAll(fds)
			return Header{}, nil, err
		}
		n += k
	}
	h, err := ParseHeader(b[:])
	if err != nil {
		closeAll(fds)
		return h, nil, err
	}
	return h, fds, nil
}

func parseFiles(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("cannot parse control message: %w", err)
	}
	var fds []int
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			closeAll(fds)
			return nil, fmt.Errorf("cannot parse file descriptors: %w", err)
		}
		for _, fd := range got {
			unix.CloseOnExec(fd)
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// mapFile maps size bytes of fd shared and closes fd.
func mapFile(fd int, size int64, writable, populate bool) ([]byte, error) {
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("cannot stat shared memory: %w", err)
	}
	if st.Size < size {
		return nil, fmt.Errorf("cannot map %d bytes of shared memory: it has %d", size, st.Size)
	}
	prot, flags := unix.PROT_READ, unix.MAP_SHARED
	if writable {
		prot |= unix.PROT_WRITE
	}
	if populate {
		flags |= unix.MAP_POPULATE
	}
	b, err := unix.Mmap(fd, 0, int(size), prot, flags)
	if err != nil {
		return nil, fmt.Errorf("cannot map %d bytes of shared memory: %w", size, err)
	}
	return b, nil
}
