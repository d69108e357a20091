package mesh

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"membrane/kvwire"
)

const (
	// maxWaits is how many requests of peers may be put off at a time; those
	// beyond are answered at once. Each keeps one of the data port's connections.
	maxWaits = 128
	// pollPause is how long an asker waits before it repeats what was answered
	// at once without news.
	pollPause = 20 * time.Millisecond
	// awaitPause is the least time between two looks at the cache for one peer.
	awaitPause = time.Millisecond
	// awaitLook is how often the cache is looked at where no news of it comes:
	// the directory does not list everything.
	awaitLook = 200 * time.Millisecond
)

var errNoPeer = errors.New("no such node is alive")

// waitUS returns how long a peer may put off its answer: until ctx's deadline,
// and no longer than the protocol allows.
func waitUS(ctx context.Context) uint32 {
	wait := maxReadTime
	if until, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(until))
	}
	return uint32(max(wait, 0).Microseconds())
}

// pauseAfter waits until pollPause has passed since began.
func pauseAfter(ctx context.Context, began time.Time) error {
	timer := time.NewTimer(pollPause - time.Since(began))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// await asks the peer for the first of some pages and returns how many of them
// it holds then, from the first on; 0 when ctx's deadline or the peer's
// patience came first.
func (p *peer) await(ctx context.Context, req FillRequest, hashes []kvwire.Hash) (int, error) {
	body, err := p.call(ctx, kvwire.TypeAwait, kvwire.AppendBatchRead(nil, kvwire.BatchRead{
		DeadlineUS: waitUS(ctx), Form: req.Form, Namespace: req.Space.Namespace(), Tenant: req.Space.Tenant(), Hashes: hashes,
	}))
	if err != nil {
		return 0, err
	}
	a, err := kvwire.ParseAwaitAnswer(body)
	if err == nil && int(a.Pages) > len(hashes) {
		err = kvwire.Errorf(kvwire.CodeBadField, "pages", "%d of %d", a.Pages, len(hashes))
	}
	if err != nil {
		p.m.counters.lies.Add(1)
		return 0, err
	}
	p.hasVersion(a.Version)
	return int(a.Pages), nil
}

// await answers a peer when the first of its pages is here.
func (s *session) await(id uint32, req kvwire.BatchRead, arrived time.Time) error {
	held := 0
	look := func() bool {
		space := s.d.m.cfg.Store.Lookup(req.Tenant, req.Namespace)
		for space != nil && held < len(req.Hashes) && space.Has(req.Form, req.Hashes[held]) {
			held++
		}
		return held > 0
	}
	if !look() {
		wait := time.Until(arrived.Add(min(time.Duration(req.DeadlineUS)*time.Microsecond, maxReadTime)))
		s.whileThere(wait, func(ctx context.Context) { s.d.m.untilPage(ctx, look) })
	}
	_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
	version, _ := s.d.m.index.now()
	return s.answer(kvwire.TypeAwait, id, kvwire.AppendAwaitAnswer(nil, kvwire.AwaitAnswer{Pages: uint32(held), Version: version}))
}

// untilPage waits until look says yes, looking whenever the cache has changed.
func (m *Mesh) untilPage(ctx context.Context, look func() bool) {
	timer := time.NewTimer(awaitLook)
	defer timer.Stop()
	for {
		_, changed := m.index.now() // before the look, which may miss what comes after it
		if m.closing.Load() || look() {
			return
		}
		timer.Reset(awaitLook)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		timer.Reset(awaitPause) // others may store much that is not waited for
		if look() {
			return
		}
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
	}
}

// whileThere calls f with a context that ends after wait, with the data port,
// or when the peer closes the connection, and reports whether it did: there is
// not always room for one more that waits. The peer sends nothing before the
// answer; if it does, that stays in the connection.
func (s *session) whileThere(wait time.Duration, f func(ctx context.Context)) bool {
	defer s.d.waits.Add(-1)
	if s.d.waits.Add(1) > maxWaits || wait <= 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(s.d.ctx, wait)
	defer cancel()
	_ = s.c.SetReadDeadline(time.Time{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if _, err := s.r.Peek(1); err != nil {
			cancel()
		}
	}()
	f(ctx)
	_ = s.c.SetReadDeadline(longAgo)
	<-watched // the reader is ours again; what the deadline did to it is undone by the next request's
	return true
}

// Queues are the lengths of a node's queues.
type Queues struct {
	// Prefill is how many prompts wait for prefill, Decode how many requests
	// wait for decode.
	Prefill, Decode int
}

// QueuesOf asks a node for the lengths of its queues, by ctx's deadline.
func (m *Mesh) QueuesOf(ctx context.Context, node string) (Queues, error) {
	p := m.peers.named(node)
	if p == nil {
		return Queues{}, fmt.Errorf("cannot ask %q for its queues: %w", node, errNoPeer)
	}
	body, err := p.call(ctx, kvwire.TypeQueues, nil)
	if err != nil {
		return Queues{}, fmt.Errorf("cannot ask %q for its queues: %w", node, err)
	}
	q, err := kvwire.ParseQueues(body)
	if err != nil {
		return Queues{}, fmt.Errorf("cannot ask %q for its queues: %w", node, err)
	}
	return Queues{int(q.Prefill), int(q.Decode)}, nil
}

// queues answers a peer.
func (s *session) queues(id uint32) error {
	var q kvwire.Queues
	if f := s.d.m.cfg.Queues; f != nil {
		prefill, decode := f()
		q = kvwire.Queues{Prefill: queueLength(prefill), Decode: queueLength(decode)}
	}
	_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
	return s.answer(kvwire.TypeQueues, id, kvwire.AppendQueues(nil, q))
}

func queueLength(n int) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }
