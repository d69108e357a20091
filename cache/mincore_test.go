package cache

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mincore asks which pages of b are resident.
func mincore(b, out []byte) (int, error) {
	_, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(unsafe.Pointer(&out[0])))
	if e != 0 {
		return 0, e
	}
	return len(b), nil
}
