package peers

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"membrane/kvwire"
)

// KVB1 is kvblockd's protocol: frames of a 64-byte header and a payload. Only
// what a client needs for reading, writing and deleting batches is here.
const (
	kvbHeader = 64
	kvbHello  = 0x01
	kvbGet    = 0x03
	kvbPut    = 0x04
	kvbDelete = 0x07

	kvbResponse = 0x0001
	kvbMore     = 0x0002
	kvbFatal    = 0x0004
	kvbForce    = 0x0008
	kvbBegin    = 0 << 4
	kvbChunk    = 1 << 4
	kvbCommit   = 2 << 4

	kvbOK     = 0x00
	kvbExists = 0x01
	kvbMiss   = 0x10
	kvbGone   = 0x11

	kvbToken      = "bench-token"
	kvbNamespace  = "bench"
	kvbDescriptor = 16
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// kvbConn speaks KVB1 with one request under way.
type kvbConn struct {
	*link
	namespace uint32
	id        uint64
	window    int64 // bytes that may be sent before the server grants more
	prefix    string
	scratch   []byte
}

type kvbFrame struct {
	op     byte
	flags  uint16
	id     uint64
	length int
}

// dialKVB connects and says hello.
func dialKVB(ctx context.Context, addr, prefix string) (*kvbConn, error) {
	l, err := dialLink(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &kvbConn{link: l, prefix: prefix}
	if err := c.hello(); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("cannot greet kvblockd at %q: %w", addr, err)
	}
	return c, nil
}

func (c *kvbConn) hello() error {
	const name = "membrane-bench"
	body := []byte{1, 1, 0, 0}
	body = binary.LittleEndian.AppendUint64(body, 0) // no optional features
	body = binary.LittleEndian.AppendUint32(body, 512)
	body = binary.LittleEndian.AppendUint32(body, 256<<20)
	body = binary.LittleEndian.AppendUint64(body, 0)
	for _, n := range []int{len(kvbToken), len(kvbNamespace), len(name), 0} {
		body = binary.LittleEndian.AppendUint16(body, uint16(n))
	}
	body = append(body, kvbToken+kvbNamespace+name...)
	for len(body)%8 != 0 {
		body = append(body, 0)
	}
	c.begin()
	c.id++
	c.frame(kvbHello, 0, nil, len(body))
	if err := c.flush(body); err != nil {
		return err
	}
	f, b, err := c.answer(kvbHello)
	if err != nil {
		return err
	}
	if b[0] != kvbOK || len(b) < 44 {
		return fmt.Errorf("hello is answered with status %#02x in %d bytes", b[0], f.length)
	}
	c.namespace = binary.LittleEndian.Uint32(b[32:])
	c.window = int64(binary.LittleEndian.Uint32(b[36:]))
	return nil
}

// frame appends a header for a payload of n bytes.
func (c *kvbConn) frame(op byte, flags uint16, key *[32]byte, n int) {
	at := len(c.out)
	c.out = append(c.out, 'K', 'V', 'B', '1', 1, op)
	c.out = binary.LittleEndian.AppendUint16(c.out, flags)
	c.out = binary.LittleEndian.AppendUint32(c.out, c.namespace)
	c.out = binary.LittleEndian.AppendUint32(c.out, 0)
	c.out = binary.LittleEndian.AppendUint64(c.out, c.id)
	if key == nil {
		key = &[32]byte{}
	}
	c.out = append(c.out, key[:]...)
	c.out = binary.LittleEndian.AppendUint32(c.out, uint32(n))
	c.out = binary.LittleEndian.AppendUint32(c.out, crc32.Checksum(c.out[at:], castagnoli))
	if op != kvbHello {
		c.window -= int64(n)
	}
}

// next reads a frame's header and takes what it grants.
func (c *kvbConn) next() (kvbFrame, error) {
	var h [kvbHeader]byte
	if err := c.full(h[:]); err != nil {
		return kvbFrame{}, err
	}
	if string(h[:4]) != "KVB1" || binary.LittleEndian.Uint32(h[60:]) != crc32.Checksum(h[:60], castagnoli) {
		return kvbFrame{}, fmt.Errorf("a frame begins with %x", h[:8])
	}
	c.window += int64(binary.LittleEndian.Uint32(h[12:]))
	f := kvbFrame{op: h[5], flags: binary.LittleEndian.Uint16(h[6:]), id: binary.LittleEndian.Uint64(h[16:]), length: int(binary.LittleEndian.Uint32(h[56:]))}
	if f.flags&kvbFatal != 0 {
		return f, fmt.Errorf("kvblockd ends the connection (operation %#02x)", f.op)
	}
	return f, nil
}

// head reads frames up to the next answer to this request, whose payload
// follows.
func (c *kvbConn) head(op byte) (kvbFrame, error) {
	for {
		f, err := c.next()
		if err != nil {
			return f, err
		}
		if f.op == op && f.flags&kvbResponse != 0 && f.id == c.id && f.length >= 8 {
			return f, nil
		}
		if f.op != 0 {
			return f, fmt.Errorf("a frame of operation %#02x and id %d instead of an answer to %#02x, %d", f.op, f.id, op, c.id)
		}
		if err := c.full(c.room(f.length)); err != nil { // a grant of credit
			return f, err
		}
	}
}

// room returns n bytes that are valid until the next call.
func (c *kvbConn) room(n int) []byte {
	if cap(c.scratch) < n {
		c.scratch = make([]byte, n)
	}
	return c.scratch[:n]
}

// answer reads a whole answer, which is at least eight bytes long.
func (c *kvbConn) answer(op byte) (kvbFrame, []byte, error) {
	f, err := c.head(op)
	if err != nil {
		return f, nil, err
	}
	if f.length > kvwire.MaxControl {
		return f, nil, fmt.Errorf("an answer to %#02x has %d bytes", op, f.length)
	}
	b := c.room(f.length)
	return f, b, c.full(b)
}

func (c *kvbConn) name(key int) [32]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%s%d", c.prefix, key))
}

// keys appends a batch request for n keys.
func (c *kvbConn) keys(op byte, flags uint16, first, n int) {
	c.id++
	c.frame(op, flags, nil, 8+32*n)
	c.out = binary.LittleEndian.AppendUint32(c.out, uint32(n))
	c.out = binary.LittleEndian.AppendUint32(c.out, 0)
	for i := range n {
		k := c.name(first + i)
		c.out = append(c.out, k[:]...)
	}
}

// Get is one BATCH_GET. The sums that the server sends are not looked at: the
// loop computes the payloads' own.
func (c *kvbConn) Get(first int, dst [][]byte, got []bool) error {
	c.begin()
	c.keys(kvbGet, 0, first, len(dst))
	if err := c.flush(); err != nil {
		return err
	}
	for at := 0; ; {
		f, err := c.head(kvbGet)
		if err != nil {
			return err
		}
		n, err := c.getFrame(f, first, at, dst, got)
		if err != nil {
			return err
		}
		at += n
		if f.flags&kvbMore == 0 {
			if at != len(dst) {
				return fmt.Errorf("%d of %d keys are answered", at, len(dst))
			}
			return nil
		}
	}
}

// getFrame reads the payload of one frame of a BATCH_GET's answer.
func (c *kvbConn) getFrame(f kvbFrame, first, at int, dst [][]byte, got []bool) (int, error) {
	var b [16]byte
	if err := c.full(b[:8]); err != nil {
		return 0, err
	}
	if b[0] != kvbOK {
		return 0, fmt.Errorf("BATCH_GET is answered with status %#02x", b[0])
	}
	if err := c.full(b[8:]); err != nil {
		return 0, err
	}
	n := int(binary.LittleEndian.Uint32(b[4:]))
	if int(binary.LittleEndian.Uint32(b[8:])) != at || n > len(dst)-at {
		return 0, fmt.Errorf("an answer for %d keys from %d on does not fit", n, at)
	}
	descriptors := c.room(n * kvbDescriptor)
	if err := c.full(descriptors); err != nil {
		return 0, err
	}
	for i := range n {
		d := descriptors[i*kvbDescriptor:]
		length := int(binary.LittleEndian.Uint32(d[4:]))
		if got[at+i] = d[0] == kvbOK; !got[at+i] {
			if d[0] != kvbMiss && d[0] != kvbGone {
				return 0, fmt.Errorf("key %d has status %#02x", first+at+i, d[0])
			}
			continue
		}
		if length != len(dst[at+i]) {
			return 0, fmt.Errorf("key %d has %d bytes instead of %d", first+at+i, length, len(dst[at+i]))
		}
		if err := c.full(dst[at+i]); err != nil {
			return 0, err
		}
	}
	_ = f
	return n, nil
}

// Set streams the values, each begun, sent and committed without waiting in
// between.
func (c *kvbConn) Set(first int, values [][]byte) error {
	for i, v := range values {
		c.begin()
		if err := c.put(c.name(first+i), v); err != nil {
			return fmt.Errorf("key %d: %w", first+i, err)
		}
	}
	return nil
}

func (c *kvbConn) put(key [32]byte, v []byte) error {
	sum := uint64(kvwire.Sum(v))
	c.id++
	c.frame(kvbPut, kvbBegin, &key, 24)
	c.out = binary.LittleEndian.AppendUint32(c.out, uint32(len(v)))
	c.out = binary.LittleEndian.AppendUint32(c.out, 0)
	c.out = binary.LittleEndian.AppendUint64(c.out, sum)
	c.out = binary.LittleEndian.AppendUint64(c.out, 0)
	c.frame(kvbPut, kvbChunk, &key, len(v))
	if err := c.flush(v); err != nil {
		return err
	}
	c.out = c.out[:0]
	c.frame(kvbPut, kvbCommit, &key, 8)
	c.out = binary.LittleEndian.AppendUint64(c.out, sum)
	if err := c.flush(); err != nil {
		return err
	}
	_, b, err := c.answer(kvbPut)
	if err != nil {
		return err
	}
	begun := b[0]
	if _, b, err = c.answer(kvbPut); err != nil {
		return err
	}
	switch {
	case begun == kvbExists, b[0] == kvbOK, b[0] == kvbExists:
	default:
		return fmt.Errorf("put is answered with status %#02x, then %#02x", begun, b[0])
	}
	// Whoever has nothing to spend waits for a grant.
	for c.window <= 0 {
		f, err := c.next()
		if err != nil {
			return err
		}
		if err := c.full(c.room(f.length)); err != nil {
			return err
		}
	}
	return nil
}

// Drop deletes also what is leased.
func (c *kvbConn) Drop(first, n int) error {
	const step = 256
	for at := 0; at < n; at += step {
		c.begin()
		c.keys(kvbDelete, kvbForce, first+at, min(step, n-at))
		if err := c.flush(); err != nil {
			return err
		}
		_, b, err := c.answer(kvbDelete)
		if err != nil {
			return err
		}
		if b[0] != kvbOK {
			return fmt.Errorf("DELETE is answered with status %#02x", b[0])
		}
	}
	return nil
}
