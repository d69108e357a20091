package fragments

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
	"membrane/sidecar/engineport"
)

// Limits of requests.
const (
	// MaxPrefillTokens is the longest prompt that is prefilled.
	MaxPrefillTokens = 32768
	// MaxReconstructTokens is the longest prompt that is looked up.
	MaxReconstructTokens = 131072
	// MaxModelID is the longest model id, in bytes.
	MaxModelID = 256
	// MaxInventory is the most fragments in one answer of an inventory.
	MaxInventory = 100000
	// MaxModels is how many model ids a tenant may use in the life of the
	// process: the cache never forgets one, and callers invent ids. It leaves
	// as many to the tenant's engines.
	MaxModels = cache.MaxTenantSpaces / 2
	// MaxWaiting is how many prompts may wait for the embedded engine.
	MaxWaiting = 64

	defaultFillTimeout    = 2 * time.Second
	defaultComputeTimeout = 2 * time.Minute
)

// Config is what a service needs.
type Config struct {
	Cache *cache.Cache
	// Fill gets windows from other nodes; nil where there are none.
	Fill engineport.Filler
	// FillTimeout bounds the wait for peers. Default 2 s.
	FillTimeout time.Duration
	// ComputeTimeout bounds one prefill, its wait for the engine included.
	// Default 2 min.
	ComputeTimeout time.Duration
	Metrics        *metrics.Set
}

type spaceID struct {
	tenant    string
	namespace kvwire.Namespace
}

// Service answers the fragment API.
type Service struct {
	cfg    Config
	models models
	index  *index
	cancel func()
	engine chan struct{} // holds a token while the engine computes
	queue  chan struct{} // one token for each prompt that waits or is computed

	mu     sync.Mutex
	spaces map[spaceID]*cache.Space
	used   map[string]int // spaces of each tenant

	computed, loaded, fetched *metrics.Counter // tokens
	seconds                   *metrics.PrometheusHistogram
}

// New returns a service that follows the cache until Close.
func New(cfg Config) (*Service, error) {
	if cfg.Cache == nil || cfg.Metrics == nil {
		return nil, errors.New("cannot make the fragment service: Cache and Metrics are needed")
	}
	if cfg.FillTimeout == 0 {
		cfg.FillTimeout = defaultFillTimeout
	}
	if cfg.ComputeTimeout == 0 {
		cfg.ComputeTimeout = defaultComputeTimeout
	}
	s := &Service{cfg: cfg, engine: make(chan struct{}, 1), queue: make(chan struct{}, MaxWaiting+1), spaces: make(map[spaceID]*cache.Space), used: make(map[string]int)}
	s.index = newIndex(func(id pageID) bool {
		space := s.opened(id.key.Tenant, id.key.Namespace)
		return space != nil && space.Has(id.form, id.key.Hash)
	})
	s.cancel = cfg.Cache.Subscribe(s.index.follow)
	tokens := func(source string) *metrics.Counter {
		return cfg.Metrics.NewCounter(fmt.Sprintf(`membrane_fragment_tokens_total{source=%q}`, source))
	}
	s.computed, s.loaded, s.fetched = tokens("computed"), tokens("local"), tokens("peer")
	s.seconds = cfg.Metrics.NewPrometheusHistogram(`membrane_fragment_prefill_duration_seconds`)
	cfg.Metrics.NewGauge(`membrane_fragments_total`, func() float64 { return float64(s.index.len()) })
	cfg.Metrics.NewGauge(`membrane_fragment_prefills_waiting`, func() float64 { return float64(len(s.queue)) })
	return s, nil
}

// opened returns a space that was used before, or nil.
func (s *Service) opened(tenant string, ns kvwire.Namespace) *cache.Space {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.spaces[spaceID{tenant, ns}]
}

func (s *Service) space(tenant string, ns kvwire.Namespace) (*cache.Space, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := spaceID{tenant, ns}
	if have := s.spaces[id]; have != nil {
		return have, nil
	}
	if s.used[tenant] >= MaxModels {
		return nil, fmt.Errorf("tenant %q has used %d models, which is the most until the sidecar starts anew", tenant, MaxModels)
	}
	made, err := s.cfg.Cache.Space(tenant, ns)
	if err == nil {
		s.spaces[id] = made
		s.used[tenant]++
	}
	return made, err
}

// Close ends following the cache.
func (s *Service) Close() { s.cancel() }

// Len returns how many fragments are known to be held here.
func (s *Service) Len() int { return s.index.len() }

// Reconstruction says how much of a prompt is held and what that is.
type Reconstruction struct {
	Fragments []Fragment `json:"fragments"`
	// Coverage is the part of the tokens that the fragments cover, 0 to 1.
	Coverage float64 `json:"coverage"`
	// Missing are the spans of the others, first and last token.
	Missing [][2]int `json:"missing"`
	// Prefilled says whether anything was computed for this answer.
	Prefilled bool `json:"prefilled"`
	// Prefetch names fragments that often follow; none are suggested yet.
	Prefetch []string `json:"prefetch"`
}

// Prefill makes sure that the KV of a prompt is held here and returns its
// fragments in order. Windows that are here or at a peer are not computed
// again. A window that the cache had no room for is not in the answer.
//
// Errors are [*kvwire.Error]s where the request is at fault or the service is
// busy.
func (s *Service) Prefill(ctx context.Context, tenant string, tokens []int64, model string) ([]Fragment, error) {
	r, err := s.answer(ctx, tenant, "prompt_tokens", tokens, MaxPrefillTokens, model, true)
	return r.Fragments, err
}

// Reconstruct returns the fragments of a prompt that are held here or come
// from peers in time, and with prefill computes the gaps between them, each
// behind the real KV of what precedes it.
//
// Errors are those of Prefill.
func (s *Service) Reconstruct(ctx context.Context, tenant string, tokens []int64, model string, prefill bool) (Reconstruction, error) {
	limit := MaxReconstructTokens
	if prefill {
		limit = MaxPrefillTokens
	}
	return s.answer(ctx, tenant, "tokens", tokens, limit, model, prefill)
}

func (s *Service) answer(ctx context.Context, tenant, field string, tokens []int64, limit int, model string, prefill bool) (Reconstruction, error) {
	if len(tokens) > limit {
		return Reconstruction{}, kvwire.Errorf(kvwire.CodeTooLarge, field, "%d tokens are more than %d", len(tokens), limit)
	}
	wire, err := kvwire.CheckTokens(field, tokens)
	if err != nil {
		return Reconstruction{}, err
	}
	if model == "" || len(model) > MaxModelID {
		return Reconstruction{}, kvwire.Errorf(kvwire.CodeBadField, "model_id", "%d bytes are not 1 to %d", len(model), MaxModelID)
	}
	p, err := s.newPrompt(tenant, wire, model)
	if err != nil {
		return Reconstruction{}, err
	}
	p.look()
	p.fetch(ctx)
	computed := 0
	if prefill && !p.complete() {
		if computed, err = s.compute(ctx, p); err != nil {
			return Reconstruction{}, err
		}
	}
	return p.result(computed > 0), nil
}

// compute waits for the engine and computes what the prompt misses.
func (s *Service) compute(ctx context.Context, p *prompt) (int, error) {
	select {
	case s.queue <- struct{}{}:
		defer func() { <-s.queue }()
	default:
		return 0, kvwire.Errorf(kvwire.CodeBusy, "", "%d prompts wait for the embedded engine, which is the most", MaxWaiting)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ComputeTimeout)
	defer cancel()
	select {
	case s.engine <- struct{}{}:
		defer func() { <-s.engine }()
	case <-ctx.Done():
		return 0, kvwire.Errorf(kvwire.CodeBusy, "", "the embedded engine was busy for %v", s.cfg.ComputeTimeout)
	}
	p.look() // somebody may have computed it while this one waited
	began := time.Now()
	defer s.seconds.UpdateDuration(began)
	n, err := p.compute(ctx)
	if err != nil && ctx.Err() != nil {
		return n, kvwire.Errorf(kvwire.CodeBusy, "", "the embedded engine did not finish within %v", s.cfg.ComputeTimeout)
	}
	return n, err
}

// Retrieved is the answer to a look-up by payload hash.
type Retrieved struct {
	Found    bool      `json:"found"`
	Fragment *Fragment `json:"fragment"`
	// Corrupt says that the bytes were here and failed their checksum.
	Corrupt bool `json:"corrupt,omitempty"`
	// PayloadHash is set when Corrupt.
	PayloadHash string `json:"payload_hash,omitempty"`
}

// Retrieve looks for a fragment by its payload hash or storage key: the
// tenant's own, else a public one. It says found only when the bytes are here
// and were right within the last second. Another tenant's fragment is a miss like any other.
func (s *Service) Retrieve(tenant, key string) Retrieved {
	owners, hash := []string{tenant, auth.PublicTenant}, key
	if i := strings.LastIndexByte(key, ':'); i >= 0 {
		hash = key[i+1:]
		if key[:i] != tenant && key[:i] != auth.PublicTenant {
			return Retrieved{}
		}
		owners = []string{key[:i]}
	}
	for _, owner := range owners {
		id, e := s.index.payload(owner, hash)
		if e == nil {
			continue
		}
		space := s.opened(id.key.Tenant, id.key.Namespace)
		if space == nil {
			continue
		}
		now := time.Now()
		look := e.stale(now)
		view, why := space.View(kvwire.Shard{Count: 1}, id.form, id.key.Hash, look)
		if view != nil {
			view.Close()
			if look {
				e.checked.Store(now.UnixNano())
			}
			return Retrieved{Found: true, Fragment: &e.Fragment}
		}
		if why == kvwire.ReasonCorrupt {
			return Retrieved{Corrupt: true, PayloadHash: hash}
		}
	}
	return Retrieved{}
}

// Inventory lists a tenant's fragments by storage key, those above after, at
// most limit of them (0: all). Next is the cursor for the rest, "" at the end.
func (s *Service) Inventory(tenant, after string, limit int) (list []Fragment, next string) {
	list, more := s.index.list(tenant, after, limit)
	if more {
		next = list[len(list)-1].StorageKey()
	}
	return list, next
}
