package mesh

import (
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
	s.pages.Begin(s.c, id)
	defer s.pages.Drop()
	s.queued = 0
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
			s.pages.Page(kvwire.PageHeader{Index: uint32(i), Shard: kvwire.Shard{Count: 1}, Form: req.Form, Reason: why}, nil, nil)
		}
		if s.pages.Full() {
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
	s.views = s.views[:0]
	defer func() { clear(s.views) }()
	for i := range n {
		shard := kvwire.Shard{Index: uint16(i), Count: uint16(n)}
		v, why := space.View(shard, form, h, false)
		if v != nil {
			s.views = append(s.views, v)
			if v.Local() {
				why = kvwire.ReasonLayout
			}
		}
		if why != kvwire.ReasonNone {
			for _, v := range s.views {
				v.Close()
			}
			return why
		}
	}
	for i, v := range s.views {
		s.pages.Page(kvwire.PageHeader{
			Index: index, Shard: kvwire.Shard{Index: uint16(i), Count: uint16(n)}, Form: form, Sum: v.Sum(), Auth: v.Auth(),
		}, v.Bytes(), v)
	}
	s.queued++
	return kvwire.ReasonNone
}

// flush writes what is queued.
func (s *session) flush() error {
	pages, bytes := s.queued, s.pages.Queued()
	s.queued = 0
	if err := s.pages.Flush(); err != nil {
		return err
	}
	s.d.m.counters.served.Add(uint64(pages))
	s.d.m.counters.servedBytes.Add(uint64(bytes))
	return nil
}
