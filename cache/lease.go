package cache

import (
	"errors"
	"fmt"
	"time"

	"membrane/kvwire"
)

// ErrUnknownLease is returned for an id that this cache never gave out.
var ErrUnknownLease = errors.New("unknown lease")

// DoubleReleaseError is returned when a holder releases a lease twice.
type DoubleReleaseError struct {
	ID     uint64
	Holder int
}

func (e *DoubleReleaseError) Error() string {
	return fmt.Sprintf("cannot release lease %d: holder %d has released it already", e.ID, e.Holder)
}

// ClientID names who leases, for its share of the cap and for EndClient. The
// caller gives each connection or engine its own.
type ClientID uint64

// LeaseRequest asks for the longest held prefix of some pages.
type LeaseRequest struct {
	Form   kvwire.Form
	Shards int           // of one page: 1 to kvwire.MaxShards
	Hashes []kvwire.Hash // at most kvwire.MaxBatch
	Client ClientID
	TTL    time.Duration // above 0, at most MaxTTL
	// Holders is how many ranks will release the lease: 1 to kvwire.MaxShards.
	Holders int
	// Matched says that the caller counted these lookups with Match just
	// before; otherwise Lease counts them.
	Matched bool
}

func (r *LeaseRequest) check() error {
	switch {
	case r.Shards < 1 || r.Shards > kvwire.MaxShards:
		return fmt.Errorf("cannot lease: Shards %d is not between 1 and %d", r.Shards, kvwire.MaxShards)
	case len(r.Hashes) > kvwire.MaxBatch:
		return fmt.Errorf("cannot lease: %d Hashes, above %d", len(r.Hashes), kvwire.MaxBatch)
	case r.TTL <= 0 || r.TTL > MaxTTL:
		return fmt.Errorf("cannot lease: TTL %v is not between 0 and %v", r.TTL, MaxTTL)
	case r.Holders < 1 || r.Holders > kvwire.MaxShards:
		return fmt.Errorf("cannot lease: Holders %d is not between 1 and %d", r.Holders, kvwire.MaxShards)
	}
	return nil
}

// Lease is pages that stay where they are until it ends.
type Lease struct {
	ID      uint64 // never 0 and never used again
	Pages   int
	Expires time.Time
}

// Lease pins the longest prefix of the hashes that is held complete in the
// form, verifies every object and appends the locations to dst, shard by shard
// within page by page. The reason says why the next page is not in it:
// [kvwire.ReasonPinned] if a cap was reached, [kvwire.ReasonCorrupt] if an
// object failed its checksum (it is quarantined then). Without any page there
// is no lease and its ID is 0. An error means a malformed request.
func (s *Space) Lease(req LeaseRequest, dst []Location) (Lease, []Location, kvwire.Reason, error) {
	if err := req.check(); err != nil {
		return Lease{}, dst, kvwire.ReasonNone, err
	}
	p, why := s.hold(req, dst, !req.Matched)
	l, dst, bad := p.Lease(len(req.Hashes))
	if bad != kvwire.ReasonNone { // counted already
		return l, dst, bad, nil
	}
	return l, dst, s.c.miss(why), nil
}

// grantStep is how many pages grant looks up before it touches them, so that
// their ways through the caches of the processor overlap.
const grantStep = 64

// grant pins pages for l as far as they are held and the caps allow.
func (s *Space) grant(l *lease, cl *client, hashes []kvwire.Hash, dst []Location) ([]Location, kvwire.Reason) {
	c := s.c
	var found [grantStep]*page
	for len(hashes) > 0 {
		step := hashes[:min(grantStep, len(hashes))]
		hashes = hashes[len(step):]
		for i := range step {
			found[i] = s.pages[step[i]]
		}
		for _, p := range found[:len(step)] {
			objs, why := p.held(l.form)
			if why == kvwire.ReasonNone && l.shards > 0 && len(objs) != l.shards {
				why = kvwire.ReasonLayout
			}
			if why == kvwire.ReasonNone && !c.mayPin(p, cl, l.bytes) {
				why = kvwire.ReasonPinned
			}
			if why != kvwire.ReasonNone {
				return dst, why
			}
			c.pin(p)
			l.pages = append(l.pages, p)
			l.bytes += p.bytes
			if l.shards > 0 {
				for k := range objs {
					dst = append(dst, objs[k].location())
				}
			}
		}
	}
	return dst, kvwire.ReasonNone
}

// shorten takes all but the first n pages out of a lease; it needs c.mu.
func (c *Cache) shorten(l *lease, n int) {
	for _, p := range l.pages[n:] {
		c.unpin(p)
	}
	clear(l.pages[n:])
	l.pages = l.pages[:n]
}

// firstCorrupt returns the index of the first location whose bytes are not
// what was stored, or -1, and how many bytes it checked. The locations must be
// pinned. Those that fresh (where it is not nil) tells of by their index were
// checked where they are a moment ago.
func (c *Cache) firstCorrupt(locs []Location, fresh func(i int) bool) (bad int, bytes int64) {
	checked := 0
	defer func() { c.counters.verified.Add(uint64(checked)) }()
	for i := range locs {
		if fresh != nil && fresh(i) {
			continue
		}
		at := &locs[i]
		checked++
		bytes += at.Length
		if !intact(c.arena.Bytes(at.Offset, at.Length), at.Sum, at.parts) {
			return i, bytes
		}
	}
	return -1, bytes
}

// ReleaseState says what became of a lease by the time of its release.
type ReleaseState uint8

// The states of a released lease.
const (
	// ReleaseLive: the pages were pinned until now.
	ReleaseLive ReleaseState = iota + 1
	// ReleaseExpired: the lease ended before, by its TTL or with its client,
	// so what was copied may be other pages' bytes.
	ReleaseExpired
	// ReleaseCorrupt: the lease was live, but an object has not the bytes
	// that were stored.
	ReleaseCorrupt
)

// ReleaseResult is the answer to a release.
type ReleaseResult struct {
	State ReleaseState
	// BadPage is the index in the lease of the first corrupt page when
	// ReleaseCorrupt, and -1 otherwise.
	BadPage int
}

// Release lets one holder (0 to Holders-1) go of a lease and says whether the
// pages were held until now. With verify it checks every leased object again
// first. When all holders have let go, the pages are unpinned. It fails with
// [ErrUnknownLease] and [*DoubleReleaseError].
func (c *Cache) Release(id uint64, holder int, verify bool) (ReleaseResult, error) {
	res := ReleaseResult{State: ReleaseExpired, BadPage: -1}
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.leases.live[id]
	if l == nil || l.client == nil {
		switch c.leases.fate(id) {
		case unknown, live: // a live one here is a pin
			return ReleaseResult{}, fmt.Errorf("cannot release lease %d: %w", id, ErrUnknownLease)
		case endedReleased:
			return ReleaseResult{}, &DoubleReleaseError{ID: id, Holder: holder}
		}
		return res, nil
	}
	if holder < 0 || holder >= l.holders {
		return ReleaseResult{}, fmt.Errorf("cannot release lease %d: holder %d is not between 0 and %d", id, holder, l.holders-1)
	}
	if l.released.has(holder) {
		return ReleaseResult{}, &DoubleReleaseError{ID: id, Holder: holder}
	}
	if !time.Now().Before(l.expires) {
		c.expireLease(l)
		return res, nil
	}
	l.released.set(holder)
	res.State = ReleaseLive
	l.busy++
	if guard.releaseSum() && verify && c.enter() {
		if bad := c.verifyLease(l); bad >= 0 {
			res.State, res.BadPage = ReleaseCorrupt, bad/l.shards
			c.condemn(l.pages[res.BadPage], l.form, bad%l.shards)
		}
		c.inside.Done()
	}
	l.left--
	switch {
	case l.ended != live && res.State == ReleaseLive: // during the check
		res.State = ReleaseExpired
	case l.ended == live && l.left == 0:
		c.end(l, endedReleased)
	}
	c.idle(l)
	return res, nil
}

// verifyLease returns the index, shard by shard within page by page, of the
// first corrupt object of l, or -1. It lets c.mu go while it computes; l.busy
// keeps the pages.
func (c *Cache) verifyLease(l *lease) int {
	locs := c.leases.scratch[:0]
	c.leases.scratch = nil
	for _, p := range l.pages {
		for k := range p.formSet(l.form).objs {
			locs = append(locs, p.formSet(l.form).objs[k].location())
		}
	}
	c.mu.Unlock()
	bad, _ := c.firstCorrupt(locs, nil)
	c.mu.Lock()
	if cap(locs) <= maxKept {
		c.leases.scratch = locs
	}
	return bad
}

// Cancel ends a lease for all its holders at once. It fails with
// [ErrUnknownLease]; a lease that ended already is no error.
func (c *Cache) Cancel(id uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.leases.live[id]; l != nil && l.client != nil {
		c.end(l, endedCancelled)
		return nil
	}
	if f := c.leases.fate(id); f == unknown || f == live {
		return fmt.Errorf("cannot cancel lease %d: %w", id, ErrUnknownLease)
	}
	return nil
}

// EndClient ends all leases of a client, as when its connection is lost, and
// returns how many those were.
func (c *Cache) EndClient(id ClientID) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for cl := c.leases.clients[id]; cl != nil && cl.leases != nil; n++ {
		c.end(cl.leases, endedCancelled)
	}
	return n
}

// LeaseClient returns whose lease it is, and false when it is not live.
func (c *Cache) LeaseClient(id uint64) (ClientID, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	l := c.leases.live[id]
	if l == nil || l.client == nil {
		return 0, false
	}
	return l.client.id, true
}
