package engineport

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// ListenSocket opens a Unix socket at path with mode 0660, in a directory
// that is made with mode 0750 where it is missing. A stale socket at path is
// replaced; anything else there, or a socket that somebody listens on, is
// left alone and an error.
func ListenSocket(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, fmt.Errorf("cannot make the directory of socket %q: %w", path, err)
	}
	unlock, err := lockDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("cannot listen at socket %q: %w", path, err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("cannot set the mode of socket %q: %w", path, err)
	}
	return l, nil
}

// lockDir keeps others that start at the same moment from taking the new
// socket for a stale one between its making and its listening.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("cannot open directory %q: %w", dir, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("cannot lock directory %q: %w", dir, err)
	}
	return func() { _ = f.Close() }, nil
}

func removeStale(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot look at socket %q: %w", path, err)
	}
	if st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("cannot listen at %q: something that is not a socket is there", path)
	}
	if conn, err := net.Dial("unix", path); err == nil {
		_ = conn.Close()
		return fmt.Errorf("cannot listen at socket %q: another process does", path)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("cannot remove stale socket %q: %w", path, err)
	}
	return nil
}

// peerUID returns the user that the other end of a Unix socket runs as
// (unix(7), SO_PEERCRED).
func peerUID(conn *net.UnixConn) (uint32, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, credErr); err != nil {
		return 0, fmt.Errorf("cannot read the peer's credential: %w", err)
	}
	return cred.Uid, nil
}

// mayConnect reports whether a user may use the engine socket.
func (s *Server) mayConnect(uid uint32) bool {
	return uid == 0 || int(uid) == os.Geteuid() || slices.Contains(s.cfg.UIDs, uid)
}
