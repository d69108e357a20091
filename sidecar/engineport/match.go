package engineport

import (
	"encoding/binary"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// margin is kept of a request's time for leasing what a fill brought.
const margin = 2 * time.Millisecond

// handleMatch hashes the tokens as they come, straight out of the
// connection's buffer.
func (c *conn) handleMatch(h kvwire.Header) error {
	c.hurry(int(h.Length))
	m, ch, early, err := c.receiveMatch(int(h.Length))
	c.relax()
	if err != nil {
		return err
	}
	var begin int
	c.out, begin = kvwire.BeginFrame(c.out[:0], kvwire.TypeMatch|kvwire.AnswerBit, h.ID)
	if err := c.match(m, ch, early); err != nil {
		return err
	}
	c.out = kvwire.EndFrame(c.out, begin)
	return nil
}

// receiveMatch reads the body of a match, all of it whatever is wrong with it.
// The tokens go into the chain and nowhere else. What the chain will keep is
// taken before they come. The pages of a long one are looked up early, while
// the rest comes.
func (c *conn) receiveMatch(length int) (kvwire.Match, *chain, *ahead, error) {
	e := c.eng
	refuse := func(m kvwire.Match, rest int, err error) (kvwire.Match, *chain, *ahead, error) {
		if _, e := c.r.Discard(rest); e != nil {
			return m, nil, nil, closing{e}
		}
		return m, nil, nil, err
	}
	b, err := c.r.Peek(min(length, kvwire.MaxMatchHead))
	if err != nil {
		return kvwire.Match{}, nil, nil, closing{err}
	}
	m, head, err := kvwire.ParseMatchHead(b, length)
	if err != nil {
		return refuse(m, length, err)
	}
	rest := length - head
	if _, err := c.r.Discard(head); err != nil {
		return m, nil, nil, closing{err}
	}
	if n := uint32(rest / 4); m.Held > n {
		return refuse(m, rest, kvwire.Errorf(kvwire.CodeBadField, "held", "%d tokens are more than the %d of the prompt", m.Held, n))
	}
	kc, err := kvwire.NewChain(e.pageTokens, m.Scope)
	if err != nil {
		return refuse(m, rest, err)
	}
	ch := &chain{owner: c, c: kc}
	if err := e.growChain(ch, rest/4/e.pageTokens); err != nil {
		return refuse(m, rest, err)
	}
	var early *ahead
	first := int(m.Held) / e.pageTokens
	if m.Flags&kvwire.MatchPresence == 0 && rest/4/e.pageTokens-first >= aheadPages && runtime.GOMAXPROCS(0) > 1 {
		early = c.lookAhead(first, c.leaseRequest(nil, ttl(m.LeaseMS)))
	}
	whole := false
	defer func() {
		if !whole {
			e.discard(ch)
			early.drop()
		}
	}()
	kc.Expect(min(rest, expectBytes) / 4)
	others := e.otherSizes(m.Scope)
	for rest > 0 {
		b, err := c.r.Peek(min(rest, max(4, c.r.Buffered()&^3)))
		if err != nil {
			return m, nil, nil, closing{err}
		}
		if err := kc.AppendWire(b); err != nil {
			return refuse(m, rest, err)
		}
		others = ch.feedOthers(others, b)
		early.feed(kc.Hashes())
		rest -= len(b)
		_, _ = c.r.Discard(len(b)) // it has them
	}
	whole = true
	return m, ch, early, nil
}

// expectBytes bounds what the length of a match alone makes us allocate for.
const expectBytes = 1 << 20

func (c *conn) match(m kvwire.Match, ch *chain, early *ahead) (err error) {
	e := c.eng
	defer func() {
		if err != nil { // as if nothing had been asked
			e.discard(ch)
		}
	}()
	if err := c.addChain(ch); err != nil {
		early.drop()
		return err
	}
	hashes := ch.hashes()
	return c.lease(ask{
		handle: ch.handle, hashes: hashes, first: min(int(m.Held)/e.pageTokens, len(hashes)), most: kvwire.MaxBatch,
		deadline: c.deadline(m.DeadlineUS), ttl: ttl(m.LeaseMS), flags: m.Flags, early: early, others: ch.others,
	})
}

// addChain gives a chain a handle.
func (c *conn) addChain(ch *chain) error {
	e := c.eng
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.chains) >= MaxHandles {
		return kvwire.Errorf(kvwire.CodeBusy, "handle", "engine %q keeps %d chains, which is the most: drop those of finished requests", e.key.name, MaxHandles)
	}
	ch.handle = c.s.lastID.Add(1)
	e.chains[ch.handle] = ch
	return nil
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
		deadline: c.deadline(r.DeadlineUS), ttl: ttl(r.LeaseMS), flags: r.Flags, own: ch.c == nil,
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
	early    *ahead // has looked up what is wanted, or nil
	own      bool   // the lease is this connection's alone
	others   []otherSize
}

// lease finds, fetches and leases pages and appends the answer.
func (c *conn) lease(a ask) error {
	e := c.eng
	wanted := a.hashes[a.first:]
	wanted = wanted[:min(len(wanted), a.most)]
	answer := kvwire.Leased{
		Handle: a.handle, First: uint32(a.first), ChainPages: uint32(len(a.hashes)), Shards: uint16(e.shards),
	}
	if odd := e.odd.Load(); odd != nil && guard.headWindow() {
		a.early.drop()
		if answer.Pages, answer.Reason = 0, kvwire.ReasonLayout; len(wanted) == 0 {
			answer.Reason = kvwire.ReasonNone
		}
		c.countLease(answer, nil, len(wanted))
		c.out = kvwire.AppendLeased(c.out, answer)
		return nil
	}
	if a.flags&kvwire.MatchPresence != 0 {
		here, why := e.space.Match(e.form, wanted)
		answer.Pages, answer.Reason = uint32(here), c.refine(why, wanted[here:], a.others, a.first+here)
		c.out = kvwire.AppendLeased(c.out, answer)
		return nil
	}
	prefix, why, err := c.hold(a, wanted)
	if err != nil {
		return err
	}
	defer prefix.Drop()
	here, brought := prefix.Pages(), 0
	if here < len(wanted) && why != kvwire.ReasonPinned {
		brought, why = c.complete(&prefix, a, wanted, why)
		why = c.refine(why, wanted[prefix.Pages():], a.others, a.first+prefix.Pages())
	}
	most := prefix.Pages()
	// What was here already is checked once more, which takes time, too.
	if a.deadline.After(c.arrived) {
		can := prefix.Sound() + c.s.pace.pages(time.Until(a.deadline), e.pageBytes)
		if most-prefix.Fresh() > can {
			why = kvwire.ReasonDeadline
			if most = can; here <= can {
				most += prefix.Fresh()
			}
		}
	}
	began := time.Now()
	granted, locs, reason := prefix.Lease(most)
	c.s.pace.learn(time.Since(began), prefix.Checked())
	c.locations = locs[:0]
	if reason != kvwire.ReasonNone {
		why = reason
	}
	if granted.ID != 0 && !e.fit(locs) {
		_ = c.s.cfg.Cache.Cancel(granted.ID)
		granted, locs, why = cache.Lease{}, locs[:0], kvwire.ReasonLayout
	}
	if granted.ID != 0 {
		record := &lease{owner: c, own: a.own, expires: granted.Expires, left: c.holders(a.own)}
		if err := e.addLease(granted.ID, record, wanted[:granted.Pages]); err != nil {
			_ = c.s.cfg.Cache.Cancel(granted.ID)
			return err
		}
		answer.Lease, answer.Pages = granted.ID, uint32(granted.Pages)
		answer.LeaseMS = uint32(max(time.Until(granted.Expires).Milliseconds(), 1))
	}
	answer.FromPeers = uint32(max(0, min(brought, int(answer.Pages)-here)))
	if int(answer.Pages) < len(wanted) {
		answer.Reason = why
	}
	c.countLease(answer, locs, len(wanted))
	c.out = kvwire.AppendLeased(c.out, answer)
	c.out = appendLocations(c.out, locs)
	return nil
}

// leaseRequest asks for pages in this engine's form.
func (c *conn) leaseRequest(hashes []kvwire.Hash, ttl time.Duration) cache.LeaseRequest {
	e := c.eng
	return cache.LeaseRequest{Form: e.form, Shards: e.shards, Hashes: hashes, Client: c.id, TTL: ttl, Holders: e.holders()}
}

// hold pins what is here of the wanted pages, if that has not been done early.
func (c *conn) hold(a ask, wanted []kvwire.Hash) (cache.Prefix, kvwire.Reason, error) {
	if a.early != nil {
		return a.early.take()
	}
	req := c.leaseRequest(wanted, a.ttl)
	req.Holders = c.holders(a.own)
	return c.eng.space.Hold(req, c.locations[:0])
}

func appendLocations(b []byte, locs []cache.Location) []byte {
	b = slices.Grow(b, len(locs)*kvwire.LocationSize)
	for i := range locs {
		l := &locs[i]
		b = kvwire.AppendLocation(b, kvwire.Location{Offset: uint64(l.Offset), Length: uint64(l.Length), Sum: l.Sum})
	}
	return b
}

func (c *conn) countLease(a kvwire.Leased, locs []cache.Location, wanted int) {
	n, e := c.s.count, c.eng
	if a.Pages > 0 { // all of one size
		page := bytesOfAll(locs[:e.shards])
		n.hit(local, int(a.Pages-a.FromPeers), e.pageTokens, page*int64(a.Pages-a.FromPeers))
		n.hit(peer, int(a.FromPeers), e.pageTokens, page*int64(a.FromPeers))
	}
	n.miss(a.Reason, wanted-int(a.Pages), e.pageTokens)
	e.hits.Add(uint64(a.Pages))
	e.missed.add(a.Reason, wanted-int(a.Pages))
}

func bytesOfAll(locs []cache.Location) (n int64) {
	for i := range locs {
		n += locs[i].Length
	}
	return n
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
	if ch.c == nil {
		return kvwire.Errorf(kvwire.CodeBadField, "handle", "chain %d is named by hashes: match the longer list", x.Handle)
	}
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if n := ch.c.Tokens() + len(x.Tokens)/4; n <= kvwire.MaxTokens { // else the chain refuses them
		if err := c.eng.growChain(ch, n/c.eng.pageTokens); err != nil {
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
	c.eng.discard(ch)
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

// learn notes how long it took to check so many bytes.
func (p *pace) learn(took time.Duration, bytes int64) {
	if bytes < 1<<20 || took <= 0 {
		return
	}
	now := int64(float64(bytes) / took.Seconds())
	if old := p.perSecond.Load(); old > 0 {
		now = (3*old + now) / 4
	}
	p.perSecond.Store(max(now, 1<<20))
}

// fits reports whether what is known of the pace says that so many bytes are done
// in the time that is left. Each time that they are not the estimate rises a
// little: else one slow page would rule out all that come after it.
func (p *pace) fits(left time.Duration, bytes int64) bool {
	speed := p.perSecond.Load()
	if left <= 0 {
		return false
	}
	if speed == 0 || left.Seconds()*float64(speed) >= float64(bytes) {
		return true
	}
	p.perSecond.Store(speed + speed/4)
	return false
}
