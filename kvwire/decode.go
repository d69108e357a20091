package kvwire

import "encoding/binary"

// decoder reads little-endian fields off a message body. It remembers the
// first shortfall, so that a parser checks once, in end.
type decoder struct {
	b     []byte
	short bool
}

func (d *decoder) bytes(n int) []byte {
	if n < 0 || len(d.b) < n {
		d.short, d.b = true, nil
		return nil
	}
	out := d.b[:n:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) u8() uint8 {
	if b := d.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) u16() uint16 {
	if b := d.bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if b := d.bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if b := d.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// optional reads a length and that many bytes of text; the length 0xFFFF means
// absent.
func (d *decoder) optional() *string {
	n := d.u16()
	if n == absent {
		return nil
	}
	s := string(d.bytes(int(n)))
	return &s
}

const absent = 0xFFFF

func appendOptional(b []byte, s *string) []byte {
	if s == nil {
		return binary.LittleEndian.AppendUint16(b, absent)
	}
	b = binary.LittleEndian.AppendUint16(b, uint16(len(*s)))
	return append(b, *s...)
}

// end reports a body that was too short or has bytes left over.
func (d *decoder) end(what string) error {
	switch {
	case d.short:
		return Errorf(CodeBadFrame, what, "the message ends too early")
	case len(d.b) > 0:
		return Errorf(CodeBadFrame, what, "%d bytes follow the message", len(d.b))
	}
	return nil
}
