package disagg

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/roles"
)

// DecodeRequest asks for tokens behind a prompt that was prefilled.
type DecodeRequest struct {
	RequestID string
	Handle    string
	Model     string
	// MaxTokens is how many tokens to make at most; 0 means
	// DefaultOutputTokens.
	MaxTokens int
	Sampling  Sampling
	// Deadline bounds the request; 0 means DefaultDeadline. Tokens that are
	// there by then are returned.
	Deadline time.Duration
}

// Decoded is the answer to a decode.
type Decoded struct {
	RequestID string
	Tokens    []uint32
	// Finished is false if the deadline came before the end.
	Finished bool
	Reason   Finish
	// Prompt is how many tokens the prompt has, Pulled how many of them came
	// from a peer, Recomputed how many had to be computed again.
	Prompt, Pulled, Recomputed int
	// Followed is how many of the pulled came while the prefill still ran.
	Followed int
	// Expires is until when the handle can be decoded again.
	Expires time.Time
}

// Decode finds a handle, pulls what is missing of its pages, and goes on behind
// the prompt, calling yield (which may be nil) with each token as it is known;
// an error of yield's ends it as Gone. Errors are [*Error]s where the caller can
// do something; none comes after the first token but yield's own.
func (s *Service) Decode(ctx context.Context, tenant string, r DecodeRequest, yield func(token uint32) error) (Decoded, error) {
	handle, err := checkDecode(&r)
	if err != nil {
		return Decoded{}, err
	}
	end, err := s.cfg.Roles.Begin(roles.Decode)
	if err != nil {
		return Decoded{}, known(err)
	}
	defer end()
	select {
	case s.decodes <- struct{}{}:
		defer func() { <-s.decodes }()
	default:
		return Decoded{}, busy(time.Second, "%d decodes wait for the embedded engine, which is the most", maxDecodes)
	}
	ctx, cancel := s.withDeadline(ctx, r.Deadline)
	defer cancel()
	s.m.decodes.Inc()
	out, err := s.decode(ctx, tenant, handle, r, yield)
	if err != nil {
		return Decoded{}, s.ended(ctx, err, "the decode")
	}
	return out, nil
}

// checkDecode fills in what is left out and refuses what cannot be.
func checkDecode(r *DecodeRequest) (handle kvwire.Hash, err error) {
	if err := checkCommon(r.RequestID, r.Model, r.Deadline); err != nil {
		return handle, err
	}
	if err := CheckName("kv_handle", r.Handle); err != nil {
		return handle, err
	}
	if r.MaxTokens == 0 {
		r.MaxTokens = DefaultOutputTokens
	}
	if r.MaxTokens < 1 || r.MaxTokens > MaxOutputTokens {
		return handle, malformed("max_tokens", "%d is not between 1 and %d", r.MaxTokens, MaxOutputTokens)
	}
	if err := r.Sampling.check(); err != nil {
		return handle, err
	}
	b, err := hex.DecodeString(r.Handle)
	if err != nil || len(b) != kvwire.HashSize {
		return handle, unknownHandle("it is not the kv_handle of any prefill, which has 64 hexadecimal digits")
	}
	return kvwire.Hash(b), nil
}

func unknownHandle(format string, args ...any) *Error {
	return &Error{Kind: NotFound, Field: "kv_handle", Message: fmt.Sprintf(format, args...)}
}

// CheckName refuses what cannot be a handle or the name of a bundle: anything
// but 1 to MaxName letters, digits, '.', '_', ':' and '-', and "." and "..".
func CheckName(field, name string) error {
	if name == "" {
		return malformed(field, "is missing")
	}
	if len(name) > MaxName {
		return malformed(field, "%d bytes are more than %d", len(name), MaxName)
	}
	if name == "." || name == ".." {
		return malformed(field, "%q is a path and no handle", name)
	}
	for i := range len(name) {
		c := name[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == ':' || c == '-') {
			return malformed(field, "%q is not allowed: a handle has letters, digits, '.', '_', ':' and '-'", c)
		}
	}
	return nil
}

func (s *Service) decode(ctx context.Context, tenant string, handle kvwire.Hash, r DecodeRequest, yield func(uint32) error) (Decoded, error) {
	began := time.Now()
	e, err := s.find(ctx, handleID{tenant, handle})
	if err != nil {
		return Decoded{}, err
	}
	if e.manifest.Model != r.Model {
		return Decoded{}, malformed("model_id", "the handle was prefilled for another model: send its model_id, or prefill for %q", r.Model)
	}
	model, err := s.cfg.Backend.Model(r.Model)
	if err != nil {
		return Decoded{}, known(err)
	}
	p, err := s.newPrompt(tenant, model, r.Model, e.manifest.Tokens)
	if err != nil {
		return Decoded{}, err
	}
	if p.handle != handle || p.form != e.manifest.Form {
		return Decoded{}, malformed("model_id", "the handle was prefilled by another version of the model or backend: prefill again")
	}
	if n := len(p.tokens) + r.MaxTokens; n > model.MaxTokens() {
		return Decoded{}, malformed("max_tokens", "%d behind a prompt of %d tokens are more than the model's %d positions", r.MaxTokens, len(p.tokens), model.MaxTokens())
	}
	weight := int64(min(len(p.tokens)+r.MaxTokens, sequenceTokens))
	if err := s.tokens.Acquire(ctx, weight); err != nil {
		return Decoded{}, err
	}
	defer s.tokens.Release(weight)
	out := Decoded{RequestID: r.RequestID, Prompt: len(p.tokens), Tokens: []uint32{}, Expires: e.expires}
	seq, state, err := s.restore(ctx, p, e, &out)
	if err != nil {
		return Decoded{}, err
	}
	out.Expires = e.expires
	s.m.handoverSeconds.UpdateDuration(began)
	err = s.generate(ctx, seq, state, r, &out, func(token uint32) error {
		if len(out.Tokens) == 1 {
			s.m.firstTokenSeconds.UpdateDuration(began)
		}
		if yield == nil {
			return nil
		}
		return yield(token)
	})
	return out, err
}

// find looks for a manifest here, then at the peers that may have prefilled. A
// copy is kept: the handle can be decoded again here though the other node is
// gone.
func (s *Service) find(ctx context.Context, id handleID) (*entry, error) {
	e := s.handles.get(id, time.Now())
	if r := s.running.get(id); e == nil && r != nil { // it uses the engine that this one would
		select {
		case <-r.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		e = s.handles.get(id, time.Now())
	}
	if e != nil {
		s.m.here.Inc()
		return e, nil
	}
	if s.cfg.Peers == nil {
		s.m.unknown.Inc()
		return nil, unknownHandle("this node does not know it for this tenant, or it has expired: prefill again")
	}
	ask, cancel := pullContext(ctx)
	defer cancel()
	found := s.cfg.Peers.FindManifest(ask, id.tenant, id.handle, mayPrefill)
	if found.Manifest == nil {
		s.m.unknown.Inc()
		if found.Silent > 0 {
			return nil, unknownHandle("no node that answered knows it for this tenant, and %d of %d that may prefill did not answer: try again, or prefill again", found.Silent, found.Asked)
		}
		return nil, unknownHandle("neither this node nor any of %d that may prefill knows it for this tenant, or it has expired: prefill again", found.Asked)
	}
	if e = s.found(id, found.Manifest); e == nil {
		s.m.unknown.Inc()
		return nil, unknownHandle("the answer of the node that knows it is no manifest: prefill again")
	}
	s.m.atPeer.Inc()
	return e, nil
}

// mayPrefill reports whether a member may keep handles: it prefills, or it
// chooses its role by itself and may have prefilled before.
func mayPrefill(m mesh.Member) bool {
	alive := m.Status == mesh.StatusAlive || m.Status == mesh.StatusSuspect
	return alive && (roles.Role(m.Role).Serves(roles.Prefill) || m.Tags[roles.TagAuto] != "")
}

// restore brings the prompt's KV into a sequence: from here, from the node that
// prefilled or others, and what is missing all the same by computing it.
func (s *Service) restore(ctx context.Context, p *prompt, e *entry, out *Decoded) (seq Sequence, state []byte, err error) {
	local := p.look()
	seq = p.model.Start()
	loaded := 0
	if e.running() {
		if loaded, err = s.follow(ctx, p, e, seq, out); err != nil {
			return nil, nil, err
		}
		out.Pulled = max(p.look()-local, 0)
	}
	if !p.complete(loaded) {
		pull, cancel := pullContext(ctx)
		out.Pulled += p.fetch(pull, e.manifest.Node)
		cancel()
	}
	if !p.complete(loaded) { // computing is the prefill engine's turn
		release, err := p.model.Acquire(ctx)
		if err != nil {
			return nil, nil, err
		}
		defer release()
	}
	out.Recomputed, state, err = p.work(ctx, seq, loaded, false)
	if err != nil {
		return nil, nil, err
	}
	if state == nil {
		state = e.manifest.State
	}
	if len(state) == 0 {
		out.Recomputed++
		if state, err = seq.Rewind(ctx, p.tokens[len(p.tokens)-1]); err != nil {
			return nil, nil, err
		}
	}
	s.m.loaded.Add(min(local, len(p.tokens)))
	s.m.pulled.Add(out.Pulled)
	s.m.recomputed.Add(out.Recomputed)
	if out.Recomputed > 0 {
		s.cfg.Log.Info().Str("request_id", out.RequestID).Int("tokens", out.Recomputed).Int("of", out.Prompt).Msg("a decode had to compute a part of its prompt again")
	}
	s.pulled(p, e)
	return seq, state, nil
}

// pulled says that the pages are here, to the node that keeps them for us. It
// waits for nobody.
func (s *Service) pulled(p *prompt, e *entry) {
	if e.manifest.Node == s.node() {
		s.handles.pulled(p.id())
		return
	}
	s.closing.Lock()
	defer s.closing.Unlock()
	if s.cfg.Peers == nil || s.ctx.Err() != nil {
		return
	}
	node, id := e.manifest.Node, p.id()
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, tellPulled)
		defer cancel()
		if err := s.cfg.Peers.ManifestPulled(ctx, node, id.tenant, id.handle); err != nil {
			s.cfg.Log.Debug().Err(err).Str("peer", node).Msg("cannot tell a peer that its pages were pulled")
			return
		}
		s.m.pullsTold.Inc()
	})
}

const tellPulled = 2 * time.Second

// errGone is a yield that failed.
var errGone = errors.New("nobody takes the tokens any more")

func (s *Service) generate(ctx context.Context, seq Sequence, state []byte, r DecodeRequest, out *Decoded, yield func(uint32) error) error {
	s.generating.Add(1)
	defer s.generating.Add(-1)
	var gone error
	finish, err := seq.Generate(ctx, state, r.MaxTokens, r.Sampling, func(token uint32) bool {
		out.Tokens = append(out.Tokens, token)
		s.m.generated.Inc()
		gone = yield(token)
		return gone == nil
	})
	switch {
	case gone != nil:
		return &Error{Kind: Gone, Message: errGone.Error()}
	case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) && len(out.Tokens) > 0:
		out.Reason = FinishDeadline
		return nil
	case err != nil:
		return err
	}
	out.Finished, out.Reason = true, finish
	return nil
}
