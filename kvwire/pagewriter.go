package kvwire

import (
	"io"
	"net"
)

const (
	maxQueuedBytes = 1 << 20 // of objects in one writev, unless one is larger
	maxQueuedPages = 64
)

// Borrowed is an object that stays where it is until it is closed.
type Borrowed interface{ Close() }

// PageWriter gathers the page frames of an answer, so that many go out in one
// writev: their headers from its own memory, the objects from where they lie.
// It is used by one goroutine; the zero value is ready for Begin. It keeps its
// buffers between answers and allocates nothing once they have grown.
type PageWriter struct {
	w       io.Writer
	id      uint32
	headers []byte
	parts   []pagePart
	bufs    net.Buffers
	held    []Borrowed
	bytes   int
}

// pagePart is one frame: where its header ends, and its object if it has one.
type pagePart struct {
	end    int
	object []byte
}

// Begin starts the answer to request id, which goes to w: a [net.Conn], whose
// deadlines are the caller's.
func (p *PageWriter) Begin(w io.Writer, id uint32) { p.w, p.id = w, id }

// Page queues a frame with the bytes of an object, which Length need not be
// set for, and takes hold over: it is closed once the frame is written or
// dropped. It may be nil.
func (p *PageWriter) Page(h PageHeader, object []byte, hold Borrowed) {
	h.Length = uint64(len(object))
	p.headers = AppendHeader(p.headers, Header{Type: TypePage, ID: p.id, Length: uint32(PageHeaderSize + len(object))})
	p.headers = AppendPageHeader(p.headers, h)
	p.parts = append(p.parts, pagePart{len(p.headers), object})
	p.bytes += len(object)
	if hold != nil {
		p.held = append(p.held, hold)
	}
}

// Full reports whether what is queued is enough for one writev.
func (p *PageWriter) Full() bool { return p.bytes >= maxQueuedBytes || len(p.parts) >= maxQueuedPages }

// Queued returns how many bytes of objects wait to be written.
func (p *PageWriter) Queued() int { return p.bytes }

// Flush writes what is queued and lets go of it.
func (p *PageWriter) Flush() error {
	if len(p.parts) == 0 {
		return nil
	}
	defer p.Drop()
	p.bufs = p.bufs[:0]
	start := 0
	for i, part := range p.parts {
		if part.object == nil && i+1 < len(p.parts) {
			continue // its header goes out together with the next
		}
		p.bufs = append(p.bufs, p.headers[start:part.end])
		if part.object != nil {
			p.bufs = append(p.bufs, part.object)
		}
		start = part.end
	}
	bufs := p.bufs // WriteTo eats the slice that it is called on
	_, err := bufs.WriteTo(p.w)
	return err
}

// Drop lets go of what is queued.
func (p *PageWriter) Drop() {
	for _, b := range p.held {
		b.Close()
	}
	clear(p.held)
	clear(p.parts)
	clear(p.bufs)
	p.held, p.headers, p.parts, p.bufs = p.held[:0], p.headers[:0], p.parts[:0], p.bufs[:0]
	p.bytes = 0
}
