package listener

import (
	"errors"
	"io"
	"sync"

	"membrane/cache"
)

// Source is where bytes come from: a connection, or a test's.
type Source interface {
	// Read waits for at least one byte.
	Read(p []byte) (int, error)
}

// Reader takes what a client sends apart. Short pieces come through its
// buffer, values past it.
type Reader struct {
	src  Source
	buf  []byte
	r, w int
}

// NewReader returns a reader with a buffer of size bytes.
func NewReader(src Source, size int) *Reader { return &Reader{src: src, buf: make([]byte, size)} }

// Size returns the size of the buffer.
func (p *Reader) Size() int { return len(p.buf) }

// Unread returns what is in the buffer, valid until the next call of another
// method than this and Drop.
func (p *Reader) Unread() []byte { return p.buf[p.r:p.w] }

// Drop passes over n bytes of Unread.
func (p *Reader) Drop(n int) { p.r += n }

// Fill reads more into the buffer, in which there is room.
func (p *Reader) Fill() error {
	if p.r == p.w {
		p.r, p.w = 0, 0
	}
	if p.w == len(p.buf) {
		p.w = copy(p.buf, p.buf[p.r:p.w])
		p.r = 0
	}
	n, err := p.src.Read(p.buf[p.w:])
	p.w += n
	return err
}

// Full reads len(dst) bytes. An end before them is [io.ErrUnexpectedEOF].
func (p *Reader) Full(dst []byte) error {
	n := copy(dst, p.buf[p.r:p.w])
	p.r += n
	for n < len(dst) {
		if len(dst)-n < len(p.buf)/2 { // what follows may come with it
			if err := p.Fill(); err != nil {
				return Unexpected(err)
			}
			k := copy(dst[n:], p.buf[p.r:p.w])
			p.r += k
			n += k
			continue
		}
		k, err := p.src.Read(dst[n:])
		n += k
		if err != nil {
			return Unexpected(err)
		}
	}
	return nil
}

// Skip throws the next n bytes away.
func (p *Reader) Skip(n int64) error {
	for n > 0 {
		if p.r == p.w {
			if err := p.Fill(); err != nil {
				return Unexpected(err)
			}
		}
		k := min(n, int64(p.w-p.r))
		p.r += int(k)
		n -= k
	}
	return nil
}

// Unexpected is err, or [io.ErrUnexpectedEOF] for an end, which came in the
// middle of something.
func Unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Parts reads a value into its slot from at on, to the slot's end, and sets
// the sum of each part, the bytes before at included, as soon as it is here.
func (p *Reader) Parts(slot []byte, at int, sums *cache.PartSums) error {
	for i := 0; i*cache.PartSize < len(slot); i++ {
		end := min((i+1)*cache.PartSize, len(slot))
		if err := p.Full(slot[at:end]); err != nil {
			return err
		}
		sums.Set(i, slot[i*cache.PartSize:end])
		at = end
	}
	return nil
}

// scratch is for the parts of values that are here already.
var scratch = sync.Pool{New: func() any { return new([cache.PartSize]byte) }}

// Compare reads a value of n bytes and sets the sums that it would have behind
// header, which is shorter than a part, in a slot.
func (p *Reader) Compare(header []byte, n int64, sums *cache.PartSums) error {
	b := scratch.Get().(*[cache.PartSize]byte)
	defer scratch.Put(b)
	at := copy(b[:], header)
	for i := 0; ; i++ {
		k := min(n, int64(len(b)-at))
		if err := p.Full(b[at : at+int(k)]); err != nil {
			return err
		}
		sums.Set(i, b[:at+int(k)])
		if n -= k; n == 0 {
			return nil
		}
		at = 0
	}
}
