package mesh

import (
	"context"
	"time"

	"membrane/kvwire"
)

// followGrace is for how long pages that are on their way when a follower stops
// may still come: whoever asks next would have them sent once more.
const followGrace = 250 * time.Millisecond

// followTries is how often in a row a peer may say that it holds a page that
// then does not come.
const followTries = 3

// Follow fetches pages from the peer that req.From names as they become
// available there, while that peer's engine still computes those behind them.
// It returns how many leading pages are held here and why it stopped:
// [kvwire.ReasonNone] when all are, [kvwire.ReasonDeadline] when ctx ended,
// [kvwire.ReasonPeer] or another reason of [Mesh.Fill] when the peer is not
// there, is lost, or does not give what it says it has. ctx bounds it, at the
// most [Config.FillTimeout] where it has no deadline; the caller cancels it
// when the engine it follows has given up. Pages that have come stay, and those on
// their way then have a moment more.
//
// held, which may be nil, is called after each step with how many leading pages
// are here now, on the caller's goroutine: what it does delays the next step.
// A page is asked for once its predecessors are here. The pages are read by
// [Mesh.Fill], with its checks, and shared with other fills; between reads one
// request waits at the peer. Beyond [kvwire.MaxBatch] hashes are not looked at.
func (m *Mesh) Follow(ctx context.Context, req FillRequest, held func(pages int)) (pages int, why kvwire.Reason) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, m.cfg.FillTimeout)
		defer cancel()
	}
	m.counters.follows.Add(1)
	req.Hashes = req.Hashes[:min(len(req.Hashes), kvwire.MaxBatch)]
	pos, told, failed := 0, 0, 0
	over := func() bool { // a connection may notice the deadline before ctx does
		until, _ := ctx.Deadline()
		return ctx.Err() != nil || !time.Now().Before(until)
	}
	for {
		for pos < len(req.Hashes) && req.Space.Has(req.Form, req.Hashes[pos]) {
			pos++
		}
		if pos > told && held != nil {
			held(pos)
		}
		told = pos
		p := m.peers.named(req.From)
		switch {
		case pos == len(req.Hashes):
			return pos, kvwire.ReasonNone
		case m.closing.Load():
			return pos, kvwire.ReasonDraining
		case over():
			return pos, kvwire.ReasonDeadline
		case p == nil:
			return pos, kvwire.ReasonPeer
		}
		began := time.Now()
		rest := req.Hashes[pos:]
		n, err := p.await(ctx, req, rest[:min(len(rest), kvwire.MaxAwait)])
		switch {
		case over():
			return pos, kvwire.ReasonDeadline
		case err != nil:
			m.log.Debug().Err(err).Str("peer", p.name).Msg("cannot wait for the pages of a peer")
			return pos, kvwire.ReasonPeer
		case n == 0: // its patience is over; the next question tells whether it still lives
			if pauseAfter(ctx, began) != nil {
				return pos, kvwire.ReasonDeadline
			}
			continue
		}
		part := req
		part.Hashes = rest[:n]
		got, why := m.fillOn(ctx, part)
		m.counters.followed.Add(uint64(got))
		if got > 0 {
			failed = 0
			continue
		}
		if failed++; failed == followTries || why == kvwire.ReasonDraining {
			return pos, why
		}
		if pauseAfter(ctx, began) != nil {
			return pos, kvwire.ReasonDeadline
		}
	}
}

// fillOn is a fill that outlasts ctx by followGrace.
func (m *Mesh) fillOn(ctx context.Context, req FillRequest) (int, kvwire.Reason) {
	until, _ := ctx.Deadline()
	longer, cancel := context.WithDeadline(context.WithoutCancel(ctx), until.Add(followGrace))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(followGrace)
		defer timer.Stop()
		select {
		case <-timer.C:
			cancel()
		case <-longer.Done():
		}
	})
	defer stop()
	return m.Fill(longer, req)
}
