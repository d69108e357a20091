package cache

import (
	"encoding/binary"

	"membrane/kvwire"
)

// PartSize is the length of all parts of an object but the last, in bytes: so
// short that a part is still in the processor's cache when it has been
// received, or when it is sent after its checksum was computed. Whole objects
// are not, and to take their checksum apart from that reads memory once more.
const PartSize = 256 << 10

// PartSums computes a checksum part by part: that of the parts' checksums,
// little endian, one after the other. Objects of [Slot.Commit] have it. They
// are this node's alone: they are in no event, in no [Cache.Range], and not
// for peers. The zero value is ready for use.
type PartSums struct{ sums []byte }

// Reset makes s as new.
func (s *PartSums) Reset() { s.sums = s.sums[:0] }

// Set takes part i in place of what it was before, if it was. Parts come in
// their order the first time.
func (s *PartSums) Set(i int, part []byte) {
	if n := 8 * (i + 1); n > len(s.sums) {
		s.sums = append(s.sums, make([]byte, n-len(s.sums))...)
	}
	binary.LittleEndian.PutUint64(s.sums[8*i:], uint64(kvwire.Sum(part)))
}

// Sum returns the checksum of the parts so far.
func (s *PartSums) Sum() kvwire.Checksum { return kvwire.Sum(s.sums) }

// SumParts returns the checksum of b by its parts.
func SumParts(b []byte) kvwire.Checksum {
	if len(b) <= PartSize { // most objects, without an allocation
		var one [8]byte
		binary.LittleEndian.PutUint64(one[:], uint64(kvwire.Sum(b)))
		return kvwire.Sum(one[:])
	}
	var s PartSums
	for i := 0; i*PartSize < len(b); i++ {
		s.Set(i, b[i*PartSize:min((i+1)*PartSize, len(b))])
	}
	return s.Sum()
}
