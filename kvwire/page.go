package kvwire

import "encoding/binary"

// PageHeaderSize is the size of the fixed part of a page frame's body.
const PageHeaderSize = 64

// PageHeader is the fixed part of the body of a page frame; the object's bytes
// follow it.
//
//	offset  size  field
//	0       4     index of the page in the request
//	4       2     shard index
//	6       2     shard count
//	8       1     reason: 0 with bytes, else why there are none
//	9       7     zero
//	16      8     form
//	24      8     length of the object, in bytes
//	32      8     checksum (XXH3-64) of the object
//	40      16    authenticator
//	56      8     zero
type PageHeader struct {
	Index  uint32
	Shard  Shard
	Reason Reason
	Form   Form
	Length uint64
	Sum    Checksum
	Auth   Auth
}

// AppendPageHeader appends the page header in wire form.
func AppendPageHeader(b []byte, p PageHeader) []byte {
	b = binary.LittleEndian.AppendUint32(b, p.Index)
	b = binary.LittleEndian.AppendUint16(b, p.Shard.Index)
	b = binary.LittleEndian.AppendUint16(b, p.Shard.Count)
	b = append(b, byte(p.Reason), 0, 0, 0, 0, 0, 0, 0)
	b = append(b, p.Form[:]...)
	b = binary.LittleEndian.AppendUint64(b, p.Length)
	b = binary.LittleEndian.AppendUint64(b, uint64(p.Sum))
	b = append(b, p.Auth[:]...)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

// ParsePageHeader decodes a page header. b holds PageHeaderSize bytes; frame is
// the header of the frame that carries it, whose length must agree.
func ParsePageHeader(b []byte, frame Header) (PageHeader, error) {
	d := decoder{b: b}
	var p PageHeader
	var reserved byte
	p.Index = d.u32()
	p.Shard.Index, p.Shard.Count = d.u16(), d.u16()
	p.Reason = Reason(d.u8())
	for _, z := range d.bytes(7) {
		reserved |= z
	}
	copy(p.Form[:], d.bytes(FormSize))
	p.Length = d.u64()
	p.Sum = Checksum(d.u64())
	copy(p.Auth[:], d.bytes(AuthSize))
	for _, z := range d.bytes(8) {
		reserved |= z
	}
	if err := d.end("page"); err != nil {
		return p, err
	}
	switch {
	case reserved != 0:
		return p, Errorf(CodeBadFrame, "page", "a reserved byte is not zero")
	case p.Length > MaxObject:
		return p, Errorf(CodeTooLarge, "length", "an object of %d bytes is above %d", p.Length, MaxObject)
	case uint64(frame.Length) != PageHeaderSize+p.Length:
		return p, Errorf(CodeBadFrame, "length", "a frame body of %d bytes cannot hold an object of %d", frame.Length, p.Length)
	case p.Shard.Count == 0 || p.Shard.Count > MaxShards || p.Shard.Index >= p.Shard.Count:
		return p, Errorf(CodeBadField, "shard", "%s is not a shard", p.Shard)
	case p.Reason != ReasonNone && p.Length != 0:
		return p, Errorf(CodeBadField, "reason", "a page that is missed as %s carries %d bytes", p.Reason, p.Length)
	}
	return p, nil
}
