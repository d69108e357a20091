package cache

import (
	"golang.org/x/sys/unix"

	"membrane/kvwire"
)

// on says of each guard of an invariant that it is on. A build with the tag
// invariant_off_NAME gives guards a method that hides one of these, so that
// `make test-invariants` can show that the invariant's test then fails. In
// every other build the answers are constants and cost nothing.
type on struct{}

type guards struct{ on }

var guard guards

func (on) arenaResize() bool   { return true }
func (on) arenaWrite() bool    { return true }
func (on) clientCap() bool     { return true }
func (on) convertSum() bool    { return true }
func (on) evictionCount() bool { return true }
func (on) inUse() bool         { return true }
func (on) leaseSum() bool      { return true }
func (on) ownCopy() bool       { return true }
func (on) pinCap() bool        { return true }
func (on) pins() bool          { return true }
func (on) prefault() bool      { return true }
func (on) publishAuth() bool   { return true }
func (on) publishSum() bool    { return true }
func (on) quarantineCap() bool { return true }
func (on) releaseSum() bool    { return true }
func (on) replace() bool       { return true }
func (on) resetEpoch() bool    { return true }
func (on) window() bool        { return true }

// intact reports whether bytes have their checksum, which is one of parts if
// parts says so. Invariant 1: they are offered only if they do.
func intact(b []byte, want kvwire.Checksum, parts bool) bool {
	if parts {
		return SumParts(b) == want
	}
	return kvwire.Sum(b) == want
}

// mayFree guards invariant 4: slots are freed only when nobody refers to them.
func mayFree(p *page) bool { return !guard.inUse() || p.refs == 0 }

// mayEvict guards invariant 5: what is pinned is no victim of the policy.
func mayEvict(p *page) bool { return mayFree(p) || !guard.pins() && p.pins > 0 }

// mayPin guards invariant 4: leases and pins have a cap, and so has the share
// of one client. It needs c.mu.
func (c *Cache) mayPin(p *page, client *client, held int64) bool {
	more := p.bytes
	if p.pins > 0 {
		more = 0
	}
	if guard.pinCap() && c.pinned+more > c.pinCap {
		return false
	}
	return !guard.clientCap() || client == nil || client.bytes+held+p.bytes <= c.clientCap
}

// sameEpoch guards invariant 3: a store that a reset overtook is not published.
func sameEpoch(s *Space, began uint64) bool { return !guard.resetEpoch() || s.epoch == began }

// arenaSeals guards invariant 6: readers can neither write nor resize.
func arenaSeals() int {
	seals := unix.F_SEAL_SEAL
	if guard.arenaResize() {
		seals |= unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	}
	if guard.arenaWrite() {
		seals |= unix.F_SEAL_FUTURE_WRITE
	}
	return seals
}
