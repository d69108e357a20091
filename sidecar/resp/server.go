package resp

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"golang.org/x/sync/semaphore"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
)

// Config is what the listener needs. Keys may be nil.
type Config struct {
	Cache *cache.Cache
	// Keys are asked for by AUTH and HELLO; nil lets everybody do everything.
	Keys    *auth.Keys
	Version string
	Metrics *metrics.Set
	Log     zerolog.Logger

	greetTimeout, stallTimeout, writeTimeout time.Duration // shorter in tests
}

// Server is the listener.
type Server struct {
	cfg      Config
	count    *counters
	started  time.Time
	draining atomic.Bool
	busy     atomic.Int64 // connections that do something
	lastID   atomic.Int64

	maxValue   int64 // the longest value, in bytes
	maxPending int
	receiving  *semaphore.Weighted // bytes of slots that are being filled
	lanes      chan struct{}       // a token for each long value on its way out

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	listeners []net.Listener
	conns     map[*conn]struct{}
	from      map[netip.Addr]int
	strangers []*conn // those that have not said who they are, oldest first
}

// New checks the configuration and returns a server without listeners.
func New(cfg Config) (*Server, error) {
	if cfg.Cache == nil || cfg.Metrics == nil {
		return nil, errors.New("cannot make the RESP listener: Cache and Metrics are needed")
	}
	for _, d := range []struct {
		have  *time.Duration
		plain time.Duration
	}{{&cfg.greetTimeout, greetTimeout}, {&cfg.stallTimeout, stallTimeout}, {&cfg.writeTimeout, writeTimeout}} {
		if *d.have == 0 {
			*d.have = d.plain
		}
	}
	quarter := cfg.Cache.Arena().Size() / 4
	s := &Server{
		cfg: cfg, count: newCounters(cfg.Metrics), started: time.Now(),
		maxValue:   min(kvwire.MaxObject, quarter) - headerFixed - MaxKey - headerStep,
		maxPending: int(min(maxPending, quarter/2)), receiving: semaphore.NewWeighted(quarter),
		lanes: make(chan struct{}, runtime.GOMAXPROCS(0)+1),
		conns: make(map[*conn]struct{}), from: make(map[netip.Addr]int),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	cfg.Metrics.NewGauge("membrane_resp_connections", func() float64 { return float64(s.Connections()) })
	return s, nil
}

// Connections returns how many clients are connected.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Serve accepts clients on a TCP listener until Close. It returns at once.
func (s *Server) Serve(l net.Listener) error {
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
			s.cfg.Log.Warn().Err(err).Msg("cannot accept a Redis client")
			select { // out of descriptors, most likely: let some be closed
			case <-time.After(100 * time.Millisecond):
			case <-s.ctx.Done():
				return
			}
			continue
		}
		if tcp, ok := nc.(*net.TCPConn); ok {
			s.admit(tcp)
		} else {
			_ = nc.Close()
		}
	}
}

// admit starts the goroutine of a new connection.
func (s *Server) admit(nc *net.TCPConn) {
	c, err := newConn(s, nc)
	if err != nil {
		s.cfg.Log.Warn().Err(err).Msg("cannot serve a Redis client")
		_ = nc.Close()
		return
	}
	s.mu.Lock()
	refused := s.closed || len(s.conns) >= MaxConnections || s.from[c.addr] >= MaxFromOne
	var oldest *conn
	if !refused {
		if !c.known {
			if len(s.strangers) >= maxStrangers {
				oldest = s.strangers[0]
				s.strangers = slices.Delete(s.strangers, 0, 1)
			}
			s.strangers = append(s.strangers, c)
		}
		s.conns[c] = struct{}{}
		s.from[c.addr]++
		s.wg.Go(c.run)
	}
	s.mu.Unlock()
	if refused {
		s.count.turnedAway.Inc()
		_ = nc.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = nc.Write([]byte("-ERR max number of clients reached\r\n"))
		_ = nc.Close()
	}
	if oldest != nil {
		s.count.turnedAway.Inc()
		oldest.sock.shut()
	}
}

// met takes a connection out of the strangers.
func (s *Server) met(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.strangers, c); i >= 0 {
		s.strangers = slices.Delete(s.strangers, i, i+1)
	}
}

func (s *Server) forget(c *conn) {
	s.met(c)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	if s.from[c.addr]--; s.from[c.addr] == 0 {
		delete(s.from, c.addr)
	}
}

// Drain refuses to read and store values from now on. What is under way goes
// on: see InFlight.
func (s *Server) Drain() { s.draining.Store(true) }

// InFlight returns how many connections have a command or a reply under way.
func (s *Server) InFlight() int { return int(s.busy.Load()) }

// Close ends every connection and waits for all goroutines.
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
		c.sock.shut()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}
