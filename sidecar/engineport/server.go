package engineport

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
	"membrane/sidecar/forms"
)

// Limits on what engines may ask for.
const (
	// MaxConnections is the most connections at a time, MaxPortConnections the
	// most of them on the localhost port: whoever can reach that must not keep
	// engines from the socket.
	MaxConnections     = 1024
	MaxPortConnections = MaxConnections / 2
	// MaxHandles is the most chains that one engine may keep.
	MaxHandles = 8192
	// MaxLeases is the most live leases that one engine may hold.
	MaxLeases = 8192
	// MaxDeadline bounds the deadline of a match or lease.
	MaxDeadline = time.Minute
	// MaxLease is the longest lease, DefaultLease the one that is granted
	// where none is asked for.
	MaxLease     = time.Minute
	DefaultLease = 10 * time.Second

	greetTimeout = 10 * time.Second
	bodyTimeout  = 30 * time.Second // for the rest of a frame
	// maxStrangers is how many connections may not have said hello. Beyond it
	// the oldest makes room: whoever means it says hello at once.
	maxStrangers = 64
)

// Config is what an engine port needs. Fields without a default are required.
type Config struct {
	// Node and Server (program and version) are told to engines.
	Node, Server string
	Cache        *cache.Cache
	// Fill gets pages from other nodes; nil where there are none.
	Fill Filler
	// Forms is what is known of how pages are laid out; nil makes one of the
	// port's own. PeerForms adds what other nodes know; nil where there are none.
	Forms     *forms.Registry
	PeerForms PeerForms
	// Keys are asked for on the localhost port; nil leaves it open.
	Keys *auth.Keys
	// Tenant owns the pages of engines without an API key. Default "public".
	Tenant string
	// UIDs may use the engine socket beside root and the sidecar's own user.
	UIDs []uint32
	// PageTokens is how many tokens a page has where the engine's block
	// allows. Default 64.
	PageTokens int
	// InboxBytes bounds the inboxes of all connections together. Default
	// 256 MiB.
	InboxBytes int64
	// ClusterKey signs pages that are written inline; the cache's own.
	ClusterKey []byte
	// WriteTimeout is the longest that an engine may take to accept an answer,
	// or one page of a longer one. Default 10 s.
	WriteTimeout time.Duration
	Metrics      *metrics.Set
	Log          zerolog.Logger

	greetTimeout, bodyTimeout time.Duration // shorter in tests
}

// Server is the engine port.
type Server struct {
	cfg      Config
	auth     *kvwire.Authenticator
	count    *counters
	strange  zerolog.Logger // for what any user can cause: some lines a minute
	draining atomic.Bool
	busy     atomic.Int64 // requests under way
	slots    atomic.Int64 // reserved inbox slots
	lastID   atomic.Uint64
	pace     pace
	making   pace   // of translation
	memory   budget // for chains and leases
	bodies   budget // for the bodies of large requests
	// receiving is the slots of the arena that wait for an inline write.
	receiving budget
	connected atomic.Int64 // len(conns)

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	socket    string
	listeners []net.Listener
	conns     map[*conn]struct{}
	port      int     // of them, those on the localhost port
	strangers []*conn // of those, the ones that have not said hello, oldest first
	engines   map[engineKey]*engine
	inboxLeft int64
	spaces    map[*cache.Space]*spaceState
}

// New checks the configuration and returns a server without listeners.
func New(cfg Config) (*Server, error) {
	if cfg.Tenant == "" {
		cfg.Tenant = auth.PublicTenant
	}
	if cfg.PageTokens == 0 {
		cfg.PageTokens = 64
	}
	if cfg.InboxBytes == 0 {
		cfg.InboxBytes = 256 << 20
	}
	if cfg.Forms == nil {
		cfg.Forms = forms.NewRegistry()
	}
	if cfg.WriteTimeout == 0 {
		cfg.WriteTimeout = 10 * time.Second
	}
	if cfg.greetTimeout == 0 {
		cfg.greetTimeout = greetTimeout
	}
	if cfg.bodyTimeout == 0 {
		cfg.bodyTimeout = bodyTimeout
	}
	switch {
	case cfg.Cache == nil:
		return nil, errors.New("cannot make an engine port: Cache is nil")
	case cfg.Metrics == nil:
		return nil, errors.New("cannot make an engine port: Metrics is nil")
	case cfg.PageTokens < kvwire.MinPageTokens || cfg.PageTokens > kvwire.MaxPageTokens:
		return nil, fmt.Errorf("cannot make an engine port: PageTokens %d is not between %d and %d", cfg.PageTokens, kvwire.MinPageTokens, kvwire.MaxPageTokens)
	case cfg.InboxBytes < 0:
		return nil, fmt.Errorf("cannot make an engine port: InboxBytes %d is negative", cfg.InboxBytes)
	}
	if err := auth.CheckSubject(cfg.Tenant); err != nil {
		return nil, fmt.Errorf("cannot make an engine port: Tenant: %w", err)
	}
	s := &Server{
		cfg: cfg, auth: kvwire.NewAuthenticator(cfg.ClusterKey), count: newCounters(cfg.Metrics),
		conns: make(map[*conn]struct{}), engines: make(map[engineKey]*engine),
		inboxLeft: cfg.InboxBytes, spaces: make(map[*cache.Space]*spaceState),
	}
	s.strange = cfg.Log.Sample(&zerolog.BurstSampler{Burst: 10, Period: time.Minute})
	// Handles of another life of the sidecar must not name chains of this one.
	s.lastID.Store(rand.Uint64() >> 2)
	s.memory.most, s.bodies.most, s.receiving.most = MaxMemory, maxBodies, cfg.Cache.Arena().Size()/4
	s.ctx, s.cancel = context.WithCancel(context.Background())
	cfg.Metrics.NewGauge("membrane_engine_connections", func() float64 { return float64(s.Status().Connections) })
	cfg.Metrics.NewGauge("membrane_engine_engines", func() float64 { return float64(len(s.Status().Engines)) })
	cfg.Metrics.NewGauge("membrane_engine_kept_bytes", func() float64 { return float64(s.memory.used.Load()) })
	return s, nil
}

// ServeSocket accepts engines on a Unix socket that [ListenSocket] opened. It
// returns at once.
func (s *Server) ServeSocket(l *net.UnixListener) error {
	s.mu.Lock()
	s.socket = l.Addr().String()
	s.mu.Unlock()
	return s.serve(l)
}

// ServeTCP accepts engines on a localhost port. It returns at once.
func (s *Server) ServeTCP(l net.Listener) error { return s.serve(l) }

func (s *Server) serve(l net.Listener) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	s.listeners = append(s.listeners, l)
	s.wg.Go(func() { s.accept(l) })
	return nil
}

func (s *Server) accept(l net.Listener) {
	for {
		nc, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.cfg.Log.Warn().Err(err).Msg("cannot accept an engine")
			select { // out of descriptors, most likely: let some be closed
			case <-time.After(100 * time.Millisecond):
			case <-s.ctx.Done():
				return
			}
			continue
		}
		s.admit(nc)
	}
}

// admit starts the goroutine of a new connection, unless its user may not
// connect.
func (s *Server) admit(nc net.Conn) {
	buffer := 64 << 10
	if _, port := nc.(*net.TCPConn); port { // anybody's
		buffer = 16 << 10
	}
	c := &conn{s: s, id: cache.ClientID(s.lastID.Add(1)), nc: nc, r: bufio.NewReaderSize(nc, buffer)}
	c.identity = auth.Identity{Tenant: s.cfg.Tenant, Scopes: auth.ScopeEngine}
	if u, ok := nc.(*net.UnixConn); ok {
		uid, err := peerUID(u)
		if err != nil || !s.mayConnect(uid) {
			s.count.refusedID.Inc()
			s.strange.Warn().Err(err).Uint32("uid", uid).Msg("refused a connection to the engine socket: its user is not in --engine-uids")
			_ = nc.Close()
			return
		}
		c.unix, c.greeted = u, true
	}
	s.mu.Lock()
	full := len(s.conns) >= MaxConnections || c.unix == nil && s.port >= MaxPortConnections
	var oldest *conn
	if !s.closed && !full {
		if !c.greeted {
			if len(s.strangers) >= maxStrangers {
				oldest = s.strangers[0]
				s.strangers = slices.Delete(s.strangers, 0, 1)
			}
			s.strangers = append(s.strangers, c)
		}
		if c.unix == nil {
			s.port++
		}
		s.conns[c] = struct{}{}
		s.connected.Store(int64(len(s.conns)))
		s.wg.Go(c.run)
	}
	closed := s.closed
	s.mu.Unlock()
	switch {
	case closed:
		_ = nc.Close()
	case full:
		s.turnAway(nc, errBusy)
	case oldest != nil:
		s.turnAway(oldest.nc, errStranger)
	}
}

// turnAway ends a connection with an error that fits any socket's buffer.
func (s *Server) turnAway(nc net.Conn, why *kvwire.Error) {
	s.count.refuse(why)
	_ = nc.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = nc.Write(errorFrame(nil, 0, why))
	_ = nc.Close()
}

var (
	errBusy     = kvwire.Errorf(kvwire.CodeBusy, "", "%d engine connections are open, or %d on the localhost port, which is the most", MaxConnections, MaxPortConnections)
	errStranger = kvwire.Errorf(kvwire.CodeBusy, "", "%d newer connections have not said hello either, which is the most", maxStrangers)
)

// met takes a connection out of the strangers. It needs s.mu.
func (s *Server) met(c *conn) {
	if i := slices.Index(s.strangers, c); i >= 0 {
		s.strangers = slices.Delete(s.strangers, i, i+1)
	}
}

// forget takes a connection out of all lists. It needs s.mu.
func (s *Server) forget(c *conn) {
	s.met(c)
	if _, known := s.conns[c]; known && c.unix == nil {
		s.port--
	}
	delete(s.conns, c)
	s.connected.Store(int64(len(s.conns)))
}

// Drain refuses new matches, leases and stores from now on. What is under way
// goes on: see InFlight.
func (s *Server) Drain() { s.draining.Store(true) }

// InFlight returns how much has begun and not ended: requests, live leases and
// reserved slots.
func (s *Server) InFlight() int {
	return int(s.busy.Load()) + int(s.slots.Load()) + int(s.cfg.Cache.Stats().Leases)
}

// Close ends every connection, and with it leases and reservations, and waits
// for all goroutines.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return net.ErrClosed
	}
	s.closed = true
	s.cancel()
	var err error
	for _, l := range s.listeners {
		err = errors.Join(err, l.Close())
	}
	for c := range s.conns {
		_ = c.nc.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}
