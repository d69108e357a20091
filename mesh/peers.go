package mesh

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/serf/serf"

	"membrane/kvwire"
)

const (
	maxIdleConns = 4
	idleConnAge  = 30 * time.Second
	downMin      = 100 * time.Millisecond
	downMax      = 5 * time.Second
	followSlack  = 3 * time.Second // for an answer that was put off as long as allowed
	// A part of one in learnShare of a processor goes into one peer's directory,
	// unless that makes news older than maxLearnPause.
	learnShare    = 20
	maxLearnPause = time.Second
)

// peer is another node that is alive for gossip and has a data port.
type peer struct {
	m      *Mesh
	name   string
	addr   string
	ctx    context.Context // ends when gossip says that the peer is gone
	cancel context.CancelFunc

	filter  atomic.Pointer[filter]
	epoch   atomic.Uint64
	version atomic.Uint64 // of filter
	pulls   atomic.Int32  // at work
	room    chan struct{} // one token for each pull that may talk to it
	kick    chan struct{} // its directory has changed

	mu        sync.Mutex
	idle      []*dataConn
	gone      bool
	broken    bool // its directory cannot be followed for the moment
	downUntil time.Time
	downPause time.Duration
	forms     map[kvwire.Namespace]*peerForms
}

// directory returns what the peer seems to hold, nil if nothing is known.
func (p *peer) directory() *filter { return p.filter.Load() }

func (p *peer) isDown() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone || p.broken || time.Now().Before(p.downUntil)
}

func (p *peer) setBroken(broken bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = broken
}

// markDown keeps the peer out of fills for a while after one failed, longer
// each time in a row.
func (p *peer) markDown(least time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.downPause = min(max(downMin, 2*p.downPause, least), downMax)
	p.downUntil = time.Now().Add(p.downPause)
}

// markUp notes that a fill worked.
func (p *peer) markUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.downPause, p.downUntil = 0, time.Time{}
}

// take returns an idle connection or, when there is none or fresh is set, a
// new one.
func (p *peer) take(ctx context.Context, fresh bool) (*dataConn, error) {
	p.mu.Lock()
	for !fresh && len(p.idle) > 0 {
		c := p.idle[len(p.idle)-1]
		p.idle = p.idle[:len(p.idle)-1]
		if time.Since(c.since) > idleConnAge {
			c.close()
			continue
		}
		p.mu.Unlock()
		c.pooled = true
		return c, nil
	}
	addr := p.addr
	p.mu.Unlock()
	c, err := dialData(ctx, addr, p.name, p.m.Name(), p.m.cfg.ClusterKey)
	if errors.Is(err, errUnauthorized) {
		p.m.counters.authFailures.Add(1)
	}
	return c, err
}

// give returns a connection whose last answer was read to its end.
func (p *peer) give(c *dataConn) {
	c.since = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone || len(p.idle) >= maxIdleConns {
		c.close()
		return
	}
	p.idle = append(p.idle, c)
}

// prune closes connections that were idle for long.
func (p *peer) prune() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = slices.DeleteFunc(p.idle, func(c *dataConn) bool {
		old := time.Since(c.since) > idleConnAge
		if old {
			c.close()
		}
		return old
	})
}

// end forgets the peer: its directory and its connections.
func (p *peer) end() {
	p.cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone = true
	for _, c := range p.idle {
		c.close()
	}
	p.idle = nil
	p.filter.Store(nil)
}

// hasVersion compares the version that came with a reply with ours.
func (p *peer) hasVersion(v uint64) {
	if v != p.version.Load() {
		p.wake()
	}
}

func (p *peer) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// follow keeps the peer's directory up to date until the peer is gone. One
// request is always under way: the peer answers when its directory changes. So
// news comes at once, and a connection that breaks tells of a death before
// gossip does.
func (p *peer) follow() {
	var c *dataConn
	defer func() {
		if c != nil {
			c.close()
		}
	}()
	pause := downMin
	for p.ctx.Err() == nil {
		took, err := p.pullDirectory(&c)
		wait := p.m.directoryPause(took)
		p.setBroken(err != nil)
		if err == nil {
			pause = downMin
		} else if p.ctx.Err() == nil {
			if c != nil {
				c.close()
				c = nil
			}
			p.m.log.Debug().Err(err).Str("peer", p.name).Msg("cannot follow the directory of a peer")
			wait = pause/2 + rand.N(pause)
			pause = min(2*pause, downMax)
		}
		p.prune()
		timer := time.NewTimer(wait)
		select {
		case <-p.ctx.Done():
		case <-timer.C:
		case <-p.kick:
		}
		timer.Stop()
	}
}

// pullDirectory asks once, over *c, which it opens if there is none. It returns
// how long it took to enter the answer.
func (p *peer) pullDirectory(c **dataConn) (time.Duration, error) {
	wait := p.m.cfg.DirectoryWait
	wait = wait*3/4 + rand.N(wait/2+1)
	ctx, cancel := context.WithTimeout(p.ctx, wait+followSlack)
	defer cancel()
	if *c == nil {
		opened, err := p.take(ctx, true)
		if err != nil {
			return 0, err
		}
		*c = opened
	}
	req := kvwire.DirectoryRequest{Epoch: p.epoch.Load(), Version: p.version.Load(), WaitUS: uint32(wait.Microseconds())}
	old := p.filter.Load()
	if old == nil || old.crowded() {
		req.Epoch, req.Version = 0, 0
	}
	stop := (*c).watch(ctx)
	body, err := (*c).call(kvwire.TypeDirectory, kvwire.AppendDirectoryRequest(nil, req))
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return 0, err
	}
	began := time.Now()
	a, err := kvwire.ParseDirectoryAnswer(body)
	if err != nil {
		p.m.counters.lies.Add(1)
		return 0, err
	}
	p.m.counters.directoryPulls.Add(1)
	err = p.learn(old, a)
	return time.Since(began), err
}

// learn applies an answer to the filter that the request was about.
func (p *peer) learn(old *filter, a kvwire.DirectoryAnswer) error {
	now := old
	if a.Full {
		p.m.counters.directoryFull.Add(1)
		now = receiveFilter(a.Filter)
	} else if a.Epoch != p.epoch.Load() || old == nil {
		p.m.counters.lies.Add(1)
		return kvwire.Errorf(kvwire.CodeBadField, "epoch", "changes without the filter that they belong to")
	}
	if len(a.Added)+len(a.Removed) > 0 {
		now = now.apply(a.Added, a.Removed)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return p.ctx.Err()
	}
	p.filter.Store(now)
	p.epoch.Store(a.Epoch)
	p.version.Store(a.Version)
	return nil
}

// peerTable is the peers that are alive.
type peerTable struct {
	m  *Mesh
	wg sync.WaitGroup

	starting sync.Mutex
	stopped  bool // no goroutine may be started any more

	mu     sync.Mutex
	closed bool
	byName map[string]*peer
	list   atomic.Pointer[[]*peer] // the same, by name
}

func newPeerTable(m *Mesh) *peerTable {
	return &peerTable{m: m, byName: make(map[string]*peer)}
}

// all returns the peers; the slice is not to be changed.
func (t *peerTable) all() []*peer {
	if l := t.list.Load(); l != nil {
		return *l
	}
	return nil
}

// named returns a peer, nil if there is none of that name.
func (t *peerTable) named(name string) *peer {
	for _, p := range t.all() {
		if p.name == name {
			return p
		}
	}
	return nil
}

// up enters a member or what is new about it.
func (t *peerTable) up(mb serf.Member) {
	addr := mb.Tags[tagData]
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.byName[mb.Name]
	if t.closed || old != nil && old.addr == addr {
		return
	}
	if old != nil {
		old.end()
		delete(t.byName, mb.Name)
	}
	if addr != "" {
		ctx, cancel := context.WithCancel(context.Background())
		p := &peer{m: t.m, name: mb.Name, addr: addr, ctx: ctx, cancel: cancel, room: make(chan struct{}, max(1, t.m.cfg.MaxFills/2)), kick: make(chan struct{}, 1)}
		t.byName[mb.Name] = p
		t.wg.Go(p.follow)
	}
	t.publish()
}

// lost forgets a member that left or failed.
func (t *peerTable) lost(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byName[name]; p != nil {
		p.end()
		delete(t.byName, name)
		t.publish()
	}
}

func (t *peerTable) publish() {
	list := make([]*peer, 0, len(t.byName))
	for _, p := range t.byName {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b *peer) int { return cmp.Compare(a.name, b.name) })
	t.list.Store(&list)
}

func (t *peerTable) close() {
	t.mu.Lock()
	t.closed = true
	for name, p := range t.byName {
		p.end()
		delete(t.byName, name)
	}
	t.publish()
	t.mu.Unlock()
	t.starting.Lock()
	t.stopped = true
	t.starting.Unlock()
	t.wg.Wait()
}
