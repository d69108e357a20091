package lm

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"golang.org/x/sync/semaphore"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/listener"
)

// Limits on clients, and times.
const (
	// MaxConnections is the most connections at a time, MaxFromOne the most of
	// them from one address.
	MaxConnections = 1024
	MaxFromOne     = MaxConnections / 2

	readBuffer = 16 << 10
	// stallTimeout is how long the rest of a request may be on its way, beside
	// the time for its value.
	stallTimeout = 30 * time.Second
	writeTimeout = 10 * time.Second
	roomTimeout  = 100 * time.Millisecond // the wait for others to receive
)

// Config is what the listener needs.
type Config struct {
	Cache *cache.Cache
	// Tenant owns all values.
	Tenant  string
	Metrics *metrics.Set
	Log     zerolog.Logger

	stallTimeout, writeTimeout time.Duration // shorter in tests
}

// Server is the listener.
type Server struct {
	cfg      Config
	space    *cache.Space
	count    *counters
	draining atomic.Bool
	busy     atomic.Int64 // connections that do something

	maxValue  int64               // the longest value, in bytes
	receiving *semaphore.Weighted // bytes of slots that are being filled
	lanes     listener.Lanes      // of long values on their way out
	clients   *listener.Listener[*conn]
}

// New checks the configuration and returns a server without listeners.
func New(cfg Config) (*Server, error) {
	if cfg.Cache == nil || cfg.Metrics == nil {
		return nil, errors.New("cannot make the lm listener: Cache and Metrics are needed")
	}
	space, err := cfg.Cache.Space(cfg.Tenant, namespace)
	if err != nil {
		return nil, fmt.Errorf("cannot make the lm listener: %w", err)
	}
	if cfg.stallTimeout == 0 {
		cfg.stallTimeout = stallTimeout
	}
	if cfg.writeTimeout == 0 {
		cfg.writeTimeout = writeTimeout
	}
	quarter := cfg.Cache.Arena().Size() / 4
	s := &Server{
		cfg: cfg, space: space, count: newCounters(cfg.Metrics), maxValue: min(kvwire.MaxObject, quarter) - maxHeader,
		receiving: semaphore.NewWeighted(quarter), lanes: listener.NewLanes(),
	}
	s.clients, err = listener.New(listener.Config[*conn]{
		Who: "an LMCache client", Connections: MaxConnections, FromOne: MaxFromOne, Strangers: 1,
		Open: func(nc *net.TCPConn) (*conn, bool, error) {
			c, err := newConn(s, nc)
			return c, true, err
		},
		Refuse:     func(*net.TCPConn) {}, // the protocol has no words for it
		TurnedAway: s.count.turnedAway.Inc, Log: cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	cfg.Metrics.NewGauge("membrane_lm_connections", func() float64 { return float64(s.Connections()) })
	return s, nil
}

// Connections returns how many clients are connected.
func (s *Server) Connections() int { return s.clients.Connections() }

// Serve accepts clients on a TCP listener until Close. It returns at once.
func (s *Server) Serve(l net.Listener) error { return s.clients.Serve(l) }

// Drain has nothing and takes nothing from now on. What is under way goes on:
// see InFlight.
func (s *Server) Drain() { s.draining.Store(true) }

// InFlight returns how many connections have a request or a reply under way.
func (s *Server) InFlight() int { return int(s.busy.Load()) }

// Close ends every connection and waits for all goroutines.
func (s *Server) Close() error { return s.clients.Close() }
