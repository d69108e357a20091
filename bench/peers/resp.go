package peers

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strconv"
)

// respConn speaks RESP2, as every Redis server understands it.
type respConn struct {
	*link
	prefix string
	key    []byte
}

// dialRESP connects to a Redis server. Keys begin with prefix.
func dialRESP(ctx context.Context, addr, prefix string) (*respConn, error) {
	l, err := dialLink(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return &respConn{link: l, prefix: prefix}, nil
}

// command appends a command with one key and, if n >= 0, the head of a second
// argument of n bytes.
func (c *respConn) command(name string, key, n int) {
	c.key = strconv.AppendInt(append(c.key[:0], c.prefix...), int64(key), 10)
	args := 2
	if n >= 0 {
		args = 3
	}
	c.out = fmt.Appendf(c.out, "*%d\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", args, len(name), name, len(c.key), c.key)
	if n >= 0 {
		c.out = fmt.Appendf(c.out, "$%d\r\n", n)
	}
}

// Get sends one GET for each key at once.
func (c *respConn) Get(first int, dst [][]byte, got []bool) error {
	c.begin()
	for i := range dst {
		c.command("GET", first+i, -1)
	}
	if err := c.flush(); err != nil {
		return err
	}
	for i := range dst {
		n, err := c.length()
		if err != nil {
			return err
		}
		if got[i] = n >= 0; n < 0 {
			continue
		}
		if n != len(dst[i]) {
			return fmt.Errorf("key %d has %d bytes instead of %d", first+i, n, len(dst[i]))
		}
		if err := c.full(dst[i]); err != nil {
			return err
		}
		if err := c.crlf(); err != nil {
			return err
		}
	}
	return nil
}

// Set sends one SET for each value at once.
func (c *respConn) Set(first int, values [][]byte) error {
	c.begin()
	parts := make(net.Buffers, 0, 2*len(values)+1)
	ends := make([]int, 0, len(values))
	for i, v := range values {
		c.command("SET", first+i, len(v))
		ends = append(ends, len(c.out))
		c.out = append(c.out, "\r\n"...)
	}
	begin := 0
	for i, v := range values {
		parts = append(parts, c.out[begin:ends[i]], v)
		begin = ends[i]
	}
	parts = append(parts, c.out[begin:])
	if _, err := parts.WriteTo(c.c); err != nil {
		return err
	}
	for range values {
		line, err := c.line()
		if err != nil {
			return err
		}
		if !bytes.Equal(line, []byte("+OK")) {
			return fmt.Errorf("SET is answered with %q", line)
		}
	}
	return nil
}

// Drop sends one DEL for each key.
func (c *respConn) Drop(first, n int) error {
	const step = 256
	for at := 0; at < n; at += step {
		c.begin()
		for i := at; i < min(at+step, n); i++ {
			c.command("DEL", first+i, -1)
		}
		if err := c.flush(); err != nil {
			return err
		}
		for i := at; i < min(at+step, n); i++ {
			line, err := c.line()
			if err != nil {
				return err
			}
			if len(line) == 0 || line[0] != ':' {
				return fmt.Errorf("DEL is answered with %q", line)
			}
		}
	}
	return nil
}

// line reads one line without its end.
func (c *respConn) line() ([]byte, error) {
	b, err := c.r.ReadSlice('\n')
	if err != nil {
		return nil, err
	}
	return bytes.TrimRight(b, "\r\n"), nil
}

// length reads the head of a bulk string: -1 for nil.
func (c *respConn) length() (int, error) {
	b, err := c.line()
	if err != nil {
		return 0, err
	}
	if bytes.Equal(b, []byte("_")) { // RESP3
		return -1, nil
	}
	if len(b) < 2 || b[0] != '$' {
		return 0, fmt.Errorf("GET is answered with %q", b)
	}
	n, err := strconv.Atoi(string(b[1:]))
	if err != nil || n < -1 {
		return 0, fmt.Errorf("GET is answered with %q", b)
	}
	return n, nil
}

func (c *respConn) crlf() error {
	var end [2]byte
	if err := c.full(end[:]); err != nil {
		return err
	}
	if end != [2]byte{'\r', '\n'} {
		return fmt.Errorf("a bulk string ends with %q", end)
	}
	return nil
}
