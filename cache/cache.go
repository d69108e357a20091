package cache

import (
	"errors"
	"fmt"
	"hash/maphash"
	"sync"

	"membrane/kvwire"
)

// ErrClosed is returned by methods of a closed cache.
var ErrClosed = errors.New("cache is closed")

// Cache is the arena with its table, policy, leases and counters.
type Cache struct {
	cfg   Config
	arena *Arena
	auth  *kvwire.Authenticator
	seed  maphash.Seed

	room        int64 // what window and policy may hold together
	windowLeast int64 // the window's part whatever comes back
	adaptive    bool  // whether windowGoal moves, see adapt
	reserve     int64
	pinCap      int64
	clientCap   int64

	mu          stripedMutex
	closed      bool
	spaces      map[spaceKey]*Space
	tenants     map[string][]*Space
	alloc       *allocator
	window      window
	windowGoal  int64
	policyBytes int64
	tick        uint32 // counts requests
	turn        uint32 // counts the pages that were put in front of the window
	lineage     lineage
	ghosts      ghosts
	born        uint64 // pages that ever came into the table
	pages       int64
	objects     int64
	resident    int64    // bytes of slots of pages in the table
	pinned      int64    // bytes of pages under at least one lease or pin
	removed     []uint64 // policy keys of pages that left it without its doing
	waiting     []*waiter
	quarantine  quarantine
	leases      leases
	open        int            // views and slots that callers hold
	inside      sync.WaitGroup // operations that use the arena without the lock

	policy   policy
	touches  touches
	kick     chan struct{}
	stop     chan struct{}
	done     chan struct{}
	feed     feed
	counters counters
}

type spaceKey struct {
	tenant string
	ns     kvwire.Namespace
}

// New makes a cache. Its arena is mapped at once and backed by memory in the
// background.
func New(cfg Config) (*Cache, error) { return newCache(cfg, newPolicy) }

func newCache(cfg Config, newPolicy policyMaker) (*Cache, error) {
	cfg, err := cfg.fill()
	if err != nil {
		return nil, err
	}
	arena, err := newArena(cfg.Budget)
	if err != nil {
		return nil, err
	}
	c := &Cache{
		cfg:       cfg,
		arena:     arena,
		auth:      kvwire.NewAuthenticator(cfg.ClusterKey),
		seed:      maphash.MakeSeed(),
		adaptive:  true,
		reserve:   cfg.part(cfg.ReserveFraction),
		pinCap:    cfg.part(cfg.PinFraction),
		clientCap: cfg.part(cfg.ClientPinFraction),
		spaces:    make(map[spaceKey]*Space),
		tenants:   make(map[string][]*Space),
		alloc:     newAllocator(cfg.Budget),
		kick:      make(chan struct{}, 1),
		stop:      make(chan struct{}),
		done:      make(chan struct{}),
	}
	c.room = cfg.Budget - c.reserve
	c.windowLeast = cfg.part(cfg.WindowFraction)
	c.windowGoal = max(c.windowLeast, int64(firstWindow*float64(c.room)))
	c.quarantine.limit = cfg.part(cfg.QuarantineFraction)
	c.policy, err = newPolicy(cfg.ExpectedPages, c.room)
	if err != nil {
		arena.close(true)
		return nil, fmt.Errorf("cannot make cache policy: %w", err)
	}
	switch {
	case c.policy.windowOnly():
		c.windowGoal, c.adaptive = c.room, false
	case !guard.window():
		c.windowGoal, c.adaptive = 0, false
	}
	c.leases.init()
	c.mu.init()
	c.touches.init(len(c.mu.stripes))
	c.lineage.init()
	c.ghosts.init(cfg.ExpectedPages)
	c.feed.init()
	go c.run()
	return c, nil
}

// Arena returns the memory that readers map.
func (c *Cache) Arena() *Arena { return c.arena }

// Space returns the pages of one tenant in one namespace; the same value for
// the same pair. It fails for a tenant name above [kvwire.MaxTenant] bytes and
// beyond [MaxSpaces] pairs, or [MaxTenantSpaces] of one tenant.
func (c *Cache) Space(tenant string, ns kvwire.Namespace) (*Space, error) {
	key := spaceKey{tenant, ns}
	c.mu.RLock()
	s := c.spaces[key]
	c.mu.RUnlock()
	if s != nil {
		return s, nil
	}
	if len(tenant) > kvwire.MaxTenant {
		return nil, fmt.Errorf("cannot open space of tenant %.16q...: %d bytes, above %d", tenant, len(tenant), kvwire.MaxTenant)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.spaces[key]; s != nil {
		return s, nil
	}
	if len(c.spaces) >= MaxSpaces {
		return nil, fmt.Errorf("cannot open space of tenant %q: %d spaces are open already", tenant, MaxSpaces)
	}
	if len(c.tenants[tenant]) >= MaxTenantSpaces {
		return nil, fmt.Errorf("cannot open space of tenant %q: it has %d already, which is the most until the cache starts anew", tenant, MaxTenantSpaces)
	}
	s = &Space{c: c, tenant: tenant, ns: ns, pages: make(map[kvwire.Hash]*page)}
	s.salt = maphash.Comparable(c.seed, key)
	c.spaces[key] = s
	c.tenants[tenant] = append(c.tenants[tenant], s)
	return s, nil
}

// Close ends all leases, stops the cache's goroutines and unmaps the arena.
// Later calls answer [kvwire.ReasonDraining] or [ErrClosed]. If views or slots
// are still held, it fails, and the memory stays mapped so that their bytes
// stay readable.
func (c *Cache) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ErrClosed
	}
	c.closed = true
	c.mu.Unlock()

	close(c.stop)
	<-c.done
	c.inside.Wait()
	c.feed.close()

	c.mu.Lock()
	open := c.open
	c.mu.Unlock()
	err := c.arena.close(open == 0)
	if open > 0 {
		return errors.Join(fmt.Errorf("cannot unmap arena: %d views and slots are still held", open), err)
	}
	return err
}

// enter notes that the caller will use the arena without the lock; it is
// undone by c.inside.Done. It needs c.mu (for reading at least).
func (c *Cache) enter() bool {
	if c.closed {
		return false
	}
	c.inside.Add(1)
	return true
}

// wake makes the owner look at its work. It never blocks.
func (c *Cache) wake() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}
