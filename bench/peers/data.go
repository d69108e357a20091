package peers

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"membrane/kvwire"
)

// Payloads are the values of one size that a run stores and reads: bytes that
// do not compress, made before anything is timed, with their checksums. They
// are not changed afterwards and may be read by any goroutine.
type Payloads struct {
	// Size is the length of every value, in bytes.
	Size int
	// Sums holds the XXH3-64 checksum of each value.
	Sums []uint64

	fd   int
	data []byte
}

// NewPayloads makes n values of size bytes in a memfd that is all present.
// Free it with Close.
func NewPayloads(n, size int) (*Payloads, error) {
	if n < 1 || size < 1 {
		return nil, fmt.Errorf("cannot make %d payloads of %d bytes: both must be at least 1", n, size)
	}
	fd, err := unix.MemfdCreate("membrane-peers", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("cannot make a memfd: %w", err)
	}
	p := &Payloads{Size: size, Sums: make([]uint64, n), fd: fd}
	if err := unix.Ftruncate(fd, int64(n)*int64(size)); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("cannot size a memfd to %d values of %d bytes: %w", n, size, err)
	}
	p.data, err = unix.Mmap(fd, 0, n*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("cannot map %d values of %d bytes: %w", n, size, err)
	}
	var wg sync.WaitGroup
	workers := runtime.GOMAXPROCS(0)
	for w := range workers {
		wg.Go(func() {
			for i := w; i < n; i += workers {
				var seed [32]byte
				seed[0], seed[1], seed[2], seed[3] = byte(i), byte(i>>8), byte(i>>16), byte(i>>24)
				b := p.data[i*size : (i+1)*size]
				_, _ = rand.NewChaCha8(seed).Read(b) // never fails
				p.Sums[i] = uint64(kvwire.Sum(b))
			}
		})
	}
	wg.Wait()
	return p, nil
}

// Len returns how many values there are.
func (p *Payloads) Len() int { return len(p.Sums) }

// Value returns the bytes that key stands for. Keys beyond the last value
// begin again at the first.
func (p *Payloads) Value(key int) []byte {
	i := key % len(p.Sums)
	return p.data[i*p.Size : (i+1)*p.Size : (i+1)*p.Size]
}

// Sum returns the checksum of what key stands for.
func (p *Payloads) Sum(key int) uint64 { return p.Sums[key%len(p.Sums)] }

// Path names the memfd to another process of this user.
func (p *Payloads) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", unix.Getpid(), p.fd) }

// Close frees the memory.
func (p *Payloads) Close() error {
	return errors.Join(unix.Munmap(p.data), unix.Close(p.fd))
}
