package kvwire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Version is the version of the protocol that this package speaks. A frame of
// another version is answered with [CodeVersion] and the connection is closed.
const Version = 1

// HeaderSize is the size of a frame header, in bytes.
const HeaderSize = 16

const lengthAt = 12

var magic = [4]byte{'M', 'B', 'R', 'N'}

// Type says what a frame's body is. An answer has the type of its request with
// the high bit set; an error answers any request.
type Type uint8

// The types. Engine and localhost listeners speak the first group, the data
// port the second.
const (
	TypeHello    Type = 0x01
	TypeRegister Type = 0x02
	TypePing     Type = 0x03
	TypeMatch    Type = 0x04
	TypeExtend   Type = 0x05
	TypeLease    Type = 0x06
	TypeRelease  Type = 0x07
	TypeReserve  Type = 0x08
	TypeCommit   Type = 0x09
	TypeDrop     Type = 0x0A
	TypeReset    Type = 0x0B
	TypeStats    Type = 0x0C
	TypeRead     Type = 0x0D
	TypeWrite    Type = 0x0E
	// TypeMatchHashes is a match of pages that the asker names by their hashes.
	TypeMatchHashes Type = 0x0F

	TypeChallenge Type = 0x20
	TypeProof     Type = 0x21
	TypeBatchRead Type = 0x22
	TypeDirectory Type = 0x23
	TypeCheck     Type = 0x24
	TypeManifest  Type = 0x25
	TypeAwait     Type = 0x26
	TypeQueues    Type = 0x27
	TypeForms     Type = 0x28

	// TypePage carries one page of a batch read or of an inline read.
	TypePage Type = 0x40

	// TypeError answers a request that failed.
	TypeError Type = 0x7F

	// AnswerBit marks an answer.
	AnswerBit Type = 0x80
)

var typeNames = map[Type]string{
	TypeHello: "hello", TypeRegister: "register", TypePing: "ping", TypeMatch: "match", TypeExtend: "extend",
	TypeLease: "lease", TypeRelease: "release", TypeReserve: "reserve", TypeCommit: "commit", TypeDrop: "drop",
	TypeReset: "reset", TypeStats: "stats", TypeRead: "read", TypeWrite: "write", TypeMatchHashes: "match_hashes", TypeChallenge: "challenge",
	TypeProof: "proof", TypeBatchRead: "batch_read", TypeDirectory: "directory",
	TypeCheck: "check", TypeManifest: "manifest", TypeAwait: "await", TypeQueues: "queues", TypeForms: "forms", TypePage: "page", TypeError: "error",
}

// String returns the type's name, with "_answer" behind it for answers.
func (t Type) String() string {
	name, ok := typeNames[t&^AnswerBit]
	switch {
	case !ok:
		return fmt.Sprintf("type(%#02x)", uint8(t))
	case t&AnswerBit != 0:
		return name + "_answer"
	}
	return name
}

// Header is the fixed part in front of every frame's body.
//
//	offset  size  field
//	0       4     magic "MBRN"
//	4       1     version
//	5       1     type
//	6       2     flags, zero
//	8       4     id: chosen by the asker, repeated in every answer
//	12      4     length of the body, in bytes
type Header struct {
	Type   Type
	ID     uint32
	Length uint32
}

// AppendHeader appends the header in wire form.
func AppendHeader(b []byte, h Header) []byte {
	b = append(b, magic[:]...)
	b = append(b, Version, byte(h.Type), 0, 0)
	b = binary.LittleEndian.AppendUint32(b, h.ID)
	return binary.LittleEndian.AppendUint32(b, h.Length)
}

// ParseHeader decodes a header and checks magic, version, flags and the limit
// of the type's body. b must hold HeaderSize bytes.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, Errorf(CodeBadFrame, "header", "%d bytes instead of %d", len(b), HeaderSize)
	}
	if [4]byte(b[:4]) != magic {
		return Header{}, Errorf(CodeBadFrame, "magic", "%q is not %q", b[:4], magic[:])
	}
	h := Header{Type: Type(b[5]), ID: binary.LittleEndian.Uint32(b[8:]), Length: binary.LittleEndian.Uint32(b[12:])}
	if b[4] != Version {
		return h, Errorf(CodeVersion, "version", "%d is not spoken here, %d is", b[4], Version)
	}
	if b[6] != 0 || b[7] != 0 {
		return h, Errorf(CodeBadFrame, "flags", "%#02x%02x are not defined", b[7], b[6])
	}
	if limit := h.Type.limit(); guard.frameLimit() && h.Length > limit {
		return h, Errorf(CodeTooLarge, "length", "a %s frame of %d bytes is above %d", h.Type, h.Length, limit)
	}
	return h, nil
}

// limit returns the longest body of a type, in bytes.
func (t Type) limit() uint32 {
	switch t {
	case TypePage, TypeWrite:
		return MaxObject + PageHeaderSize
	case TypeHello, TypeRegister, TypeChallenge, TypeProof, TypeReset, TypeForms, TypeError, TypeAwait,
		TypeHello | AnswerBit, TypeRegister | AnswerBit, TypeStats | AnswerBit, TypeForms | AnswerBit, TypeError | AnswerBit:
		return MaxJSON
	case TypePing, TypeStats, TypeQueues:
		return 0
	}
	return MaxControl
}

// ReadFrame reads one frame of at most a control message's length. The body is
// read into buf where it fits, and is valid until buf is used again. Frames
// that carry a page are refused: read their header with [ReadHeader] and their
// payload where it belongs.
func ReadFrame(r io.Reader, buf []byte) (Header, []byte, error) {
	h, err := ReadHeader(r)
	if err != nil {
		return h, nil, err
	}
	if h.Length > MaxControl {
		return h, nil, Errorf(CodeTooLarge, "length", "a %s frame of %d bytes is above %d", h.Type, h.Length, MaxControl)
	}
	body, err := ReadBody(r, h, buf)
	return h, body, err
}

// ReadHeader reads one frame header.
func ReadHeader(r io.Reader) (Header, error) {
	var b [HeaderSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return Header{}, err
	}
	return ParseHeader(b[:])
}

// bodyStep bounds what a length alone can make us allocate: a body grows as
// its bytes arrive.
const bodyStep = 1 << 20

// ReadBody reads the body of a frame whose header has been read, into buf
// where it fits.
func ReadBody(r io.Reader, h Header, buf []byte) ([]byte, error) {
	n := int(h.Length)
	if cap(buf) >= n {
		buf = buf[:n]
		_, err := io.ReadFull(r, buf)
		return buf, err
	}
	buf = buf[:0]
	for len(buf) < n {
		step := min(n-len(buf), bodyStep)
		start := len(buf)
		buf = append(buf, make([]byte, step)...)
		if _, err := io.ReadFull(r, buf[start:]); err != nil {
			return nil, err
		}
	}
	return buf, nil
}

// BeginFrame appends a header with an empty body and returns the grown slice
// together with the offset that [EndFrame] needs.
func BeginFrame(b []byte, t Type, id uint32) ([]byte, int) {
	return AppendHeader(b, Header{Type: t, ID: id}), len(b)
}

// EndFrame sets the length of the frame that begins at the given offset to
// what was appended since.
func EndFrame(b []byte, begin int) []byte {
	binary.LittleEndian.PutUint32(b[begin+lengthAt:], uint32(len(b)-begin-HeaderSize))
	return b
}
