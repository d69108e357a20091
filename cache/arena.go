package cache

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	pageSize = 4 << 10
	// MinBudget is the smallest arena, in bytes.
	MinBudget = 1 << 20
)

// Arena is one piece of shared memory with a fixed size. This process writes
// it through a mapping that is older than its seals; whoever receives the
// descriptor can map it for reading only, and can neither shrink nor grow it
// (memfd_create(2), F_SEAL_FUTURE_WRITE in fcntl(2)).
type Arena struct {
	fd    int
	mem   []byte
	ahead struct {
		done atomic.Int64
		err  atomic.Pointer[error]
		stop chan struct{}
		wg   sync.WaitGroup
	}
}

// newArena makes an arena of size bytes rounded up to 4 KiB and starts to
// fault it in.
func newArena(size int64) (*Arena, error) {
	if size < MinBudget {
		return nil, fmt.Errorf("cannot make an arena: size %d is below %d bytes", size, MinBudget)
	}
	size = roundUp(size, pageSize)
	fd, err := unix.MemfdCreate("membrane-arena", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("cannot create arena memfd: %w", err)
	}
	a := &Arena{fd: fd}
	if err := unix.Ftruncate(fd, size); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("cannot size arena to %d bytes: %w", size, err)
	}
	a.mem, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("cannot map arena of %d bytes: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, arenaSeals()); err != nil {
		_ = unix.Munmap(a.mem)
		unix.Close(fd)
		return nil, fmt.Errorf("cannot seal arena: %w", err)
	}
	a.startPrefault()
	return a, nil
}

// FD returns the descriptor to pass to readers (SCM_RIGHTS). It stays the
// arena's: callers duplicate it if they outlive the cache.
func (a *Arena) FD() int { return a.fd }

// Size returns the size in bytes.
func (a *Arena) Size() int64 { return int64(len(a.mem)) }

// Bytes returns the n bytes at offset off, in place. They are valid for as
// long as what holds them (a lease, pin, view or slot) and the cache are.
func (a *Arena) Bytes(off, n int64) []byte { return a.mem[off : off+n : off+n] }

// Prefaulted returns how many bytes, from offset 0 on, are known to be backed
// by memory. It reaches Size unless faulting in failed (see PrefaultErr).
func (a *Arena) Prefaulted() int64 { return a.ahead.done.Load() }

// PrefaultErr returns why faulting in stopped before the end, or nil.
func (a *Arena) PrefaultErr() error {
	if p := a.ahead.err.Load(); p != nil {
		return *p
	}
	return nil
}

// close stops faulting in and closes the descriptor; it unmaps the memory
// only when nobody uses it any more.
func (a *Arena) close(unmap bool) error {
	close(a.ahead.stop)
	a.ahead.wg.Wait()
	err := unix.Close(a.fd)
	a.fd = -1
	if unmap {
		if e := unix.Munmap(a.mem); e != nil && err == nil {
			err = e
		}
		a.mem = nil
	}
	if err != nil {
		return fmt.Errorf("cannot close arena: %w", err)
	}
	return nil
}

func roundUp(n, step int64) int64 { return (n + step - 1) / step * step }
