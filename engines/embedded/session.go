package embedded

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/rs/zerolog"

	"membrane/kvwire"
)

const (
	pingEvery   = 300 * time.Millisecond
	pingTimeout = 500 * time.Millisecond
	dialTimeout = 2 * time.Second
)

// errDetached is returned by Use while no sidecar is attached.
var errDetached = errors.New("no sidecar is attached")

// Session keeps an engine attached to its sidecar: it connects and registers
// in the background for ever and lets go of the shared memory within a second
// when the sidecar is gone. The engine works all the same while it is absent.
type Session struct {
	addr string
	reg  kvwire.Register
	opts kvwire.ClientOptions
	log  zerolog.Logger

	// mu keeps the mapping in place while somebody copies: Use holds it for
	// reading, replacing the client for writing.
	mu         sync.RWMutex
	client     *kvwire.Client
	registered kvwire.Registered

	lost chan struct{} // a call failed: look at the connection now
	stop context.CancelFunc
	done chan struct{}
}

// NewSession starts to attach to the sidecar at addr. It never waits for it.
func NewSession(addr string, reg kvwire.Register, opts kvwire.ClientOptions, log zerolog.Logger) *Session {
	ctx, stop := context.WithCancel(context.Background())
	s := &Session{
		addr: addr, reg: reg, opts: opts, log: log,
		lost: make(chan struct{}, 1), stop: stop, done: make(chan struct{}),
	}
	go s.run(ctx)
	return s
}

// Close detaches and waits until the background work has ended.
func (s *Session) Close() {
	s.stop()
	<-s.done
}

// Attached reports whether a sidecar is attached now.
func (s *Session) Attached() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.client != nil
}

// Use calls f with the attached client and what it registered as. The shared
// memory stays mapped until f returns. An error of f that is not an
// [*kvwire.Error] means that the connection is spent.
func (s *Session) Use(f func(*kvwire.Client, kvwire.Registered) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.client == nil {
		return errDetached
	}
	err := f(s.client, s.registered)
	if err != nil && kvwire.CodeOf(err) == 0 {
		select {
		case s.lost <- struct{}{}:
		default:
		}
	}
	return err
}

func (s *Session) run(ctx context.Context) {
	defer close(s.done)
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 20*time.Millisecond, time.Second
	told := false // of this outage
	for ctx.Err() == nil {
		if err := s.attach(ctx); err != nil {
			level := zerolog.WarnLevel
			if told {
				level = zerolog.DebugLevel
			}
			told = true
			s.log.WithLevel(level).Err(err).Str("sidecar", s.addr).Msg("sidecar not attached: serving without it, trying on")
			sleep(ctx, wait.NextBackOff())
			continue
		}
		wait.Reset()
		told = false
		s.watch(ctx)
		s.detach()
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (s *Session) attach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	client, err := kvwire.Dial(ctx, s.addr, s.opts)
	if err != nil {
		return err
	}
	registered, err := client.Register(ctx, s.reg)
	if err != nil {
		_ = client.Close()
		return fmt.Errorf("cannot register at %q: %w", s.addr, err)
	}
	s.mu.Lock()
	s.client, s.registered = client, registered
	s.mu.Unlock()
	s.log.Info().Str("sidecar", s.addr).Str("namespace", registered.Namespace).Bool("shared_memory", registered.SharedMemory).Msg("sidecar attached")
	return nil
}

// watch returns when the connection is lost or ctx ends.
func (s *Session) watch(ctx context.Context) {
	ticker := time.NewTicker(pingEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.lost:
		case <-ticker.C:
		}
		err := s.Use(func(c *kvwire.Client, _ kvwire.Registered) error {
			ctx, cancel := context.WithTimeout(ctx, pingTimeout)
			defer cancel()
			return c.Ping(ctx)
		})
		if err != nil {
			if ctx.Err() == nil {
				s.log.Warn().Err(err).Str("sidecar", s.addr).Msg("sidecar lost")
			}
			return
		}
	}
}

func (s *Session) detach() {
	s.mu.Lock()
	client := s.client
	s.client = nil
	s.mu.Unlock()
	_ = client.Close()
	select { // whoever lost it is served by the next attachment
	case <-s.lost:
	default:
	}
}
