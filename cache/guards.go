package cache

import "membrane/kvwire"

// Each guard of an invariant is one function here, so that a test build can
// switch it off and show that the invariant's test then fails.

// intact guards invariant 1: bytes are offered only if they have their checksum.
func intact(b []byte, want kvwire.Checksum) bool { return kvwire.Sum(b) == want }

// mayFree guards invariant 4: slots are freed only when nobody refers to them.
func mayFree(p *page) bool { return p.refs == 0 }

// mayPin guards invariant 4: leases and pins have a cap, and so has the share
// of one client. It needs c.mu.
func (c *Cache) mayPin(p *page, client *client, held int64) bool {
	more := p.bytes
	if p.pins > 0 {
		more = 0
	}
	if c.pinned+more > c.pinCap {
		return false
	}
	return client == nil || client.bytes+held+p.bytes <= c.clientCap
}

// sameEpoch guards invariant 3: a store that a reset overtook is not published.
func sameEpoch(s *Space, began uint64) bool { return s.epoch == began }
