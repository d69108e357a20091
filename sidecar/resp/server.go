package resp

import (
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"golang.org/x/sync/semaphore"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
	"membrane/sidecar/listener"
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
	lanes      listener.Lanes      // of long values on their way out

	clients *listener.Listener[*conn]
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
		lanes: listener.NewLanes(),
	}
	var err error
	s.clients, err = listener.New(listener.Config[*conn]{
		Who: "a Redis client", Connections: MaxConnections, FromOne: MaxFromOne, Strangers: maxStrangers,
		Open: func(nc *net.TCPConn) (*conn, bool, error) {
			c, err := newConn(s, nc)
			return c, err == nil && c.known, err
		},
		Refuse:     func(nc *net.TCPConn) { _, _ = nc.Write([]byte("-ERR max number of clients reached\r\n")) },
		TurnedAway: s.count.turnedAway.Inc, Log: cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	cfg.Metrics.NewGauge("membrane_resp_connections", func() float64 { return float64(s.Connections()) })
	return s, nil
}

// Connections returns how many clients are connected.
func (s *Server) Connections() int { return s.clients.Connections() }

// Serve accepts clients on a TCP listener until Close. It returns at once.
func (s *Server) Serve(l net.Listener) error { return s.clients.Serve(l) }

// Drain refuses to read and store values from now on. What is under way goes
// on: see InFlight.
func (s *Server) Drain() { s.draining.Store(true) }

// InFlight returns how many connections have a command or a reply under way.
func (s *Server) InFlight() int { return int(s.busy.Load()) }

// Close ends every connection and waits for all goroutines.
func (s *Server) Close() error { return s.clients.Close() }
