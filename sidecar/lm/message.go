package lm

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"membrane/kvwire"
)

// What a client asks for.
type command int32

const (
	put    command = 1
	get    command = 2
	exist  command = 3
	list   command = 4
	health command = 5
)

func (c command) String() string {
	switch c {
	case put:
		return "put"
	case get:
		return "get"
	case exist:
		return "exist"
	case list:
		return "list"
	case health:
		return "health"
	}
	return "unknown"
}

const (
	// MaxKey is the longest key, in bytes: what a request has room for.
	MaxKey = 150
	// MaxSkip is the longest value that is read only to be thrown away, so that
	// the connection can go on. A longer one ends it.
	MaxSkip = 1 << 30

	requestSize = 9*4 + MaxKey
	replySize   = 9 * 4

	codeSuccess = 200
	codeFail    = 400
	// What LMCache's own server says of a value that is not there.
	noFormat  = 1
	noType    = 2
	shapeSize = 4
)

// format is what a client says of a value: how its numbers lie, their type and
// the shape, padded with zeros. It is given back as it came.
type format struct {
	layout, dtype int32
	shape         [shapeSize]int32
}

// request is nine integers of 32 bits, little endian, and the key, padded with
// spaces.
type request struct {
	command command
	length  int32
	format  format
	key     []byte // in the bytes that were parsed
}

var errRequest = errors.New("cannot read a request")

// parseRequest reads a request of requestSize bytes.
func parseRequest(b []byte) (request, error) {
	if len(b) != requestSize {
		return request{}, fmt.Errorf("%w: it has %d bytes and not %d", errRequest, len(b), requestSize)
	}
	at := func(i int) int32 { return int32(binary.LittleEndian.Uint32(b[4*i:])) }
	// Integer 4 is a place, which clients leave 0.
	q := request{command: command(at(0)), length: at(1), format: format{layout: at(2), dtype: at(3)}}
	for i := range shapeSize {
		q.format.shape[i] = at(5 + i)
	}
	q.key = bytes.Trim(b[9*4:], " ")
	switch q.command {
	case put, get, exist:
		if len(q.key) == 0 {
			return request{}, fmt.Errorf("%w: it names no key", errRequest)
		}
		for _, c := range q.key {
			if c < ' ' || c == 0x7f {
				return request{}, fmt.Errorf("%w: byte %#02x in its key", errRequest, c)
			}
		}
	case list, health:
	default:
		return request{}, fmt.Errorf("%w: %d is no command", errRequest, q.command)
	}
	if q.length < 0 || q.length > MaxSkip {
		return request{}, fmt.Errorf("%w: a length of %d is not between 0 and %d", errRequest, q.length, MaxSkip)
	}
	return q, nil
}

// putReply writes a reply of replySize bytes.
func putReply(b []byte, code int32, length int, f format) {
	for i, n := range [...]int32{code, int32(length), f.layout, f.dtype, f.shape[0], f.shape[1], f.shape[2], f.shape[3], 0} {
		binary.LittleEndian.PutUint32(b[4*i:], uint32(n))
	}
}

// A value's slot begins with a header:
//
//	0   1  version, 1
//	1   1  0
//	2   2  length of the key
//	4   4  length of the header: where the value begins, a multiple of 64
//	8   4  layout of the value as its client numbers it
//	12  4  type of its numbers, likewise
//	16  16 its shape, four integers
//	32  …  the key
//
// It is part of what the checksum is taken of.
const (
	headerVersion = 1
	headerFixed   = 32
	headerStep    = 64
	maxHeader     = (headerFixed + MaxKey + headerStep - 1) / headerStep * headerStep
)

func headerSize(key []byte) int {
	return (headerFixed + len(key) + headerStep - 1) / headerStep * headerStep
}

// putHeader writes the header of a value to the beginning of its slot.
func putHeader(slot, key []byte, f format) {
	n := headerSize(key)
	clear(slot[:n])
	slot[0] = headerVersion
	binary.LittleEndian.PutUint16(slot[2:], uint16(len(key)))
	binary.LittleEndian.PutUint32(slot[4:], uint32(n))
	binary.LittleEndian.PutUint32(slot[8:], uint32(f.layout))
	binary.LittleEndian.PutUint32(slot[12:], uint32(f.dtype))
	for i, d := range f.shape {
		binary.LittleEndian.PutUint32(slot[16+4*i:], uint32(d))
	}
	copy(slot[headerFixed:], key)
}

var errHeader = errors.New("cannot read the header of a value: it is none")

// parseHeader returns the format and where the value begins.
func parseHeader(slot []byte) (format, int, error) {
	if len(slot) < headerFixed || slot[0] != headerVersion {
		return format{}, 0, errHeader
	}
	key, size := int(binary.LittleEndian.Uint16(slot[2:])), int(binary.LittleEndian.Uint32(slot[4:]))
	if key == 0 || key > MaxKey || size != (headerFixed+key+headerStep-1)/headerStep*headerStep || size > len(slot) {
		return format{}, 0, errHeader
	}
	f := format{layout: int32(binary.LittleEndian.Uint32(slot[8:])), dtype: int32(binary.LittleEndian.Uint32(slot[12:]))}
	for i := range f.shape {
		f.shape[i] = int32(binary.LittleEndian.Uint32(slot[16+4*i:]))
	}
	return f, size, nil
}

// namespace is that of all keys; form that of all values.
var (
	namespace = kvwire.Namespace(sha256.Sum256([]byte("membrane-lm-v1")))
	form      = kvwire.Form{'l', 'm', 0, 0, 0, 0, 0, 1}
	shard     = kvwire.Shard{Count: 1}
)

// hashKey names the page of a key.
func hashKey(key []byte) kvwire.Hash {
	var b [1 + MaxKey]byte
	return sha256.Sum256(append(append(b[:0], 'l'), key...))
}
