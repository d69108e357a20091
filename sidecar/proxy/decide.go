package proxy

import (
	"context"
	"slices"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/sidecar/roles"
)

// decision says where a prompt is prefilled.
type decision struct {
	why    reason
	pods   []*pod // that may prefill it, when why is disaggregated
	prefix Prefix // nil where the tokens are not known
	prompt int    // tokens, or a guess
	lacks  int    // of them, those that no node holds
}

// decide finds out whether another pod should prefill. The cheap questions come
// first: a short request costs no look at anything but itself.
func (s *Server) decide(ctx context.Context, r *request) decision {
	switch {
	case r.leg != wholeRequest:
		return decision{why: reasonLeg}
	case s.cfg.Threshold == 0:
		return decision{why: reasonOff}
	}
	named := r.c.Request.Header.Peek(prefillerHeader)
	if len(named) == 0 && r.atMost() < s.cfg.Threshold {
		return decision{why: reasonShort}
	}
	role := s.cfg.Role()
	switch {
	case !role.Serves(roles.Decode):
		return decision{why: reasonPrefills}
	case s.draining.Load():
		return decision{why: reasonDraining}
	case r.unsuitable():
		return decision{why: reasonUnfit}
	}
	list, all := s.pods.prefilling(role)
	// A router in front has decided. Only nodes of the mesh can be named: the
	// header is the client's text, and must not make this node call anybody.
	if chosen := namedPods(all, named); len(chosen) > 0 {
		d := s.measure(ctx, r)
		d.pods = chosen
		return d
	}
	if len(list) == 0 {
		return decision{why: reasonNobody}
	}
	d := s.measure(ctx, r)
	d.pods = list
	for _, p := range list {
		if d.prefix != nil {
			d.lacks = min(d.lacks, d.prompt-d.prefix.At(p.Name))
		}
	}
	if d.lacks < s.cfg.Threshold {
		d.why = reasonCached
	}
	return d
}

func namedPods(all []*pod, header []byte) (out []*pod) {
	if len(header) == 0 {
		return nil
	}
	for _, addr := range parseHostPorts(string(header)) {
		if i := slices.IndexFunc(all, func(p *pod) bool { return p.Addr == addr }); i >= 0 {
			out = append(out, all[i])
		}
	}
	return out
}

// measure finds the prompt's tokens and how many of them are not here.
func (s *Server) measure(ctx context.Context, r *request) decision {
	tokens, ok := s.tokens(ctx, r, s.cfg.tokenizeTimeout)
	if !ok {
		n := r.guess()
		return decision{prompt: n, lacks: n}
	}
	d := decision{prompt: len(tokens), lacks: len(tokens), prefix: s.cfg.Cache.Prefix(r.salt, tokens)}
	if d.prefix != nil {
		d.lacks -= d.prefix.Here()
	}
	return d
}

func (s *Server) tokens(ctx context.Context, r *request, timeout time.Duration) ([]uint32, bool) {
	if tokens, ok := r.ids(); ok {
		return tokens, true
	}
	return s.tokenizer.tokens(ctx, r, timeout, s.authorization(r.c))
}

// lateTokenize is what a prompt that another pod has prefilled may wait for its
// tokens, without which its pages cannot be named: less than its prefill.
const lateTokenize = time.Second

// authorization returns the header for this pod's engine: a key that was ours
// ends here.
func (s *Server) authorization(c *fasthttp.RequestCtx) []string {
	if s.cfg.Keys != nil {
		return nil
	}
	if v := c.Request.Header.Peek(fasthttp.HeaderAuthorization); len(v) > 0 {
		return []string{string(v)}
	}
	return nil
}
