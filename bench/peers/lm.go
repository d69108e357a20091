package peers

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
)

// The lm:// protocol of LMCache's server: requests of nine 32-bit numbers and a
// key of 150 bytes, answers of nine numbers.
const (
	lmPut   = 1
	lmGet   = 2
	lmExist = 3

	lmOK   = 200
	lmFail = 400

	lmKey     = 150
	lmRequest = 9*4 + lmKey
	lmAnswer  = 9 * 4

	lmFormat = 4 // bytes, whose shape is their number
	lmUint8  = 6
)

// lmConn speaks lm://. Its server keeps everything for ever, so keys that are
// written come round after ring of them.
type lmConn struct {
	*link
	model string
	ring  int
}

// dialLM connects to an lm:// server. Keys are of the given model, which has no
// "@" in its name.
func dialLM(ctx context.Context, addr, model string, ring int) (*lmConn, error) {
	l, err := dialLink(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return &lmConn{link: l, model: model, ring: ring}, nil
}

func (c *lmConn) request(command, key, length int) {
	if key >= writeKeys {
		key = writeKeys + (key-writeKeys)%c.ring
	}
	for _, n := range []int{command, length, lmFormat, lmUint8, 0, length, 0, 0, 0} {
		c.out = binary.LittleEndian.AppendUint32(c.out, uint32(n))
	}
	at := len(c.out)
	c.out = fmt.Appendf(c.out, "%s@1@0@%x@uint8", c.model, key+1)
	c.out = append(c.out, bytes.Repeat([]byte(" "), lmKey-(len(c.out)-at))...)
}

// answer returns whether the server has the key, and its value's length.
func (c *lmConn) answer() (bool, int, error) {
	var b [lmAnswer]byte
	if err := c.full(b[:]); err != nil {
		return false, 0, err
	}
	switch code := binary.LittleEndian.Uint32(b[:]); code {
	case lmOK:
		return true, int(binary.LittleEndian.Uint32(b[4:])), nil
	case lmFail:
		return false, 0, nil
	default:
		return false, 0, fmt.Errorf("the lm:// server answers with code %d", code)
	}
}

// Get asks for the keys one after the other: the protocol has no batches, and
// its client has one request under way on a connection.
func (c *lmConn) Get(first int, dst [][]byte, got []bool) error {
	for i, d := range dst {
		c.begin()
		c.request(lmGet, first+i, 0)
		if err := c.flush(); err != nil {
			return err
		}
		ok, n, err := c.answer()
		if err != nil {
			return err
		}
		if got[i] = ok; !ok {
			continue
		}
		if n != len(d) {
			return fmt.Errorf("key %d has %d bytes instead of %d", first+i, n, len(d))
		}
		if err := c.full(d); err != nil {
			return err
		}
	}
	return nil
}

// Set puts the values. The server does not acknowledge a put, so the last one
// is asked for.
func (c *lmConn) Set(first int, values [][]byte) error {
	for i, v := range values {
		c.begin()
		c.request(lmPut, first+i, len(v))
		if err := c.flush(v); err != nil {
			return err
		}
	}
	c.begin()
	c.request(lmExist, first+len(values)-1, 0)
	if err := c.flush(); err != nil {
		return err
	}
	ok, _, err := c.answer()
	if err == nil && !ok {
		err = fmt.Errorf("key %d was put and is not there", first+len(values)-1)
	}
	return err
}

// Drop is not in the protocol.
func (c *lmConn) Drop(int, int) error { return errNoDrop }
