package bench

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"membrane/kvwire"
)

// copier measures memcpy as docs/benchmarks.md defines it: one thread, from a
// memfd to a cold destination as large, both prefaulted.
type copier struct {
	src, dst []byte
	at       int
}

func newCopier(size int) (*copier, error) {
	src, err := newMemfd(size)
	if err != nil {
		return nil, err
	}
	c := &copier{src: src}
	if c.dst, err = newDestination(size); err != nil {
		_ = c.close()
		return nil, err
	}
	fill(c.src, 1)
	copy(c.dst, c.src)
	return c, nil
}

// newMemfd returns shared memory that is all present, as a sidecar's arena is.
// Free it with unix.Munmap.
func newMemfd(size int) ([]byte, error) {
	fd, err := unix.MemfdCreate("membrane-bench", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("cannot make a memfd: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, fmt.Errorf("cannot size a memfd to %d bytes: %w", size, err)
	}
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("cannot map %d bytes: %w", size, err)
	}
	return b, nil
}

// newDestination returns private memory that is all present. Free it with
// unix.Munmap.
func newDestination(size int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("cannot map %d bytes: %w", size, err)
	}
	return b, nil
}

// run copies n bytes in pieces and returns GB/s. Successive runs go on where
// the last one ended, so that caches do not help.
func (c *copier) run(n, piece int) float64 {
	begin := time.Now()
	for done := 0; done < n; done += piece {
		if c.at+piece > len(c.src) {
			c.at = 0
		}
		copy(c.dst[c.at:c.at+piece], c.src[c.at:c.at+piece])
		c.at += piece
	}
	return gbs(n, time.Since(begin))
}

func (c *copier) close() error {
	err := unix.Munmap(c.src)
	if c.dst != nil {
		if e := unix.Munmap(c.dst); err == nil {
			err = e
		}
	}
	return err
}

func gbs(n int, d time.Duration) float64 { return float64(n) / d.Seconds() / 1e9 }

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// fill writes bytes that do not compress and differ by seed (xorshift).
func fill(b []byte, seed uint64) {
	x := seed*0x9E3779B97F4A7C15 + 1
	for i := 0; i+8 <= len(b); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i], b[i+1], b[i+2], b[i+3] = byte(x), byte(x>>8), byte(x>>16), byte(x>>24)
		b[i+4], b[i+5], b[i+6], b[i+7] = byte(x>>32), byte(x>>40), byte(x>>48), byte(x>>56)
	}
}

// bareChain hashes the tokens as a chain of pages with nothing around it, and
// returns the time.
func bareChain(tokens []byte, pageTokens int) time.Duration {
	page := pageTokens * 4
	buf := make([]byte, kvwire.HashSize+page)
	begin := time.Now()
	for at := 0; at+page <= len(tokens); at += page {
		copy(buf[kvwire.HashSize:], tokens[at:at+page])
		sum := sha256.Sum256(buf)
		copy(buf, sum[:])
	}
	return time.Since(begin)
}

// FrameSource listens on a free loopback port, prints the address, and sends
// frames of the size that each connection asks for (two numbers, size and
// count, as text on a line) until stdin ends. It is the far end of the bare TCP
// copy and runs as a process of its own. Like the pages of a cache, successive
// frames come from different places of memory bytes of a memfd, so that the
// processor's caches do not hold them.
func FrameSource(stdin io.Reader, stdout io.Writer, memory int) error {
	from, err := newMemfd(memory)
	if err != nil {
		return err
	}
	fill(from, 1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("cannot listen: %w", err)
	}
	fmt.Fprintln(stdout, l.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		_ = l.Close()
	}()
	for {
		conn, err := l.Accept()
		if err != nil {
			return nil //nolint:nilerr // stdin has ended
		}
		go sendFrames(conn, from)
	}
}

func sendFrames(conn net.Conn, from []byte) {
	defer func() { _ = conn.Close() }()
	r := bufio.NewReader(conn)
	at := 0
	for {
		var size, count int
		if _, err := fmt.Fscanln(r, &size, &count); err != nil || size < 1 || size > len(from) {
			return
		}
		header := kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypePage, Length: uint32(size)})
		for range count {
			if at+size > len(from) {
				at = 0
			}
			parts := net.Buffers{header, from[at : at+size]}
			if _, err := parts.WriteTo(conn); err != nil {
				return
			}
			at += size
		}
	}
}

// tcpCopier receives frames from a [FrameSource]. Like copier, it goes on in
// its destination where the last run ended.
type tcpCopier struct {
	conn net.Conn
	dst  []byte
	at   int
}

// run receives count frames of the given size and returns GB/s.
func (c *tcpCopier) run(size, count int) (float64, error) {
	begin := time.Now()
	if _, err := fmt.Fprintf(c.conn, "%d %d\n", size, count); err != nil {
		return 0, fmt.Errorf("cannot ask for frames: %w", err)
	}
	var header [kvwire.HeaderSize]byte
	for range count {
		if c.at+size > len(c.dst) {
			c.at = 0
		}
		if _, err := io.ReadFull(c.conn, header[:]); err != nil {
			return 0, fmt.Errorf("cannot read a frame: %w", err)
		}
		if _, err := io.ReadFull(c.conn, c.dst[c.at:c.at+size]); err != nil {
			return 0, fmt.Errorf("cannot read a frame: %w", err)
		}
		c.at += size
	}
	return gbs(size*count, time.Since(begin)), nil
}

// executable returns the path of this binary, which is also the sidecars'.
func executable() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("cannot find this binary: %w", err)
	}
	return path, nil
}
