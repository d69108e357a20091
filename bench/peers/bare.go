package peers

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/valyala/fasthttp"

	"membrane/kvwire"
)

// The bare TCP copy: a request is three 32-bit numbers (first key, number of
// keys, size of a value), the answer one kvwire page frame for each key,
// written in place from memory as large as the working set. It does nothing
// that a cache has to do.
const (
	bareRequest = 12
	bareHeader  = kvwire.HeaderSize + kvwire.PageHeaderSize
	// bareMemory is how much memory the frames come from: more than any cache
	// of the processor.
	bareMemory = 256 << 20
	bareQueue  = 1 << 20 // bytes of one writev, unless one value is larger
)

// ServeBare listens on a free loopback port, prints the address on a line and
// answers requests of the bare TCP copy until stdin ends.
func ServeBare(stdin io.Reader, stdout io.Writer) error {
	memory, err := bareFrames()
	if err != nil {
		return err
	}
	return serveUntilEOF(stdin, stdout, func(c net.Conn) {
		r := bufio.NewReaderSize(c, readAhead)
		var b [bareRequest]byte
		for {
			if _, err := io.ReadFull(r, b[:]); err != nil {
				return
			}
			first, n, size := binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
			if n > kvwire.MaxBatch || size == 0 || size > bareMemory || sendBare(c, memory, int(first), int(n), int(size)) != nil {
				return
			}
		}
	})
}

// bareFrames returns memory that is all present. What is in it does not
// matter: every MiB is the same but for its number.
func bareFrames() ([]byte, error) {
	p, err := NewPayloads(1, mib)
	if err != nil {
		return nil, err
	}
	defer func() { _ = p.Close() }()
	memory := make([]byte, bareMemory)
	for at := 0; at < len(memory); at += mib {
		copy(memory[at:], p.Value(0))
		binary.LittleEndian.PutUint32(memory[at:], uint32(at))
	}
	return memory, nil
}

func sendBare(c net.Conn, memory []byte, first, n, size int) error {
	head := make([]byte, bareHeader)
	slots := len(memory) / size
	var parts net.Buffers
	queued := 0
	for i := range n {
		at := (first + i) % slots * size
		parts = append(parts, head, memory[at:at+size])
		queued += size
		if queued >= bareQueue || i == n-1 {
			bufs := parts
			if _, err := bufs.WriteTo(c); err != nil {
				return err
			}
			parts, queued = parts[:0], 0
		}
	}
	return nil
}

// ServeEmpty is an HTTP server that answers everything with nothing: what
// fasthttp itself costs. Otherwise as [ServeBare].
func ServeEmpty(stdin io.Reader, stdout io.Writer) error {
	s := fasthttp.Server{Handler: func(*fasthttp.RequestCtx) {}}
	return serveUntilEOF(stdin, stdout, func(c net.Conn) { _ = s.ServeConn(c) })
}

func serveUntilEOF(stdin io.Reader, stdout io.Writer, serve func(net.Conn)) error {
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
		c, err := l.Accept()
		if err != nil {
			return nil //nolint:nilerr // stdin has ended
		}
		go func() {
			defer func() { _ = c.Close() }()
			serve(c)
		}()
	}
}

// bareConn is the reading end.
type bareConn struct{ *link }

func dialBare(ctx context.Context, addr string) (bareConn, error) {
	l, err := dialLink(ctx, "tcp", addr)
	return bareConn{l}, err
}

// Get copies values whose bytes mean nothing.
func (c bareConn) Get(first int, dst [][]byte, got []bool) error {
	c.begin()
	for _, n := range []int{first, len(dst), len(dst[0])} {
		c.out = binary.LittleEndian.AppendUint32(c.out, uint32(n))
	}
	if err := c.flush(); err != nil {
		return err
	}
	var head [bareHeader]byte
	for i := range dst {
		if err := c.full(head[:]); err != nil {
			return err
		}
		if err := c.full(dst[i]); err != nil {
			return err
		}
		got[i] = true
	}
	return nil
}

// Set does nothing: the far end has its memory.
func (bareConn) Set(int, [][]byte) error { return nil }

// Drop does nothing.
func (bareConn) Drop(int, int) error { return nil }

var errNoBytes = errors.New("no route carries the bytes")
