package disagg

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"golang.org/x/sync/semaphore"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/roles"
)

// Limits of requests.
const (
	// MaxPromptTokens is the longest prompt.
	MaxPromptTokens = 32768
	// MaxOutputTokens is the most tokens that one decode makes.
	MaxOutputTokens = 32768
	// MaxModelID, MaxRequestID and MaxFingerprint are in bytes.
	MaxModelID     = kvwire.MaxModel
	MaxRequestID   = 256
	MaxFingerprint = 128
	// MaxBatch is the most prompts of one batch.
	MaxBatch = 64
	// MaxName is the longest handle in a path or a body, in bytes.
	MaxName = 256
	// MaxDeadline is the longest deadline of a request.
	MaxDeadline = 10 * time.Minute

	// DefaultTTL is how long a handle can be decoded.
	DefaultTTL = 10 * time.Minute
	// DefaultDeadline bounds a request that names none.
	DefaultDeadline = 2 * time.Minute
	// DefaultOutputTokens is max_tokens of a request that names none.
	DefaultOutputTokens = 256

	// sequenceTokens bounds the KV of all sequences at work, in tokens: the
	// embedded engine has its own outside the arena.
	sequenceTokens = MaxPromptTokens + MaxOutputTokens
	// maxDecodes is how many decodes wait or are at work.
	maxDecodes = 64
	sweepEvery = time.Second
)

// Peers is the part of [mesh.Mesh] that finds and fetches.
type Peers interface {
	Fill(ctx context.Context, r mesh.FillRequest) (pages int, why kvwire.Reason)
	FindManifest(ctx context.Context, tenant string, handle kvwire.Hash, may func(mesh.Member) bool) mesh.FoundManifest
	// Follow and WaitManifest are for a prefill that still runs.
	Follow(ctx context.Context, r mesh.FillRequest, held func(pages int)) (pages int, why kvwire.Reason)
	WaitManifest(ctx context.Context, node, tenant string, handle kvwire.Hash) ([]byte, error)
	ManifestPulled(ctx context.Context, node, tenant string, handle kvwire.Hash) error
	Name() string
}

var _ Peers = (*mesh.Mesh)(nil)

// Config is what a service needs.
type Config struct {
	Cache   *cache.Cache
	Backend Backend
	// Peers are the other nodes; nil where there are none.
	Peers Peers
	Roles *roles.Keeper
	// TTL is how long a handle can be decoded and its pages are pinned unless
	// they are pulled before. Default DefaultTTL, at most [cache.MaxTTL].
	TTL     time.Duration
	Metrics *metrics.Set
	Log     zerolog.Logger
}

// Service prefills and decodes.
type Service struct {
	cfg     Config
	handles *handles
	running *running
	tokens  *semaphore.Weighted // of sequences at work
	uploads *semaphore.Weighted // bytes of bundles on their way, which may come slowly
	decodes chan struct{}
	// generating is how many decodes are behind their prompt.
	generating atomic.Int32
	m          counters

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	closing sync.Mutex // nothing begins after cancel
}

type counters struct {
	prefills, decodes                       *metrics.Counter
	cached, fetched, computed               *metrics.Counter // prompt tokens of prefills
	loaded, pulled, recomputed, followed    *metrics.Counter // prompt tokens of decodes
	generated                               *metrics.Counter
	here, atPeer, unknown                   *metrics.Counter // where manifests were found
	expired, pullsTold, pullsHeard, refused *metrics.Counter
	prefillSeconds, handoverSeconds         *metrics.PrometheusHistogram
	firstTokenSeconds                       *metrics.PrometheusHistogram
}

// New returns a service; Close ends it.
func New(cfg Config) (*Service, error) {
	if cfg.Cache == nil || cfg.Backend == nil || cfg.Roles == nil || cfg.Metrics == nil {
		return nil, errors.New("cannot make the disagg service: Cache, Backend, Roles and Metrics are needed")
	}
	if cfg.TTL == 0 {
		cfg.TTL = DefaultTTL
	}
	if cfg.TTL < time.Second || cfg.TTL > cache.MaxTTL {
		return nil, fmt.Errorf("cannot make the disagg service with TTL %v: not between 1s and %v", cfg.TTL, cache.MaxTTL)
	}
	s := &Service{
		cfg: cfg, handles: newHandles(cfg.Cache), running: newRunning(), tokens: semaphore.NewWeighted(sequenceTokens),
		uploads: semaphore.NewWeighted(cfg.Cache.Arena().Size() / 2), decodes: make(chan struct{}, maxDecodes),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.meter()
	s.wg.Go(s.sweep)
	return s, nil
}

func (s *Service) meter() {
	set := s.cfg.Metrics
	counter := set.NewCounter
	s.m = counters{
		prefills: counter("membrane_disagg_prefills_total"), decodes: counter("membrane_disagg_decodes_total"),
		cached:   counter(`membrane_disagg_prefill_tokens_total{source="local"}`),
		fetched:  counter(`membrane_disagg_prefill_tokens_total{source="peer"}`),
		computed: counter(`membrane_disagg_prefill_tokens_total{source="computed"}`),
		loaded:   counter(`membrane_disagg_decode_prompt_tokens_total{source="local"}`),
		pulled:   counter(`membrane_disagg_decode_prompt_tokens_total{source="peer"}`),
		// The one that should stay 0: what a hand-over is there to save.
		recomputed: counter("membrane_disagg_decode_recomputed_tokens_total"),
		// Pulled while the prefill still ran.
		followed:  counter("membrane_disagg_decode_followed_tokens_total"),
		generated: counter("membrane_disagg_generated_tokens_total"),
		here:      counter(`membrane_disagg_handles_found_total{where="here"}`),
		atPeer:    counter(`membrane_disagg_handles_found_total{where="peer"}`),
		unknown:   counter(`membrane_disagg_handles_found_total{where="nowhere"}`),
		expired:   counter("membrane_disagg_handles_expired_total"),
		pullsTold: counter("membrane_disagg_pulls_told_total"), pullsHeard: counter("membrane_disagg_pulls_heard_total"),
		refused:           counter("membrane_disagg_refused_at_cap_total"),
		prefillSeconds:    set.NewPrometheusHistogram("membrane_disagg_prefill_duration_seconds"),
		handoverSeconds:   set.NewPrometheusHistogram("membrane_disagg_handover_duration_seconds"),
		firstTokenSeconds: set.NewPrometheusHistogram("membrane_disagg_first_token_duration_seconds"),
	}
	set.NewGauge("membrane_disagg_handles", func() float64 { n, _, _ := s.handles.counts(); return float64(n) })
	set.NewGauge("membrane_disagg_prefills_running", func() float64 { return float64(s.running.count()) })
	set.NewGauge("membrane_disagg_handles_pinned", func() float64 { _, n, _ := s.handles.counts(); return float64(n) })
	set.NewGauge("membrane_disagg_manifest_bytes", func() float64 { _, _, n := s.handles.counts(); return float64(n) })
	set.NewGauge("membrane_disagg_decodes_waiting", func() float64 { return float64(len(s.decodes)) })
}

func (s *Service) sweep() {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case now := <-ticker.C:
			s.m.expired.Add(s.handles.sweep(now))
		}
	}
}

// Close cancels what is under way, forgets all handles and unpins their pages.
func (s *Service) Close() {
	s.closing.Lock()
	s.cancel()
	s.closing.Unlock()
	s.wg.Wait()
	s.handles.close()
}

// Manifest returns a tenant's manifest in wire form, nil if it is not here. That
// of a prefill that still runs has no state and Created 0. It is for peers.
func (s *Service) Manifest(tenant string, handle kvwire.Hash) []byte {
	if e := s.handles.get(handleID{tenant, handle}, time.Now()); e != nil {
		return e.body
	}
	if r := s.running.get(handleID{tenant, handle}); r != nil {
		return kvwire.AppendManifest(nil, s.early(r))
	}
	return nil
}

// Pulled unpins the pages of a handle that a peer holds now.
func (s *Service) Pulled(tenant string, handle kvwire.Hash) {
	if s.handles.pulled(handleID{tenant, handle}) {
		s.m.pullsHeard.Inc()
	}
}

// Waiting returns how many prompts wait for the backend, and how many decodes
// have their prompt's KV and share the backend with another.
func (s *Service) Waiting() (prefill, decode int) {
	return s.cfg.Backend.Waiting(), max(int(s.generating.Load())-1, 0)
}

var _ mesh.Manifests = (*Service)(nil)

// withDeadline bounds a request; it also ends with the service.
func (s *Service) withDeadline(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d == 0 {
		d = DefaultDeadline
	}
	ctx, cancel := context.WithTimeout(ctx, d)
	stop := context.AfterFunc(s.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// ended turns an error under a context that has ended into what the caller can
// do about it.
func (s *Service) ended(ctx context.Context, err error, what string) error {
	var said *Error
	switch {
	case errors.As(err, &said):
		return err // it knows better
	case err == nil || ctx.Err() == nil:
		return known(err)
	case s.ctx.Err() != nil:
		return &Error{Kind: Busy, Name: "draining", Message: "the sidecar is stopping", RetryAfter: time.Second}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &Error{Kind: Late, Message: what + " did not end before the deadline: give it more time (deadline_ms), or a shorter prompt"}
	}
	return &Error{Kind: Gone, Message: "the caller has gone away"}
}
