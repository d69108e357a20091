package engineport

import "membrane/kvwire"

// handleMatchHashes is a match by hashes. The ranks of such an engine ask each
// for itself, so that each has a lease of its own and releases it alone.
func (c *conn) handleMatchHashes(body []byte) error {
	m, err := kvwire.ParseMatchHashes(body)
	if err != nil {
		return err
	}
	e := c.eng
	ch := &chain{owner: c, named: m.Hashes}
	if err := e.growChain(ch, len(m.Hashes)); err != nil {
		return err
	}
	err = c.addChain(ch)
	if err == nil {
		err = c.lease(ask{
			handle: ch.handle, hashes: m.Hashes, most: kvwire.MaxBatch, own: true,
			deadline: c.deadline(m.DeadlineUS), ttl: ttl(m.LeaseMS), flags: m.Flags,
		})
	}
	if err != nil { // as if nothing had been asked
		e.discard(ch)
	}
	return err
}

// holders returns how many ranks release a lease of this connection.
func (c *conn) holders(own bool) int {
	if own {
		return 1
	}
	return c.eng.holders()
}
