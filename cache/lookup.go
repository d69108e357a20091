package cache

import "membrane/kvwire"

// Lookup returns the space of a tenant and a namespace, or nil if nobody has
// opened it: asking makes none.
func (c *Cache) Lookup(tenant string, ns kvwire.Namespace) *Space {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.spaces[spaceKey{tenant, ns}]
}

// Shards returns how many shards a page has that is held complete in the given
// form, or 0 and the reason why none is. It does not count as a lookup.
func (s *Space) Shards(form kvwire.Form, h kvwire.Hash) (int, kvwire.Reason) {
	s.c.mu.RLock()
	defer s.c.mu.RUnlock()
	objs, why := s.pages[h].held(form)
	return len(objs), why
}
