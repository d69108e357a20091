package kvwire

import "encoding/binary"

// MatchHashes is a [Match] of pages that the asker names by their hashes: an
// engine whose own hashes follow the rule of [Chain] (SGLang) knows no tokens
// where it asks. The answer is a [Leased] whose first page is 0. Its handle names
// the pages by their place in the list, for lease, reserve, commit and write; it
// cannot be extended. Its lease is the asking connection's alone, whatever the
// number of shards.
//
//	offset  size  field
//	0       4     deadline: microseconds from arrival
//	4       4     lease: milliseconds
//	8       2     flags: 1 local only, 2 presence only
//	10      2     zero
//	12      4     number of hashes
//	16      32×n  hashes
type MatchHashes struct {
	DeadlineUS uint32
	LeaseMS    uint32
	Flags      uint16
	Hashes     []Hash
}

// AppendMatchHashes appends the message in wire form.
func AppendMatchHashes(b []byte, m MatchHashes) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.DeadlineUS)
	b = binary.LittleEndian.AppendUint32(b, m.LeaseMS)
	b = binary.LittleEndian.AppendUint16(b, m.Flags)
	b = append(b, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Hashes)))
	for i := range m.Hashes {
		b = append(b, m.Hashes[i][:]...)
	}
	return b
}

// ParseMatchHashes decodes the message. The hashes are a copy.
func ParseMatchHashes(body []byte) (MatchHashes, error) {
	d := decoder{b: body}
	m := MatchHashes{DeadlineUS: d.u32(), LeaseMS: d.u32(), Flags: d.u16()}
	zero, n := d.u16(), d.u32()
	switch {
	case d.short:
		return m, Errorf(CodeBadFrame, "match_hashes", "the message ends too early")
	case zero != 0:
		return m, Errorf(CodeBadFrame, "match_hashes", "a reserved byte is not zero")
	case n > MaxBatch:
		return m, Errorf(CodeTooLarge, "hashes", "%d hashes are more than %d", n, MaxBatch)
	case m.Flags&^(MatchLocal|MatchPresence) != 0:
		return m, Errorf(CodeBadField, "flags", "%#04x has bits that are not defined", m.Flags)
	case len(d.b) != int(n)*HashSize:
		return m, Errorf(CodeBadFrame, "hashes", "%d bytes do not hold %d hashes", len(d.b), n)
	}
	m.Hashes = make([]Hash, n)
	for i := range m.Hashes {
		copy(m.Hashes[i][:], d.bytes(HashSize))
	}
	return m, nil
}
