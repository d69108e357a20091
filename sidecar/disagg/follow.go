package disagg

import (
	"context"
	"sync"
	"time"

	"membrane/kvwire"
	"membrane/mesh"
)

// follow brings the pages of a prompt that another node still prefills into a
// sequence, one after the other as they are made there, and returns how many
// have come. e becomes the handle as it is when that prefill has ended, if it
// did well. What does not come is for the caller to compute: the other node
// may be lost, or slower than the time that is left.
func (s *Service) follow(ctx context.Context, p *prompt, e *entry, seq Sequence, out *Decoded) (loaded int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if until, ok := ctx.Deadline(); ok { // as much again is left for computing
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, time.Until(until)/2)
		defer stop()
	}
	node, id := e.manifest.Node, p.id()
	ended := make(chan *entry, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		body, err := s.cfg.Peers.WaitManifest(ctx, node, id.tenant, id.handle)
		if err != nil || body == nil { // no more pages will be made
			cancel()
			ended <- nil
			return
		}
		ended <- s.found(id, body)
	})
	running := true
	loaded, err = p.follow(ctx, seq, node, func(tokens int) {
		if running = running && len(ended) == 0; running {
			out.Followed += tokens
		}
	})
	s.m.followed.Add(out.Followed)
	if err != nil || loaded < len(p.pages) && len(ended) == 0 {
		cancel() // what is left is computed here, whatever the other node does
	}
	if done := <-ended; done != nil {
		*e = *done
	}
	return loaded, err
}

// found keeps a copy of a manifest that has come from a peer, or returns nil if
// it is none. Who answered has it still, whatever our clock says of its end.
func (s *Service) found(id handleID, body []byte) *entry {
	m, err := kvwire.ParseManifest(body)
	if err != nil {
		return nil
	}
	now := time.Now()
	e := fromManifest(m, nil)
	if e.running() {
		return e
	}
	if !now.Before(e.expires) { // that node's clock is behind ours: it is asked each time
		e.expires = now
		return e
	}
	// A clock that is ahead must not keep it for ever.
	if latest := now.Add(s.cfg.TTL); e.expires.After(latest) {
		e.expires = latest
	}
	s.handles.putCopy(id, e, now) // at the cap it is asked for again
	return e
}

// follow loads the prompt's pages into a sequence as they come, and calls each
// with the tokens of every one.
func (p *prompt) follow(ctx context.Context, seq Sequence, from string, each func(tokens int)) (loaded int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for first := 0; first < len(p.pages); first = loaded {
		// All pages of one request are equally long, which the last may not be.
		n := p.pages[first].tokens
		var hashes []kvwire.Hash
		for i := first; i < len(p.pages) && p.pages[i].tokens == n; i++ {
			hashes = append(hashes, p.pages[i].hash)
		}
		lost := false
		p.s.cfg.Peers.Follow(ctx, mesh.FillRequest{
			Space: p.space, Form: p.form, Shards: 1, ObjectBytes: []int64{int64(p.model.PageBytes(n))}, Hashes: hashes, From: from,
		}, func(pages int) {
			for !lost && loaded < first+pages {
				ok, e := p.load(seq, &p.pages[loaded])
				if lost, err = !ok, e; lost || e != nil {
					lost = true
					cancel()
					return
				}
				each(n)
				loaded++
			}
		})
		if err != nil || loaded < first+len(hashes) {
			return loaded, err
		}
	}
	return loaded, nil
}
