package disagg

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"membrane/kvwire"
	"membrane/sidecar/roles"
)

// PrefillRequest asks for the KV of a prompt.
type PrefillRequest struct {
	RequestID string
	Model     string
	Tokens    []int64
	// TypeIDs are accepted for the predecessor's clients: one for each token,
	// all 0. The built-in backend has no token types.
	TypeIDs []int64
	// MaxDecodeTokens is how many tokens the decode will ask for; 0 means
	// DefaultOutputTokens.
	MaxDecodeTokens int
	// Fingerprint is accepted for the predecessor's clients and not used: the
	// model id says which numbers the KV has.
	Fingerprint string
	// Deadline bounds the request; 0 means DefaultDeadline.
	Deadline time.Duration
	// Begun is called with the answer as far as it is known when the prefill
	// begins: request id, handle and tokens. A decode that is asked for that
	// handle follows the prefill. May be nil.
	Begun func(Prefilled)
}

// Prefilled is the answer to a prefill.
type Prefilled struct {
	RequestID string
	// Handle is 64 hexadecimal digits.
	Handle string
	Took   time.Duration
	Tokens int
	// Cached is how many leading tokens were here or at a peer already.
	Cached  int
	Expires time.Time

	entry *entry // as it was kept
}

// Prefill makes sure that the KV of a prompt is here, keeps it under its handle
// and returns that. Errors are [*Error]s where the caller can do something.
func (s *Service) Prefill(ctx context.Context, tenant string, r PrefillRequest) (Prefilled, error) {
	all, err := s.PrefillBatch(ctx, tenant, []PrefillRequest{r})
	if err != nil {
		var e *Error
		if errors.As(err, &e) {
			e.Field = strings.TrimPrefix(strings.TrimPrefix(e.Field, batchField), ".")
		}
		return Prefilled{}, err
	}
	return all[0], nil
}

// batchField begins the names of fields of the first request of a batch.
const batchField = "requests[0]"

// PrefillBatch prefills 1 to MaxBatch prompts, one after the other. If one
// fails, none is kept under a handle; all are checked before the first is
// computed.
func (s *Service) PrefillBatch(ctx context.Context, tenant string, batch []PrefillRequest) ([]Prefilled, error) {
	if len(batch) < 1 || len(batch) > MaxBatch {
		return nil, malformed("requests", "%d requests are not 1 to %d: split the batch", len(batch), MaxBatch)
	}
	end, err := s.cfg.Roles.Begin(roles.Prefill)
	if err != nil {
		return nil, known(err)
	}
	defer end()
	prompts := make([]*prompt, len(batch))
	deadline := time.Duration(0)
	for i, r := range batch {
		if prompts[i], err = s.check(tenant, r); err != nil {
			var e *Error
			if errors.As(err, &e) {
				e.Field = strings.TrimSuffix(fmt.Sprintf("requests[%d].%s", i, e.Field), ".")
			}
			return nil, err
		}
		if r.Deadline == 0 {
			r.Deadline = DefaultDeadline
		}
		deadline = min(deadline+r.Deadline, MaxDeadline)
	}
	ctx, cancel := s.withDeadline(ctx, deadline)
	defer cancel()
	until, _ := ctx.Deadline()
	ends := make([]func(kept bool), len(batch))
	for i, p := range prompts {
		ends[i] = s.running.begin(p, batch[i].Model, until)
		defer ends[i](false)
		if begun := batch[i].Begun; begun != nil {
			begun(Prefilled{RequestID: batch[i].RequestID, Handle: hex.EncodeToString(p.handle[:]), Tokens: len(p.tokens)})
		}
	}
	out := make([]Prefilled, len(batch))
	for i, p := range prompts {
		out[i], err = s.prefill(ctx, p, batch[i])
		ends[i](err == nil)
		if err != nil {
			fresh := make(map[handleID]bool)
			for k, done := range prompts[:i] {
				fresh[done.id()] = fresh[done.id()] || out[k].entry.fresh
			}
			for k, done := range prompts[:i] {
				if fresh[done.id()] { // what was there before stays, and what came after
					s.handles.remove(done.id(), out[k].entry)
				}
			}
			return nil, s.ended(ctx, err, "the prefill")
		}
	}
	return out, nil
}

// check validates a request and names its pages; it stores nothing.
func (s *Service) check(tenant string, r PrefillRequest) (*prompt, error) {
	if err := checkCommon(r.RequestID, r.Model, r.Deadline); err != nil {
		return nil, err
	}
	switch {
	case len(r.Tokens) == 0:
		return nil, malformed("token_ids", "is empty: a prompt has at least one token")
	case len(r.Tokens) > MaxPromptTokens:
		return nil, malformed("token_ids", "%d tokens are more than %d: shorten the prompt", len(r.Tokens), MaxPromptTokens)
	case len(r.TypeIDs) != 0 && len(r.TypeIDs) != len(r.Tokens):
		return nil, malformed("token_type_ids", "%d for %d tokens: send one for each token, or none", len(r.TypeIDs), len(r.Tokens))
	case r.MaxDecodeTokens < 0 || r.MaxDecodeTokens > MaxOutputTokens:
		return nil, malformed("max_decode_tokens", "%d is not between 0 and %d", r.MaxDecodeTokens, MaxOutputTokens)
	case len(r.Fingerprint) > MaxFingerprint:
		return nil, malformed("fingerprint", "%d bytes are more than %d", len(r.Fingerprint), MaxFingerprint)
	}
	for i, id := range r.TypeIDs {
		if id != 0 {
			return nil, malformed(fmt.Sprintf("token_type_ids[%d]", i), "is %d: this backend has no token types, leave them out or send 0", id)
		}
	}
	wire, err := kvwire.CheckTokens("token_ids", r.Tokens)
	if err != nil {
		return nil, known(err)
	}
	model, err := s.cfg.Backend.Model(r.Model)
	if err != nil {
		return nil, known(err)
	}
	if n := model.Vocabulary(); n > 0 {
		for i, id := range r.Tokens {
			if id >= int64(n) {
				return nil, malformed(fmt.Sprintf("token_ids[%d]", i), "%d is not a token of model %q, which has %d", id, r.Model, n)
			}
		}
	}
	return s.newPrompt(tenant, model, r.Model, wire)
}

// checkCommon checks what prefill and decode share.
func checkCommon(requestID, model string, deadline time.Duration) error {
	switch {
	case requestID == "":
		return malformed("request_id", "is missing: send an id of 1 to %d bytes, it comes back in the answer", MaxRequestID)
	case len(requestID) > MaxRequestID:
		return malformed("request_id", "%d bytes are more than %d", len(requestID), MaxRequestID)
	case model == "":
		return malformed("model_id", "is missing")
	case len(model) > MaxModelID:
		return malformed("model_id", "%d bytes are more than %d", len(model), MaxModelID)
	case deadline < 0 || deadline > MaxDeadline:
		return malformed("deadline_ms", "%d is not between 1 and %d", deadline.Milliseconds(), MaxDeadline.Milliseconds())
	}
	return nil
}

func (s *Service) prefill(ctx context.Context, p *prompt, r PrefillRequest) (Prefilled, error) {
	began := time.Now()
	kept := false
	defer func() {
		if !kept {
			p.unpin()
		}
	}()
	local := p.look()
	if err := p.pinHeld(); err != nil {
		return Prefilled{}, s.pinError(err)
	}
	fetched := 0
	if local < len(p.tokens) {
		pull, cancel := pullContext(ctx)
		fetched = p.fetch(pull, "")
		cancel()
		if err := p.pinHeld(); err != nil {
			return Prefilled{}, s.pinError(err)
		}
	}
	cached := p.leading()
	var state []byte
	have := s.handles.get(p.id(), began)
	if have != nil {
		state = have.manifest.State
	}
	computed := 0
	if cached < len(p.tokens) || state == nil {
		var err error
		if computed, state, err = s.compute(ctx, p); err != nil {
			return Prefilled{}, s.pinError(err)
		}
	}
	s.m.computed.Add(computed)
	s.m.fetched.Add(fetched)
	s.m.cached.Add(local)
	now := time.Now()
	e := s.newEntry(p, r.Model, state, now)
	if wait, ok := s.handles.put(p.id(), e, now); !ok {
		s.m.refused.Inc()
		return Prefilled{}, busy(wait, "this node keeps as many handles as it may: try again when some have expired or were decoded elsewhere")
	}
	kept = true
	s.m.prefills.Inc()
	s.m.prefillSeconds.UpdateDuration(began)
	return Prefilled{
		RequestID: r.RequestID, Handle: hex.EncodeToString(p.handle[:]), Took: time.Since(began), Tokens: len(p.tokens),
		Cached: min(cached, len(p.tokens)), Expires: e.expires,
		entry: e,
	}, nil
}

// compute runs the backend over a prompt that is not here as a whole, or whose
// state is not.
func (s *Service) compute(ctx context.Context, p *prompt) (computed int, state []byte, err error) {
	release, err := p.model.Acquire(ctx)
	if err != nil {
		return 0, nil, err
	}
	defer release()
	p.look() // somebody may have computed it while this one waited
	if err := p.pinHeld(); err != nil {
		return 0, nil, err
	}
	seq := p.model.Start()
	if computed, state, err = p.work(ctx, seq, 0, true); err != nil {
		return computed, nil, err
	}
	if state == nil { // all pages were here, but nobody has kept what comes behind
		computed++
		state, err = seq.Rewind(ctx, p.tokens[len(p.tokens)-1])
	}
	return computed, state, err
}

func (s *Service) newEntry(p *prompt, model string, state []byte, now time.Time) *entry {
	return fromManifest(s.manifest(p, model, state, now, now.Add(s.cfg.TTL)), p.pins())
}

// manifest says what a prompt's handle stands for.
func (s *Service) manifest(p *prompt, model string, state []byte, created, expires time.Time) kvwire.Manifest {
	ns, form, pageTokens := p.model.Layout()
	wire := make([]byte, 0, 4*len(p.tokens))
	for _, t := range p.tokens {
		wire = append(wire, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
	}
	return kvwire.Manifest{
		Namespace: ns, Form: form, Created: created.UnixMilli(), Expires: expires.UnixMilli(), PageTokens: pageTokens, Model: model,
		Node: s.node(), Tokens: wire, State: state,
	}
}

// fromManifest returns the entry of a manifest; it keeps one copy of its bytes.
func fromManifest(m kvwire.Manifest, pins []uint64) *entry {
	body := kvwire.AppendManifest(nil, m)
	m, _ = kvwire.ParseManifest(body) // it was well formed
	return &entry{body: body, manifest: m, expires: time.UnixMilli(m.Expires), pins: pins}
}

func (s *Service) node() string {
	if s.cfg.Peers == nil {
		return ""
	}
	return s.cfg.Peers.Name()
}

// pinError says when to try again after the cap of pins was reached.
func (s *Service) pinError(err error) error {
	if !errors.Is(err, errUnpinned) {
		return err
	}
	s.m.refused.Inc()
	e := busy(s.handles.retryAfter(time.Now()), "leases and pins hold as much of the cache as they may: try again when a handle was decoded or has expired, or give the cache more memory")
	e.Name = "pinned"
	return e
}

const (
	// maxPull bounds the wait for peers; half of the time that is left does,
	// too, so that there is time to compute instead.
	maxPull = 5 * time.Second
)

func pullContext(ctx context.Context) (context.Context, context.CancelFunc) {
	left := maxPull
	if until, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(until)/2)
	}
	return context.WithTimeout(ctx, left)
}
