package cache

import (
	"fmt"
	"time"

	"membrane/kvwire"
)

// Pin is pages that are kept for a hand-over, whatever the policy thinks of
// them, until Unpin or Expires.
type Pin struct {
	ID      uint64 // never 0; ids of pins and leases differ
	Pages   int
	Expires time.Time
}

// Pin keeps the longest prefix of the hashes that is held complete in the form
// for ttl (at most [MaxTTL]); the reason says why the next page is not in it.
// Pins share the cap of leases but count for no client. Without any page there
// is no pin and its ID is 0. An error means a malformed request.
func (s *Space) Pin(form kvwire.Form, hashes []kvwire.Hash, ttl time.Duration) (Pin, kvwire.Reason, error) {
	if ttl <= 0 || ttl > MaxTTL {
		return Pin{}, kvwire.ReasonNone, fmt.Errorf("cannot pin: ttl %v is not between 0 and %v", ttl, MaxTTL)
	}
	if len(hashes) > kvwire.MaxBatch {
		return Pin{}, kvwire.ReasonNone, fmt.Errorf("cannot pin: %d hashes, above %d", len(hashes), kvwire.MaxBatch)
	}
	c := s.c
	expires := time.Now().Add(ttl)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return Pin{}, c.miss(kvwire.ReasonDraining), nil
	}
	l := c.leases.get()
	l.form, l.expires = form, expires
	_, why := s.grant(l, nil, hashes, nil)
	if len(l.pages) == 0 {
		c.leases.put(l)
		return Pin{}, c.miss(why), nil
	}
	c.register(l, nil)
	return Pin{ID: l.id, Pages: len(l.pages), Expires: expires}, c.miss(why), nil
}

// Unpin ends a pin. It fails with [ErrUnknownLease] for an id that is no pin;
// a pin that timed out before is no error.
func (c *Cache) Unpin(id uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.leases.live[id]; l != nil && l.client == nil {
		c.end(l, endedReleased)
		return nil
	}
	if f := c.leases.fate(id); f == unknown || f == live {
		return fmt.Errorf("cannot unpin %d: %w", id, ErrUnknownLease)
	}
	return nil
}
