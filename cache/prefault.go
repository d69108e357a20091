package cache

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// prefaultPiece is small enough that Close never waits long for one.
const prefaultPiece = 4 << 20

// startPrefault backs the arena with memory in the background, so that no
// store pays for first touch and so that memory is charged to this process.
func (a *Arena) startPrefault() {
	a.ahead.stop = make(chan struct{})
	if !guard.prefault() {
		return
	}
	a.ahead.wg.Add(1)
	go func() {
		defer a.ahead.wg.Done()
		a.prefault(populate)
	}()
}

// prefault faults in piece after piece with the given function, and by
// touching from the first piece on that the kernel does not know how to.
func (a *Arena) prefault(populate func([]byte) error) {
	size := int64(len(a.mem))
	for off := int64(0); off < size; {
		select {
		case <-a.ahead.stop:
			return
		default:
		}
		n := min(prefaultPiece, size-off)
		if err := populate(a.mem[off : off+n]); err != nil {
			if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) {
				err = fmt.Errorf("cannot fault in arena at offset %d: %w", off, err)
				a.ahead.err.Store(&err)
				return
			}
			populate = touch
			continue
		}
		off += n
		a.ahead.done.Store(off)
	}
}

func populate(b []byte) error { return unix.Madvise(b, unix.MADV_POPULATE_WRITE) }

// touch reads rather than writes: stores run at the same time, and a read of
// a hole in shared memory allocates it just as well.
func touch(b []byte) error {
	var sum byte
	for i := 0; i < len(b); i += pageSize {
		sum |= b[i]
	}
	runtime.KeepAlive(sum)
	return nil
}
