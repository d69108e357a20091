package engineport

import (
	"encoding/binary"
	"sync/atomic"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// margin is kept of a request's time for leasing what a fill brought.
const margin = 2 * time.Millisecond

func (c *conn) handleMatch(body []byte) (err error) {
	m, err := kvwire.ParseMatch(body)
	if err != nil {
		return err
	}
	e := c.eng
	if n := uint32(len(m.Tokens) / 4); m.Held > n {
		return kvwire.Errorf(kvwire.CodeBadField, "held", "%d tokens are more than the %d of the prompt", m.Held, n)
	}
	kc, err := kvwire.NewChain(e.pageTokens, m.Scope)
	if err != nil {
		return err
	}
	ch := &chain{owner: c, c: kc}
	handle, err := c.addChain(ch, len(m.Tokens)/4/e.pageTokens)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil { // as if nothing had been asked
			e.mu.Lock()
			e.dropChain(handle, ch)
			e.mu.Unlock()
		}
	}()
	if err = kc.AppendWire(m.Tokens); err != nil {
		return err
	}
	first := min(int(m.Held)/e.pageTokens, len(kc.Hashes()))
	return c.lease(ask{
		handle: handle, hashes: kc.Hashes(), first: first, most: kvwire.MaxBatch,
		deadline: c.deadline(m.DeadlineUS), ttl: ttl(m.LeaseMS), flags: m.Flags,
	})
}

// addChain gives a chain of so many pages a handle.
func (c *conn) addChain(ch *chain, pages int) (uint64, error) {
	e := c.eng
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.chains) >= MaxHandles {
		return 0, kvwire.Errorf(kvwire.CodeBusy, "handle", "engine %q keeps %d chains, which is the most: drop those of finished requests", e.key.name, MaxHandles)
	}
	cost := chainCost(pages, e.pageTokens)
	if err := e.take("handle", cost); err != nil {
		return 0, err
	}
	ch.cost = cost
	handle := c.s.lastID.Add(1)
	e.chains[handle] = ch
	return handle, nil
}

func (c *conn) handleLease(body []byte) error {
	r, err := kvwire.ParseLeaseRequest(body)
	if err != nil {
		return err
	}
	ch, err := c.eng.chainOf("handle", r.Handle)
	if err != nil {
		return err
	}
	hashes := ch.hashes()
	if int64(r.First) > int64(len(hashes)) {
		return kvwire.Errorf(kvwire.CodeBadField, "first", "page %d is beyond the chain's %d", r.First, len(hashes))
	}
	if r.Pages > kvwire.MaxBatch {
		return kvwire.Errorf(kvwire.CodeTooLarge, "pages", "%d pages are more than %d", r.Pages, kvwire.MaxBatch)
	}
	return c.lease(ask{
		handle: r.Handle, hashes: hashes, first: int(r.First), most: int(r.Pages),
		deadline: c.deadline(r.DeadlineUS), ttl: ttl(r.LeaseMS), flags: r.Flags,
	})
}

// deadline returns when the answer is due. Zero asks for what is here, without
// a peer and however long its check takes.
func (c *conn) deadline(us uint32) time.Time {
	return c.arrived.Add(min(time.Duration(us)*time.Microsecond, MaxDeadline))
}

func ttl(ms uint32) time.Duration {
	if ms == 0 {
		return DefaultLease
	}
	return min(time.Duration(ms)*time.Millisecond, MaxLease)
}

// ask is what match and lease have in common.
type ask struct {
	handle   uint64
	hashes   []kvwire.Hash // of the whole chain
	first    int
	most     int
	deadline time.Time
	ttl      time.Duration
	flags    uint16
}

// lease finds, fetches and leases pages and appends the answer.
func (c *conn) lease(a ask) error {
	e := c.eng
	wanted := a.hashes[a.first:]
	wanted = wanted[:min(len(wanted), a.most)]
	answer := kvwire.Leased{
		Handle: a.handle, First: uint32(a.first), ChainPages: uint32(len(a.hashes)), Shards: uint16(e.shards),
	}
	here, why := e.space.Match(e.form, wanted)
	if a.flags&kvwire.MatchPresence != 0 {
		answer.Pages, answer.Reason = uint32(here), why
		c.out = kvwire.AppendLeased(c.out, answer)
		return nil
	}
	have := here
	if have < len(wanted) && a.flags&kvwire.MatchLocal == 0 {
		have, why = c.fill(wanted, here, why, a.deadline)
	}
	// Every leased byte is checked once more, which takes time, too.
	if timed := a.deadline.After(c.arrived); timed {
		if can := c.s.pace.pages(time.Until(a.deadline), e.pageBytes); have > can {
			have, why = can, kvwire.ReasonDeadline
		}
	}
	var locs []cache.Location
	if have > 0 {
		began := time.Now()
		granted, got, reason, err := e.space.Lease(cache.LeaseRequest{
			Form: e.form, Shards: e.shards, Hashes: wanted[:have], Client: c.id, TTL: a.ttl,
			Holders: e.holders(), Matched: true,
		}, c.locations[:0])
		if err != nil {
			return err
		}
		locs, c.locations = got, got[:0]
		if reason != kvwire.ReasonNone {
			why = reason
		}
		if granted.ID != 0 {
			record := &lease{owner: c, expires: granted.Expires, left: e.holders()}
			if err := e.addLease(granted.ID, record, wanted[:granted.Pages]); err != nil {
				_ = c.s.cfg.Cache.Cancel(granted.ID)
				return err
			}
			answer.Lease, answer.Pages = granted.ID, uint32(granted.Pages)
			answer.LeaseMS = uint32(max(time.Until(granted.Expires).Milliseconds(), 1))
		}
		c.s.pace.learn(time.Since(began), locs)
	}
	answer.FromPeers = uint32(max(0, int(answer.Pages)-here))
	if int(answer.Pages) < len(wanted) {
		answer.Reason = why
	}
	c.countLease(answer, locs, len(wanted))
	c.out = kvwire.AppendLeased(c.out, answer)
	for _, l := range locs {
		c.out = appendLocation(c.out, l)
	}
	return nil
}

func appendLocation(b []byte, l cache.Location) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(l.Offset))
	b = binary.LittleEndian.AppendUint64(b, uint64(l.Length))
	return binary.LittleEndian.AppendUint64(b, uint64(l.Sum))
}

// fill gets the pages that are not here from peers, as far as they could be
// leased at all.
func (c *conn) fill(wanted []kvwire.Hash, here int, why kvwire.Reason, deadline time.Time) (int, kvwire.Reason) {
	e := c.eng
	by := deadline.Add(-min(margin, time.Until(deadline)/4))
	room := int(c.s.cfg.Cache.Arena().Size() / 4 / e.pageBytes)
	want := wanted[here:min(len(wanted), max(here, room))]
	if c.s.cfg.Fill == nil || len(want) == 0 || !time.Now().Before(by) {
		return here, why
	}
	ctx, stop := c.watch(by)
	defer stop()
	r := FillRequest{Space: e.space, Form: e.form, Shards: e.shards, Hashes: want}
	if e.shards == 1 { // with more, their sizes may differ and only their workers know them
		r.ObjectBytes = []int64{c.object}
	}
	n, why := c.s.cfg.Fill.Fill(ctx, r)
	n = min(max(n, 0), len(want))
	switch {
	case here+n == len(wanted):
		why = kvwire.ReasonNone
	case n == len(want):
		why = kvwire.ReasonPinned
	case why == kvwire.ReasonNone:
		why = kvwire.ReasonAbsent
	}
	return here + n, why
}

func (c *conn) countLease(a kvwire.Leased, locs []cache.Location, wanted int) {
	n, e := c.s.count, c.eng
	localPages := int(a.Pages) - int(a.FromPeers)
	var bytes [sources]int64
	for i, l := range locs {
		source := local
		if i/e.shards >= localPages {
			source = peer
		}
		bytes[source] += l.Length
	}
	n.hit(local, localPages, e.pageTokens, bytes[local])
	n.hit(peer, int(a.FromPeers), e.pageTokens, bytes[peer])
	n.miss(a.Reason, wanted-int(a.Pages), e.pageTokens)
}

func (c *conn) handleExtend(body []byte) error {
	x, err := kvwire.ParseExtend(body)
	if err != nil {
		return err
	}
	ch, err := c.eng.chainOf("handle", x.Handle)
	if err != nil {
		return err
	}
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if n := ch.c.Tokens() + len(x.Tokens)/4; n <= kvwire.MaxTokens { // else the chain refuses them
		if err := c.eng.growChain(ch, x.Handle, n/c.eng.pageTokens); err != nil {
			return err
		}
	}
	if err := ch.c.AppendWire(x.Tokens); err != nil {
		return err
	}
	c.out = binary.LittleEndian.AppendUint32(c.out, uint32(len(ch.c.Hashes())))
	return nil
}

func (c *conn) handleDrop(body []byte) error {
	handle, err := kvwire.ParseHandle(body)
	if err != nil {
		return err
	}
	ch, err := c.eng.chainOf("handle", handle)
	if err != nil {
		return err
	}
	c.eng.mu.Lock()
	c.eng.dropChain(handle, ch)
	c.eng.mu.Unlock()
	if c.inbox != nil {
		before := len(c.inbox.reserved)
		c.inbox.drop(handle)
		c.s.slots.Add(int64(len(c.inbox.reserved) - before))
	}
	return nil
}

// pace estimates how fast leases are granted, so that a large one does not
// outlast its deadline.
type pace struct{ perSecond atomic.Int64 }

const firstPace = 6 << 30 // bytes a second, below what the checksum does on any machine we know

func (p *pace) pages(left time.Duration, pageBytes int64) int {
	speed := p.perSecond.Load()
	if speed == 0 {
		speed = firstPace
	}
	if left <= 0 {
		left = 0
	}
	// Half of the estimate, which may be off, and at least a page, without
	// which it would never get better.
	return max(1, int(left.Seconds()/2*float64(speed))/int(max(pageBytes, 1)))
}

func (p *pace) learn(took time.Duration, locs []cache.Location) {
	var bytes int64
	for _, l := range locs {
		bytes += l.Length
	}
	if bytes < 1<<20 || took <= 0 {
		return
	}
	now := int64(float64(bytes) / took.Seconds())
	if old := p.perSecond.Load(); old > 0 {
		now = (3*old + now) / 4
	}
	p.perSecond.Store(max(now, 1<<20))
}
