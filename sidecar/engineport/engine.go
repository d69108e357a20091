package engineport

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"membrane/cache"
	"membrane/engines/layout"
	"membrane/kvwire"
	"membrane/sidecar/forms"
)

type engineKey struct{ tenant, name string }

type rankKey struct {
	role  kvwire.Role
	shard uint16
}

// engine is all connections that one engine has. It lives while one of them
// does.
type engine struct {
	key        engineKey
	facts      kvwire.ModelFacts
	form       kvwire.Form
	layout     string // its name
	space      *cache.Space
	state      *spaceState
	pageTokens int
	shards     int
	tp, pp     int
	pageBytes  int64 // about: all shards, as large as the first that came
	reader     *forms.Reader
	// odd says why the engine's pages are neither served nor stored, nil where
	// they are: set when a rank registers.
	odd atomic.Pointer[layout.Error]
	// sizes are those of each shard's object, in bytes; 0 until its worker comes.
	sizes []atomic.Int64

	ranks map[rankKey]*conn // guarded by Server.mu

	hits, stored    atomic.Uint64 // pages
	missed, refused byReason

	memory *budget // of the server

	mu     sync.Mutex
	kept   int64 // bytes of chains and leases, taken from memory
	chains map[uint64]*chain
	leases map[uint64]*lease
	live   int                    // leases that have not ended, as far as we know
	named  map[kvwire.Form]string // why forms are not translated, as it was logged
	ended  []uint64               // leases that did, oldest first: to tell a double release from an unknown lease
}

// spaceState orders resets and stores of one space: a store that was reserved
// before a reset is refused after it.
type spaceState struct {
	mu    sync.RWMutex
	epoch uint64
}

// chain is the tokens of one sequence under a handle.
type chain struct {
	owner  *conn
	handle uint64      // 0: none yet
	others []otherSize // found while it was received

	// Guarded by engine.mu.
	cost    int64 // bytes
	dropped bool

	named []kvwire.Hash // by the engine, see match_hashes; then c is nil

	mu sync.Mutex
	c  *kvwire.Chain
}

// hashes returns the hashes of the chain's full pages. The slice stays as it
// is: a chain only grows.
func (ch *chain) hashes() []kvwire.Hash {
	if ch.c == nil {
		return ch.named
	}
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.c.Hashes()
}

// lease is what the engine has to say about a lease of the cache.
type lease struct {
	owner     *conn
	hashes    []kvwire.Hash
	cost      int64 // bytes
	expires   time.Time
	own       bool // by its owner alone
	left      int  // ranks that have not released it
	cancelled bool // by the scheduler
	over      bool
}

// join makes the connection one of an engine's. The engine's first connection
// says what it is; the others must agree.
func (c *conn) join(reg kvwire.Register, pageTokens int, object int64) error {
	s, d := c.s, reg.Descriptor
	shard := d.Shard()
	rank := rankKey{reg.Role, shard.Index}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := engineKey{c.identity.Tenant, reg.Engine}
	e := s.engines[key]
	if e == nil {
		space, err := s.cfg.Cache.Space(c.identity.Tenant, reg.Model.Namespace(pageTokens))
		if err != nil {
			return kvwire.Errorf(kvwire.CodeBusy, "model", "%v", err)
		}
		e = &engine{
			key: key, facts: reg.Model, form: d.Form(), layout: d.Layout, space: space, state: s.stateOf(space),
			pageTokens: pageTokens, shards: int(shard.Count), tp: d.TPSize, pp: d.PPSize,
			pageBytes: object * int64(shard.Count), memory: &s.memory, sizes: make([]atomic.Int64, shard.Count),
			named: make(map[kvwire.Form]string),
			ranks: make(map[rankKey]*conn), chains: make(map[uint64]*chain), leases: make(map[uint64]*lease),
		}
	} else if err := e.agree(reg); err != nil {
		return err
	}
	if guard.rankTaken() && e.ranks[rank] != nil {
		return kvwire.Errorf(kvwire.CodeRankTaken, "engine", "%q has a live connection as %s of shard %s", clip(reg.Engine), reg.Role, shard)
	}
	if s.engines[key] == nil {
		e.reader = s.cfg.Forms.Attach(reg.Model, pageTokens, d)
		for i, n := range e.reader.Sizes() {
			e.sizes[i].Store(n)
		}
	}
	s.engines[key] = e
	e.ranks[rank] = c
	c.eng, c.role, c.shard, c.object = e, reg.Role, shard, object
	c.checkShape(reg, e, object)
	return nil
}

// agree reports how a further connection contradicts the engine's others.
// It needs Server.mu.
func (e *engine) agree(reg kvwire.Register) error {
	d := reg.Descriptor
	differs := func(field string) error {
		return kvwire.Errorf(kvwire.CodeBadField, field, "differs from what other connections of engine %q said", e.key.name)
	}
	switch {
	case reg.Model != e.facts:
		return differs("model")
	case d.TPSize != e.tp || d.PPSize != e.pp:
		return differs("descriptor.tp_size")
	case d.Form() != e.form:
		return differs("descriptor")
	}
	for rank := range e.ranks {
		if (rank.role == kvwire.RoleBoth) != (reg.Role == kvwire.RoleBoth) {
			return kvwire.Errorf(kvwire.CodeBadField, "role", "%s does not go together with %s, which engine %q has", reg.Role, rank.role, e.key.name)
		}
	}
	return nil
}

func (s *Server) stateOf(space *cache.Space) *spaceState {
	st := s.spaces[space]
	if st == nil {
		st = &spaceState{}
		s.spaces[space] = st
	}
	return st
}

// leave gives back what the connection took from its engine: rank, chains,
// leases, reservations, inbox.
func (c *conn) leave() {
	e := c.eng
	if e == nil {
		return
	}
	c.s.cfg.Cache.EndClient(c.id)
	c.closeInbox()
	c.s.mu.Lock()
	delete(e.ranks, rankKey{c.role, c.shard.Index})
	if len(e.ranks) == 0 {
		delete(c.s.engines, e.key)
		e.reader.Close()
	}
	c.s.mu.Unlock()

	e.mu.Lock()
	for _, ch := range e.chains {
		if ch.owner == c {
			e.dropChain(ch)
		}
	}
	var shared []uint64
	for id, l := range e.leases {
		switch {
		case l.over:
		case l.owner == c:
			e.endLease(id, l)
		case l.own:
		case c.role == kvwire.RoleWorker:
			shared = append(shared, id)
		}
	}
	e.mu.Unlock()
	for _, id := range shared { // this rank will not copy any more
		_, _ = c.s.cfg.Cache.Release(id, int(c.shard.Index), false)
	}
	c.eng = nil
	c.s.cfg.Log.Info().Str("engine", e.key.name).Str("role", string(c.role)).Stringer("shard", c.shard).Msg("engine disconnected")
}

// maxEnded is how many ended leases an engine remembers.
const maxEnded = 4096

// endLease notes that a lease is over. It needs e.mu.
func (e *engine) endLease(id uint64, l *lease) {
	if l.over {
		return
	}
	e.giveBack(l.cost)
	l.over, l.hashes, l.cost = true, nil, 0
	e.live--
	e.ended = append(e.ended, id)
	if len(e.ended) > maxEnded {
		delete(e.leases, e.ended[0])
		e.ended = e.ended[1:]
	}
}

// addLease remembers a granted lease of some pages, or reports that the engine
// has too many.
func (e *engine) addLease(id uint64, l *lease, pages []kvwire.Hash) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.live >= MaxLeases {
		e.endExpired()
	}
	if e.live >= MaxLeases {
		return kvwire.Errorf(kvwire.CodeBusy, "lease", "engine %q holds %d leases, which is the most", e.key.name, MaxLeases)
	}
	cost := leaseCost(len(pages))
	if err := e.take("lease", cost); err != nil {
		return err
	}
	// A copy: a short lease of a long chain must not keep all of it.
	l.hashes, l.cost = slices.Clone(pages), cost
	e.leases[id] = l
	e.live++
	return nil
}

// endExpired ends what nobody has released in time. It needs e.mu.
func (e *engine) endExpired() {
	now := time.Now()
	for id, l := range e.leases {
		if !l.over && now.After(l.expires) {
			e.endLease(id, l)
		}
	}
}

// chainOf returns the chain of a handle.
func (e *engine) chainOf(field string, handle uint64) (*chain, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	ch := e.chains[handle]
	if ch == nil {
		return nil, unknownHandle(field, handle)
	}
	return ch, nil
}

func unknownHandle(field string, handle uint64) error {
	return kvwire.Errorf(kvwire.CodeUnknownHandle, field, "%d was never given out, was dropped, or is another engine's", handle)
}

// holders returns how many ranks release a lease.
func (e *engine) holders() int { return e.shards }

// byReason counts by reason.
type byReason [kvwire.LastReason + 1]atomic.Uint64

func (r *byReason) add(why kvwire.Reason, n int) {
	if int(why) < len(r) && n > 0 {
		r[why].Add(uint64(n))
	}
}

func (r *byReason) nonZero() map[string]uint64 {
	out := make(map[string]uint64)
	for i := range r {
		if n := r[i].Load(); n > 0 {
			out[kvwire.Reason(i).String()] = n
		}
	}
	return out
}
