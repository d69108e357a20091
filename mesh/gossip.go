package mesh

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/serf/serf"
	"github.com/rs/zerolog"
)

// The tags of a member.
const (
	tagHTTP    = "http"
	tagData    = "data"
	tagRole    = "role"
	tagVersion = "version"
)

// gossip wraps serf: it builds it, builds it anew under another name when it
// stops by itself, drains its events and keeps our own tags.
type gossip struct {
	cfg    Config
	log    zerolog.Logger
	onUp   func(serf.Member)
	onGone func(name string)
	pause  func(nodes int) time.Duration // tagPause, or a test's

	rebuilds atomic.Uint64

	mu      sync.Mutex
	serf    *serf.Serf
	name    string
	addr    string
	port    int // what port 0 became, so that a rebuilt serf keeps it
	tags    map[string]string
	tagsAt  time.Time // of the last change that others were told
	since   map[string]time.Time
	closing bool

	retag chan struct{}
	wg    sync.WaitGroup
}

func newGossip(cfg Config, log zerolog.Logger, tags map[string]string) *gossip {
	return &gossip{
		cfg: cfg, log: log, tags: tags, pause: tagPause,
		since: make(map[string]time.Time),
		retag: make(chan struct{}, 1),
	}
}

// start builds serf and its goroutines, which end by ctx and stop.
func (g *gossip) start(ctx context.Context) error {
	s, events, err := g.build(g.cfg.NodeID)
	if err != nil {
		return err
	}
	g.wg.Add(2)
	go func() {
		defer g.wg.Done()
		g.run(ctx, s, events)
	}()
	go func() {
		defer g.wg.Done()
		g.keepTags(ctx)
	}()
	return nil
}

// settings returns serf's configuration. A dead node is believed dead by all
// within 6 s at up to 64 nodes: it is probed within about a second and
// suspected for 5 × max(1, log10(N)) probe intervals. Less would take nodes
// that are short of CPU for dead.
func (g *gossip) settings(name string) (*serf.Config, chan serf.Event, error) {
	host, portText, _ := net.SplitHostPort(g.cfg.GossipAddr)
	port, _ := strconv.Atoi(portText)
	ml := memberlist.DefaultLANConfig()
	ml.ProbeInterval = 500 * time.Millisecond
	ml.ProbeTimeout = 300 * time.Millisecond
	ml.SuspicionMult = 5
	ml.SuspicionMaxTimeoutMult = 2
	ml.TCPTimeout = 3 * time.Second // dead addresses in a join list cost this each
	conf := serf.DefaultConfig()
	conf.LeavePropagateDelay = 500 * time.Millisecond
	conf.BroadcastTimeout = 2 * time.Second
	if g.cfg.loopback() {
		ml.ProbeTimeout = 250 * time.Millisecond
		ml.GossipInterval = 50 * time.Millisecond
		ml.PushPullInterval = 10 * time.Second
		ml.TCPTimeout = time.Second
		conf.LeavePropagateDelay = 200 * time.Millisecond
		conf.BroadcastTimeout = time.Second
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	ml.BindAddr, ml.BindPort, ml.AdvertisePort = host, port, port
	if port == 0 && g.port != 0 {
		ml.BindPort, ml.AdvertisePort = g.port, g.port
	}
	if h := g.cfg.AdvertiseHost; h != "" {
		ip, err := resolveOne(h)
		if err != nil {
			return nil, nil, fmt.Errorf("cannot resolve AdvertiseHost %q: %w", h, err)
		}
		ml.AdvertiseAddr = ip
	}
	// A reused address must not merge two meshes.
	ml.Label = g.cfg.ClusterName
	if len(g.cfg.GossipKey) > 0 {
		ml.SecretKey = g.cfg.GossipKey
	}
	conf.MemberlistConfig = ml
	conf.NodeName = name
	conf.Tags = maps.Clone(g.tags)
	// Names never come back, so nobody waits for them.
	conf.ReconnectTimeout = 10 * time.Minute
	conf.TombstoneTimeout = 10 * time.Minute
	quiet := log.New(logWriter{g.log}, "", 0)
	conf.Logger, ml.Logger = quiet, quiet
	conf.LogOutput, ml.LogOutput = nil, nil
	events := make(chan serf.Event, 256)
	conf.EventCh = events
	return conf, events, nil
}

func resolveOne(host string) (string, error) {
	if net.ParseIP(host) != nil {
		return host, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	ips, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return "", err
	}
	return ips[0], nil
}

func (g *gossip) build(name string) (*serf.Serf, chan serf.Event, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	conf, events, err := g.settings(name)
	if err != nil {
		return nil, nil, err
	}
	ml := conf.MemberlistConfig
	if err := canBind(ml.BindAddr, ml.BindPort); err != nil {
		return nil, nil, err
	}
	s, err := serf.Create(conf)
	if err != nil {
		return nil, nil, fmt.Errorf("cannot start gossip at %q: %w", g.cfg.GossipAddr, err)
	}
	local := s.LocalMember()
	g.serf, g.name, g.port = s, name, int(local.Port)
	g.addr = net.JoinHostPort(local.Addr.String(), strconv.Itoa(int(local.Port)))
	g.tagsAt = time.Now()
	return s, events, nil
}

// canBind tries the gossip port first: a serf that cannot bind leaves a
// goroutine behind.
func canBind(host string, port int) error {
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	t, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("cannot listen for gossip at %q: %w", addr, err)
	}
	_ = t.Close()
	u, err := net.ListenPacket("udp", addr)
	if err != nil {
		return fmt.Errorf("cannot listen for gossip at %q: %w", addr, err)
	}
	return u.Close()
}

// run drains events until serf has stopped. If it stopped by itself (it does
// when it loses a vote about its name) a new one takes its place.
func (g *gossip) run(ctx context.Context, s *serf.Serf, events chan serf.Event) {
	for {
		select {
		case e := <-events:
			if me, ok := e.(serf.MemberEvent); ok {
				g.handle(me)
			}
			continue
		case <-s.ShutdownCh():
		}
		g.mu.Lock()
		closing := g.closing
		g.mu.Unlock()
		if closing || ctx.Err() != nil {
			return
		}
		known := addresses(s)
		if s, events = g.rebuild(ctx); s == nil {
			return
		}
		fresh := s
		g.wg.Go(func() {
			if err := join(ctx, fresh, known); err != nil {
				g.log.Warn().Err(err).Msg("cannot join those that were members before")
			}
		})
	}
}

// addresses returns where some of the alive members are.
func addresses(s *serf.Serf) (out []string) {
	for _, mb := range s.Members() {
		if mb.Status == serf.StatusAlive && mb.Name != s.LocalMember().Name && len(out) < maxJoin {
			out = append(out, net.JoinHostPort(mb.Addr.String(), strconv.Itoa(int(mb.Port))))
		}
	}
	return out
}

func (g *gossip) rebuild(ctx context.Context) (*serf.Serf, chan serf.Event) {
	g.rebuilds.Add(1)
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 10*time.Second) {
		var b [4]byte
		_, _ = rand.Read(b[:])
		name := g.cfg.NodeID + "-" + hex.EncodeToString(b[:])
		s, events, err := g.build(name)
		if err == nil {
			g.log.Warn().Str("node", name).Msg("gossip had stopped by itself and was started again under a new name")
			g.mu.Lock()
			closing := g.closing
			g.mu.Unlock()
			if closing {
				_ = s.Shutdown()
			}
			return s, events
		}
		g.log.Error().Err(err).Msg("gossip has stopped by itself and cannot be started again yet")
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(pause):
		}
	}
}

func (g *gossip) handle(e serf.MemberEvent) {
	for _, mb := range e.Members {
		g.mu.Lock()
		own := mb.Name == g.name
		if e.Type == serf.EventMemberReap {
			delete(g.since, mb.Name)
		} else if e.Type != serf.EventMemberUpdate {
			g.since[mb.Name] = time.Now()
		}
		g.mu.Unlock()
		if own {
			continue
		}
		switch e.Type {
		case serf.EventMemberJoin, serf.EventMemberUpdate:
			g.onUp(mb)
		case serf.EventMemberLeave, serf.EventMemberFailed, serf.EventMemberReap:
			g.onGone(mb.Name)
		}
	}
}

// current returns serf and our name and gossip address.
func (g *gossip) current() (s *serf.Serf, name, addr string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.serf, g.name, g.addr
}

// setTags changes some of our tags. Others are told at once, or later when a
// change was not long ago; see tagPause.
func (g *gossip) setTags(tags map[string]string) {
	g.mu.Lock()
	changed := false
	for key, value := range tags {
		changed = changed || g.tags[key] != value
		g.tags[key] = value
	}
	g.mu.Unlock()
	if changed {
		select {
		case g.retag <- struct{}{}:
		default:
		}
	}
}

// tagPause is the least time between two changes of a node's tags: gossip
// bandwidth is shared by all.
func tagPause(nodes int) time.Duration {
	return max(30*time.Second, time.Duration(nodes)*time.Second/3)
}

func (g *gossip) keepTags(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.retag:
		}
		g.mu.Lock()
		wait := time.Until(g.tagsAt.Add(g.pause(g.serf.NumNodes())))
		g.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		g.mu.Lock()
		s, tags := g.serf, maps.Clone(g.tags)
		g.tagsAt = time.Now()
		g.mu.Unlock()
		if err := s.SetTags(tags); err != nil {
			g.log.Error().Err(err).Msg("cannot tell others our tags")
		}
	}
}

// stop leaves the mesh and stops serf; when ctx ends first, without goodbye.
func (g *gossip) stop(ctx context.Context) error {
	g.mu.Lock()
	g.closing = true
	s := g.serf
	g.mu.Unlock()
	if s == nil {
		return nil
	}
	if s.State() == serf.SerfShutdown { // by itself, just now: there is nobody to tell
		g.wg.Wait()
		return nil
	}
	left := make(chan error, 1)
	go func() { left <- s.Leave() }()
	var err error
	select {
	case err = <-left:
	case <-ctx.Done():
		err = fmt.Errorf("cannot leave the mesh in time: %w", ctx.Err())
	}
	if e := s.Shutdown(); err == nil {
		err = e
	}
	g.wg.Wait()
	return err
}

// logWriter turns the lines of serf and memberlist into debug events.
type logWriter struct{ log zerolog.Logger }

var _ io.Writer = logWriter{}

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Debug().Str("part", "gossip").Msg(strings.TrimSpace(string(p)))
	return len(p), nil
}
