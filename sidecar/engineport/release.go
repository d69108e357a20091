package engineport

import (
	"errors"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

func (c *conn) handleRelease(body []byte) error {
	r, err := kvwire.ParseRelease(body)
	if err != nil {
		return err
	}
	outcome, err := c.release(r)
	if err != nil {
		return err
	}
	switch outcome {
	case kvwire.ReleaseExpired:
		c.s.count.expired.Inc()
	case kvwire.ReleaseCorrupt:
		c.s.count.corrupt.Inc()
	}
	c.out = append(c.out, outcome)
	return nil
}

func (c *conn) release(r kvwire.Release) (uint8, error) {
	e := c.eng
	e.mu.Lock()
	l := e.leases[r.Lease]
	e.mu.Unlock()
	if l == nil || l.own && l.owner != c {
		return 0, kvwire.Errorf(kvwire.CodeUnknownLease, "lease", "%d was never given out or is another engine's", r.Lease)
	}
	if c.role == kvwire.RoleScheduler {
		return c.cancelLease(r.Lease, l)
	}
	holder := int(c.shard.Index)
	if l.own {
		holder = 0
	}
	res, err := c.s.cfg.Cache.Release(r.Lease, holder, r.Verify)
	var twice *cache.DoubleReleaseError
	switch {
	case errors.As(err, &twice):
		return 0, kvwire.Errorf(kvwire.CodeDoubleRelease, "lease", "shard %s has released %d before", c.shard, r.Lease)
	case errors.Is(err, cache.ErrUnknownLease): // so long over that the cache has forgotten it
		return kvwire.ReleaseExpired, nil
	case err != nil:
		return 0, err
	}
	e.mu.Lock()
	if l.left--; l.left <= 0 || res.State == cache.ReleaseExpired {
		e.endLease(r.Lease, l)
	}
	e.mu.Unlock()
	switch res.State {
	case cache.ReleaseLive:
		return kvwire.ReleaseLive, nil
	case cache.ReleaseCorrupt:
		c.s.count.miss(kvwire.ReasonCorrupt, 1, e.pageTokens)
		return kvwire.ReleaseCorrupt, nil
	}
	return kvwire.ReleaseExpired, nil
}

// cancelLease ends a lease for every rank.
func (c *conn) cancelLease(id uint64, l *lease) (uint8, error) {
	e := c.eng
	e.mu.Lock()
	defer e.mu.Unlock()
	if l.cancelled {
		return 0, kvwire.Errorf(kvwire.CodeDoubleRelease, "lease", "the scheduler has released %d before", id)
	}
	l.cancelled = true
	if l.left <= 0 { // every rank has let go of it in time
		return kvwire.ReleaseLive, nil
	}
	_, live := c.s.cfg.Cache.LeaseClient(id)
	_ = c.s.cfg.Cache.Cancel(id)
	e.endLease(id, l)
	if !live || time.Now().After(l.expires) {
		return kvwire.ReleaseExpired, nil
	}
	return kvwire.ReleaseLive, nil
}
