package mesh

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"membrane/kvwire"
)

var (
	errAbandoned    = errors.New("nobody waits for the pages any more")
	errPullDeadline = errors.New("the deadline of all who wait has passed")
)

const (
	tailTime   = 500 * time.Millisecond // for the end of an answer whose pages are all here
	reportTime = 2 * time.Second        // for a peer to check pages that came wrong
	fairTime   = 10 * time.Millisecond  // with less, a peer that has not answered is not blamed
)

// errLocal is a page that the local cache does not take.
type errLocal struct{ why kvwire.Reason }

func (e errLocal) Error() string { return "the local cache refuses the page: " + e.why.String() }

// errLie is an answer that the protocol does not allow.
type errLie struct{ error }

func lie(format string, args ...any) error { return errLie{fmt.Errorf(format, args...)} }

// pull is one batch read from one peer. It has a context of its own, so that
// it outlives the call that began it as long as another waits. It needs no
// timer: the last of those who wait leaves by the deadline and cancels it.
type pull struct {
	fs      *fills
	req     FillRequest // without its Hashes
	peer    *peer
	hashes  []kvwire.Hash
	flights []*flight
	stall   time.Duration // above 0: how long to wait for bytes before another peer is tried

	ctx    context.Context
	cancel context.CancelCauseFunc

	// Owned by run.
	settled int       // leading flights that are done
	heard   bool      // something came from the peer
	turned  time.Time // when there was room to talk to the peer; zero before
	told    time.Time // the deadline that the peer was told; zero before
	lengths []int64
	bad     []kvwire.Hash // pages that came with wrong bytes

	// Guarded by fills.mu.
	waiters  int
	deadline time.Time // the latest of the waiters'
	landed   bool      // all flights are done, only courtesies are left
	ended    bool
}

// newPull needs fills.mu.
func newPull(fs *fills, req FillRequest, p *peer, deadline time.Time) *pull {
	pl := &pull{fs: fs, req: req, peer: p, deadline: deadline}
	pl.req.Hashes = nil
	pl.lengths = make([]int64, req.Shards)
	copy(pl.lengths, req.ObjectBytes)
	pl.ctx, pl.cancel = context.WithCancelCause(p.ctx)
	return pl
}

func (p *pull) run() {
	defer p.cancel(nil)
	p.peer.pulls.Add(1)
	err := p.fetch()
	p.peer.pulls.Add(-1)
	p.end(err)
	p.report()
}

func (p *pull) fetch() error {
	for _, room := range []chan struct{}{p.peer.room, p.fs.room} { // those that wait for one peer keep nobody else out
		select {
		case room <- struct{}{}:
			defer func() { <-room }()
		case <-p.ctx.Done():
			return p.ctx.Err()
		}
	}
	p.turned = time.Now()
	for fresh := false; ; fresh = true {
		c, err := p.peer.take(p.ctx, fresh)
		if err != nil {
			return err
		}
		p.fs.m.counters.pulls.Add(1)
		stop := c.watch(p.ctx)
		err = p.exchange(c)
		if usable := stop(); usable && err == nil {
			p.peer.give(c)
			return nil
		}
		c.close()
		if err == nil {
			return nil // everything came, then the deadline
		}
		// The peer may have closed a connection that was idle.
		if !c.pooled || p.heard || p.ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}

// exchange asks for the pages and stores them as they come.
func (p *pull) exchange(c *dataConn) error {
	p.told = p.until()
	req := p.request(time.Until(p.told), p.hashes)
	if err := c.send(kvwire.TypeBatchRead, kvwire.AppendBatchRead(nil, req)); err != nil {
		return err
	}
	for i := range p.flights {
		why, err := p.page(c, i)
		if err != nil {
			return err
		}
		p.settle(why, false)
	}
	h, err := p.header(c, tailTime) // nobody waits any more
	if err != nil {
		return err
	}
	body, err := c.answer(h, kvwire.TypeBatchRead)
	if err != nil {
		return asLie(err)
	}
	version, err := kvwire.ParseBatchReadAnswer(body)
	if err != nil {
		return asLie(err)
	}
	p.peer.hasVersion(version)
	return nil
}

// report has the peer check its own copies of pages that came with wrong
// bytes: it sends them unchecked, and would go on.
func (p *pull) report() {
	if len(p.bad) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(p.peer.ctx, reportTime)
	defer cancel()
	c, err := p.peer.take(ctx, false)
	if err != nil {
		return
	}
	stop := c.watch(ctx)
	req := p.request(reportTime, p.bad)
	_, err = c.call(kvwire.TypeCheck, kvwire.AppendBatchRead(nil, req))
	if usable := stop(); usable && err == nil {
		p.peer.give(c)
		return
	}
	c.close()
	p.fs.m.log.Debug().Err(err).Str("peer", p.peer.name).Msg("cannot report pages with wrong bytes")
}

func (p *pull) request(left time.Duration, hashes []kvwire.Hash) kvwire.BatchRead {
	return kvwire.BatchRead{
		DeadlineUS: uint32(min(max(left, time.Microsecond), maxReadTime).Microseconds()),
		Form:       p.req.Form,
		Namespace:  p.req.Space.Namespace(),
		Tenant:     p.req.Space.Tenant(),
		Hashes:     hashes,
	}
}

func (p *pull) until() time.Time {
	p.fs.mu.Lock()
	defer p.fs.mu.Unlock()
	return p.deadline
}

// header reads the next frame's header. With stall above 0, it fails when
// nothing comes for so long.
func (p *pull) header(c *dataConn, stall time.Duration) (kvwire.Header, error) {
	if err := c.allow(p.ctx, stall); err != nil {
		return kvwire.Header{}, err
	}
	h, err := kvwire.ReadHeader(c.r)
	if err != nil {
		return h, asLie(err)
	}
	p.heard = true
	return h, nil
}

// page receives page i: every shard in order, or one frame that says why not.
func (p *pull) page(c *dataConn, i int) (kvwire.Reason, error) {
	why := kvwire.ReasonNone
	for shard := range p.req.Shards {
		want := kvwire.Shard{Index: uint16(shard), Count: uint16(p.req.Shards)}
		ph, err := p.pageHeader(c)
		switch {
		case err != nil:
			return 0, err
		case int(ph.Index) != i || ph.Form != p.req.Form:
			return 0, lie("page %d in form %s came instead of %d in %s", ph.Index, ph.Form, i, p.req.Form)
		case ph.Reason != kvwire.ReasonNone && shard == 0:
			return p.missed(ph.Reason), nil
		case ph.Reason != kvwire.ReasonNone || ph.Shard != want:
			return 0, lie("shard %s with reason %s came instead of %s", ph.Shard, ph.Reason, want)
		case p.lengths[shard] != 0 && int64(ph.Length) != p.lengths[shard]:
			return 0, lie("an object of %d bytes came for shard %s, of which others have %d", ph.Length, want, p.lengths[shard])
		}
		p.lengths[shard] = int64(ph.Length)
		bad, err := p.object(c, p.hashes[i], ph)
		if err != nil {
			return 0, err
		}
		if bad {
			p.fs.m.counters.corrupt.Add(1)
			why = kvwire.ReasonCorrupt
		}
	}
	if why == kvwire.ReasonCorrupt {
		p.bad = append(p.bad, p.hashes[i])
	}
	return why, nil
}

// missed notes that the peer does not send a page that its directory lists.
func (p *pull) missed(why kvwire.Reason) kvwire.Reason {
	if why != kvwire.ReasonDeadline {
		p.peer.wake()
	}
	if why > kvwire.ReasonDraining {
		return kvwire.ReasonPeer // not a reason of a miss
	}
	return why
}

func (p *pull) pageHeader(c *dataConn) (kvwire.PageHeader, error) {
	h, err := p.header(c, p.stall)
	if err != nil {
		return kvwire.PageHeader{}, err
	}
	if h.Type == kvwire.TypeError|kvwire.AnswerBit {
		_, err := c.answer(h, kvwire.TypeBatchRead)
		return kvwire.PageHeader{}, err
	}
	if h.Type != kvwire.TypePage || h.ID != c.id || h.Length < kvwire.PageHeaderSize {
		return kvwire.PageHeader{}, lie("a %s frame with id %d came instead of a page", h.Type, h.ID)
	}
	var b [kvwire.PageHeaderSize]byte
	if err := c.read(p.ctx, b[:], p.stall); err != nil {
		return kvwire.PageHeader{}, err
	}
	ph, err := kvwire.ParsePageHeader(b[:], h)
	return ph, asLie(err)
}

// object reads one object straight into the arena. bad: it failed its checksum
// or authenticator and is gone.
func (p *pull) object(c *dataConn, h kvwire.Hash, ph kvwire.PageHeader) (bad bool, err error) {
	slot, res, err := p.req.Space.Reserve(ph.Shard, ph.Form, h, int64(ph.Length))
	switch {
	case err != nil:
		return false, lie("%w", err)
	case res.Exists:
		return false, p.discard(c, int64(ph.Length))
	case slot == nil:
		return false, errLocal{res.Reason}
	}
	if err := slot.Receive(func(piece []byte) error { return c.read(p.ctx, piece, p.stall) }); err != nil {
		slot.Abort()
		return false, err
	}
	res = slot.Publish(ph.Sum, ph.Auth)
	switch res.Reason {
	case kvwire.ReasonNone:
		p.fs.m.counters.fetchBytes.Add(ph.Length)
		return false, nil
	case kvwire.ReasonCorrupt:
		return true, nil
	}
	return false, errLocal{res.Reason}
}

// discard reads an object that somebody else has stored meanwhile.
func (p *pull) discard(c *dataConn, n int64) error {
	buf := make([]byte, min(n, 64<<10))
	for n > 0 {
		step := buf[:min(n, int64(len(buf)))]
		if err := c.read(p.ctx, step, p.stall); err != nil {
			return err
		}
		n -= int64(len(step))
	}
	return nil
}

// settle ends the flight of the next page.
func (p *pull) settle(why kvwire.Reason, local bool) {
	f, hash := p.flights[p.settled], p.hashes[p.settled]
	p.settled++
	if why == kvwire.ReasonNone {
		p.fs.m.counters.fetched.Add(1)
	}
	p.fs.m.counters.refused.add(why, 1)
	p.fs.mu.Lock()
	defer p.fs.mu.Unlock()
	delete(p.fs.flights, flightKey{p.req.Space, p.req.Form, hash})
	f.why, f.local = why, local
	close(f.done)
	p.landed = p.settled == len(p.flights)
}

// end settles what is left after err, and judges the peer.
func (p *pull) end(err error) {
	var local errLocal
	var lied errLie
	cause := context.Cause(p.ctx)
	why := kvwire.ReasonPeer
	switch {
	case err == nil:
		p.peer.markUp()
	case errors.As(err, &local):
		why = local.why
	case errors.Is(cause, errAbandoned):
		why = kvwire.ReasonDeadline
	case errors.Is(cause, errPullDeadline):
		why = kvwire.ReasonDeadline
		if !p.heard && !p.turned.IsZero() && p.until().Sub(p.turned) >= fairTime {
			p.peer.markDown(time.Second)
		}
	case cause != nil: // gossip says that the peer is gone
	case errors.As(err, &lied):
		p.fs.m.counters.lies.Add(1)
		p.peer.markDown(time.Second)
		p.fs.m.log.Warn().Err(err).Str("peer", p.peer.name).Msg("a peer broke the protocol")
	case errors.Is(err, errUnauthorized):
		p.peer.markDown(downMax)
	case !p.told.IsZero() && time.Now().After(p.told):
		why = kvwire.ReasonDeadline // as it should; who waits still has more time and may ask again
	default:
		p.peer.markDown(0)
	}
	if err != nil && why == kvwire.ReasonPeer {
		p.fs.m.log.Debug().Err(err).Str("peer", p.peer.name).Int("pages", len(p.flights)-p.settled).Msg("pages from a peer did not come")
	}
	for p.settled < len(p.flights) {
		p.settle(why, errors.As(err, &local))
	}
	p.fs.mu.Lock()
	defer p.fs.mu.Unlock()
	p.ended = true
	p.fs.atWorkNow--
}

// asLie marks what a parser says against a peer.
func asLie(err error) error {
	var e *kvwire.Error
	if errors.As(err, &e) {
		return errLie{err}
	}
	return err
}
