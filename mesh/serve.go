package mesh

import (
	"net"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// batchRead sends the pages straight out of the arena, in order. After the
// deadline it sends no more bytes, only reasons. Bytes are checked where they
// arrive and not here: a peer that got wrong ones asks for a check.
func (s *session) batchRead(id uint32, req kvwire.BatchRead, arrived time.Time) error {
	deadline := arrived.Add(min(time.Duration(req.DeadlineUS)*time.Microsecond, maxReadTime))
	_ = s.c.SetWriteDeadline(deadline.Add(writeGrace))
	s.pages.begin(id)
	defer s.pages.drop()
	draining := s.d.m.closing.Load() // what has begun may still end
	space := s.d.m.cfg.Store.Lookup(req.Tenant, req.Namespace)
	for i, h := range req.Hashes {
		var why kvwire.Reason
		switch {
		case draining:
			why = kvwire.ReasonDraining
		case !time.Now().Before(deadline):
			why = kvwire.ReasonDeadline
		case space == nil:
			why = kvwire.ReasonNamespace
		default:
			why = s.page(space, uint32(i), req.Form, h)
		}
		if why != kvwire.ReasonNone {
			s.d.m.counters.notServed.add(why, 1)
			s.pages.missed(uint32(i), req.Form, why)
		}
		if s.pages.full() {
			if err := s.flush(); err != nil {
				return err
			}
		}
	}
	if err := s.flush(); err != nil {
		return err
	}
	version, _ := s.d.m.index.now()
	return s.answer(kvwire.TypeBatchRead, id, kvwire.AppendBatchReadAnswer(nil, version))
}

// check looks at the bytes of pages that came to a peer with wrong ones, as
// far as the deadline allows, and quarantines those that are wrong here.
func (s *session) check(id uint32, req kvwire.BatchRead, arrived time.Time) error {
	deadline := arrived.Add(min(time.Duration(req.DeadlineUS)*time.Microsecond, maxReadTime))
	if space := s.d.m.cfg.Store.Lookup(req.Tenant, req.Namespace); space != nil {
		for _, h := range req.Hashes {
			if !time.Now().Before(deadline) {
				break
			}
			if why := checkPage(space, req.Form, h); why == kvwire.ReasonCorrupt {
				s.d.m.counters.notServed.add(why, 1)
			}
		}
	}
	_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
	version, _ := s.d.m.index.now()
	return s.answer(kvwire.TypeCheck, id, kvwire.AppendBatchReadAnswer(nil, version))
}

func checkPage(space *cache.Space, form kvwire.Form, h kvwire.Hash) kvwire.Reason {
	n, why := space.Shards(form, h)
	for i := 0; i < n && why == kvwire.ReasonNone; i++ {
		var v *cache.View
		if v, why = space.View(kvwire.Shard{Index: uint16(i), Count: uint16(n)}, form, h, true); v != nil {
			v.Close()
		}
	}
	return why
}

// page queues every shard of a page, or returns the reason why none is sent.
func (s *session) page(space *cache.Space, index uint32, form kvwire.Form, h kvwire.Hash) kvwire.Reason {
	n, why := space.Shards(form, h)
	if why != kvwire.ReasonNone {
		return why
	}
	first := len(s.pages.views)
	for i := range n {
		shard := kvwire.Shard{Index: uint16(i), Count: uint16(n)}
		v, why := space.View(shard, form, h, false)
		if why != kvwire.ReasonNone {
			s.pages.forget(first)
			return why
		}
		if v.Local() {
			v.Close()
			s.pages.forget(first)
			return kvwire.ReasonLayout
		}
		s.pages.views = append(s.pages.views, v)
	}
	for i, v := range s.pages.views[first:] {
		s.pages.object(kvwire.PageHeader{
			Index: index, Shard: kvwire.Shard{Index: uint16(i), Count: uint16(n)}, Form: form,
			Length: uint64(len(v.Bytes())), Sum: v.Sum(), Auth: v.Auth(),
		}, v.Bytes())
	}
	s.pages.count++
	return kvwire.ReasonNone
}

// flush writes what is queued.
func (s *session) flush() error {
	pages, bytes := s.pages.count, s.pages.bytes
	if err := s.pages.write(); err != nil {
		return err
	}
	s.d.m.counters.served.Add(uint64(pages))
	s.d.m.counters.servedBytes.Add(uint64(bytes))
	return nil
}

const (
	maxQueued      = 1 << 20 // bytes of objects in one writev, unless one is larger
	maxQueuedParts = 64
)

// pageWriter gathers page frames for one writev: headers from its own memory,
// objects in place.
type pageWriter struct {
	c       net.Conn
	id      uint32
	headers []byte
	parts   []part
	bufs    net.Buffers
	views   []*cache.View
	count   int
	bytes   int
}

// part is one frame: where its header ends, and its object if it has one.
type part struct {
	end    int
	object []byte
}

func (w *pageWriter) begin(id uint32) { w.id = id }

func (w *pageWriter) full() bool { return w.bytes >= maxQueued || len(w.parts) >= maxQueuedParts }

func (w *pageWriter) object(p kvwire.PageHeader, b []byte) {
	w.headers = kvwire.AppendHeader(w.headers, kvwire.Header{Type: kvwire.TypePage, ID: w.id, Length: uint32(kvwire.PageHeaderSize + len(b))})
	w.headers = kvwire.AppendPageHeader(w.headers, p)
	w.parts = append(w.parts, part{len(w.headers), b})
	w.bytes += len(b)
}

func (w *pageWriter) missed(index uint32, form kvwire.Form, why kvwire.Reason) {
	w.object(kvwire.PageHeader{Index: index, Shard: kvwire.Shard{Count: 1}, Form: form, Reason: why}, nil)
}

// write sends what is queued and lets go of it.
func (w *pageWriter) write() error {
	if len(w.parts) == 0 {
		return nil
	}
	w.bufs = w.bufs[:0]
	start := 0
	for i, p := range w.parts {
		if p.object == nil && i+1 < len(w.parts) {
			continue // its header goes out together with the next
		}
		w.bufs = append(w.bufs, w.headers[start:p.end])
		if p.object != nil {
			w.bufs = append(w.bufs, p.object)
		}
		start = p.end
	}
	bufs := w.bufs // WriteTo eats the slice that it is called on
	_, err := bufs.WriteTo(w.c)
	w.drop()
	return err
}

// drop lets go of what is queued.
func (w *pageWriter) drop() {
	w.forget(0)
	clear(w.parts)
	clear(w.bufs)
	w.headers, w.parts, w.bufs = w.headers[:0], w.parts[:0], w.bufs[:0]
	w.count, w.bytes = 0, 0
}

// forget lets go of the views from the given one on.
func (w *pageWriter) forget(from int) {
	for _, v := range w.views[from:] {
		v.Close()
	}
	clear(w.views[from:])
	w.views = w.views[:from]
}
