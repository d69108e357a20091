package mesh

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/rs/zerolog"
)

// Mesh is this node's view of the others. See the package's documentation for
// what may run at the same time.
type Mesh struct {
	cfg      Config
	log      zerolog.Logger
	strange  zerolog.Logger // for what anybody can cause: some lines a minute
	gossip   *gossip
	data     *dataPort
	index    *index
	peers    *peerTable
	fills    *fills
	http     *http.Client
	counters counters
	closing  atomic.Bool
	lost     bell // rings when a peer is lost

	dataAddr string
	cancel   context.CancelFunc
	unfollow func()
	wg       sync.WaitGroup
}

// New checks the configuration. Nothing runs or listens before Start.
func New(cfg Config) (*Mesh, error) {
	cfg, err := cfg.fill()
	if err != nil {
		return nil, err
	}
	m := &Mesh{cfg: cfg, log: cfg.Logger, index: newIndex()}
	m.strange = cfg.Logger.Sample(&zerolog.BurstSampler{Burst: strangeLines, Period: time.Minute})
	m.peers = newPeerTable(m)
	m.data = newDataPort(m)
	m.fills = newFills(m)
	m.gossip = newGossip(cfg, m.log, map[string]string{tagHTTP: cfg.HTTPAddr, tagRole: cfg.Role, tagVersion: cfg.Version})
	m.gossip.onUp = m.peers.up
	m.gossip.onGone = func(name string) { m.peers.lost(name); m.lost.ring() }
	m.gossip.name = cfg.NodeID
	if cfg.TagPause > 0 {
		m.gossip.pause = func(int) time.Duration { return cfg.TagPause }
	}
	m.http = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{Timeout: 2 * time.Second}).DialContext}}
	return m, nil
}

// Start listens and begins to look for others; it does not wait for them. ctx
// bounds the start alone. When it fails nothing is left running.
func (m *Mesh) Start(ctx context.Context) error {
	if err := m.data.listen(ctx, m.cfg.DataAddr); err != nil {
		return err
	}
	m.dataAddr = m.cfg.advertised(m.data.ln.Addr())
	m.gossip.tags[tagData] = m.dataAddr
	run, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	m.unfollow = m.index.follow(m.cfg.Store)
	if err := m.gossip.start(run); err != nil {
		return errors.Join(err, m.Close(ctx))
	}
	m.startJoining(run, &m.wg)
	return nil
}

// Close says goodbye to the others, as long as ctx allows, and stops
// everything; fills under way end with [kvwire.ReasonDraining] or what they
// have. It is called once.
func (m *Mesh) Close(ctx context.Context) error {
	m.closing.Store(true)
	if m.cancel == nil {
		return nil // never started
	}
	m.cancel()
	m.wg.Wait()
	err := m.gossip.stop(ctx)
	m.peers.close()
	m.fills.close()
	m.unfollow()
	m.data.close()
	m.http.CloseIdleConnections()
	if err != nil {
		return fmt.Errorf("cannot close mesh cleanly: %w", err)
	}
	return nil
}

// Name returns this node's name in the mesh: NodeID, or with a suffix after
// gossip had to be started anew.
func (m *Mesh) Name() string {
	_, name, _ := m.gossip.current()
	return name
}

// GossipAddr returns HOST:PORT where others reach our gossip, after Start.
func (m *Mesh) GossipAddr() string {
	_, _, addr := m.gossip.current()
	return addr
}

// DataAddr returns HOST:PORT where others reach our data port, after Start.
func (m *Mesh) DataAddr() string { return m.dataAddr }

// SetTag changes one of this node's tags ("role", or a small one of the
// caller's such as "ns"; all together at most some 400 bytes). Others are told
// at most once per 30 s, or per N/3 s in a mesh of N nodes.
func (m *Mesh) SetTag(key, value string) { m.gossip.setTags(map[string]string{key: value}) }

// SetTags changes several tags at once, as [Mesh.SetTag] does one: others learn
// of all of them together.
func (m *Mesh) SetTags(tags map[string]string) { m.gossip.setTags(tags) }

// Status says how a member is.
type Status string

// The statuses.
const (
	StatusAlive   Status = "alive"
	StatusSuspect Status = "suspect" // did not answer a probe, may still
	StatusLeaving Status = "leaving"
	StatusLeft    Status = "left"
	StatusFailed  Status = "failed"
)

// Member is one node of the mesh.
type Member struct {
	Name       string
	Self       bool
	GossipAddr string
	DataAddr   string
	HTTPAddr   string
	Role       string
	Version    string
	Tags       map[string]string
	Status     Status
	// Since is when this node learnt of the status (of alive for suspect).
	Since time.Time
	// RTT is the estimated round trip, 0 while it is not known.
	RTT time.Duration
	// Pages is how many pages its directory lists; -1 while it is not known.
	Pages int
	// Down: it is not asked for pages for the moment, its data port failed.
	Down bool
}

// Members returns all known nodes, this one included, by name. Those that
// left or failed stay for ten minutes.
func (m *Mesh) Members() []Member {
	s, own, _ := m.gossip.current()
	if s == nil {
		return nil
	}
	suspect := map[string]bool{}
	for _, n := range s.Memberlist().Members() {
		suspect[n.Name] = n.State == memberlist.StateSuspect
	}
	peers := map[string]*peer{}
	for _, p := range m.peers.all() {
		peers[p.name] = p
	}
	here, _ := s.GetCoordinate()
	var out []Member
	for _, mb := range s.Members() {
		o := Member{
			Name: mb.Name, Self: mb.Name == own,
			GossipAddr: net.JoinHostPort(mb.Addr.String(), strconv.Itoa(int(mb.Port))),
			DataAddr:   mb.Tags[tagData], HTTPAddr: mb.Tags[tagHTTP], Role: mb.Tags[tagRole], Version: mb.Tags[tagVersion],
			Tags: mb.Tags, Status: Status(mb.Status.String()), Pages: -1,
		}
		if o.Status == StatusAlive && suspect[mb.Name] {
			o.Status = StatusSuspect
		}
		m.gossip.mu.Lock()
		o.Since = m.gossip.since[mb.Name]
		m.gossip.mu.Unlock()
		if there, ok := s.GetCachedCoordinate(mb.Name); ok && here != nil && !o.Self {
			o.RTT = here.DistanceTo(there)
		}
		if p := peers[mb.Name]; p != nil {
			o.Down = p.isDown()
			if f := p.directory(); f != nil {
				o.Pages = f.len()
			}
		}
		if o.Self {
			o.Pages, _ = m.index.pages()
		}
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// directoryPause is the least time between two directories of one peer: with
// many nodes, or where it took long to enter the last one, news may be older.
func (m *Mesh) directoryPause(took time.Duration) time.Duration {
	return max(20*time.Millisecond, time.Duration(len(m.peers.all()))*4*time.Millisecond, min(learnShare*took, maxLearnPause))
}
