package resp

import (
	"encoding/binary"
	"errors"
	"time"
)

// A value's slot begins with a header:
//
//	0   1  version, 1
//	1   1  kind of the key
//	2   2  length of the key's text
//	4   4  length of the header: where the value begins, a multiple of 64
//	8   8  when the value expires, in Unix milliseconds; 0: never
//	16  …  the key's text, without the suffix of a pair
//
// It is part of what the checksum is taken of.
const (
	headerVersion = 1
	headerFixed   = 16
	headerStep    = 64
)

func headerSize(k *key) int {
	return (headerFixed + len(k.text) + headerStep - 1) / headerStep * headerStep
}

// putHeader writes the header of a value to the beginning of its slot.
func putHeader(slot []byte, k *key, expires int64) {
	n := headerSize(k)
	clear(slot[:n])
	slot[0], slot[1] = headerVersion, byte(k.kind)
	binary.LittleEndian.PutUint16(slot[2:], uint16(len(k.text)))
	binary.LittleEndian.PutUint32(slot[4:], uint32(n))
	binary.LittleEndian.PutUint64(slot[8:], uint64(expires))
	copy(slot[headerFixed:], k.text)
}

// header is what the beginning of a slot says.
type header struct {
	kind    kind
	key     int // length
	size    int
	expires int64
}

var errHeader = errors.New("cannot read the header of a value: it is none")

func parseHeader(slot []byte) (header, error) {
	if len(slot) < headerFixed || slot[0] != headerVersion {
		return header{}, errHeader
	}
	h := header{
		kind: kind(slot[1]), key: int(binary.LittleEndian.Uint16(slot[2:])),
		size: int(binary.LittleEndian.Uint32(slot[4:])), expires: int64(binary.LittleEndian.Uint64(slot[8:])),
	}
	if h.kind > pairMetadata || h.key > MaxKey || h.size != (headerFixed+h.key+headerStep-1)/headerStep*headerStep {
		return header{}, errHeader
	}
	return h, nil
}

func (h *header) expired(now time.Time) bool { return h.expires != 0 && now.UnixMilli() >= h.expires }
