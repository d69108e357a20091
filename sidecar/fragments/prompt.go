package fragments

import (
	"context"
	"encoding/binary"
	"fmt"

	"membrane/cache"
	"membrane/engines/llama"
	"membrane/kvwire"
	"membrane/sidecar/engineport"
)

// prompt is one request's tokens in windows.
type prompt struct {
	s       *Service
	tenant  string
	modelID string
	model   *llama.Model
	layout  layout
	space   *cache.Space
	tokens  []uint32
	windows []window
}

type window struct {
	hash   kvwire.Hash
	start  int
	tokens int
	found  *Fragment // nil while it is not held
}

func (s *Service) newPrompt(tenant string, wire []byte, modelID string) (*prompt, error) {
	model, err := s.models.get(modelID)
	if err != nil {
		return nil, err
	}
	p := &prompt{s: s, tenant: tenant, modelID: modelID, model: model, layout: layoutOf(model)}
	if p.space, err = s.space(tenant, p.layout.namespace); err != nil {
		return nil, kvwire.Errorf(kvwire.CodeBusy, "model_id", "%v", err)
	}
	chain, err := kvwire.NewChain(WindowTokens, kvwire.Scope{})
	if err != nil {
		return nil, err
	}
	if err := chain.AppendWire(wire); err != nil {
		return nil, err
	}
	for i := 0; i < len(wire); i += 4 {
		p.tokens = append(p.tokens, binary.LittleEndian.Uint32(wire[i:]))
	}
	for i, h := range chain.Hashes() {
		p.windows = append(p.windows, window{hash: h, start: i * WindowTokens, tokens: WindowTokens})
	}
	if h, n := chain.Tail(); n > 0 {
		p.windows = append(p.windows, window{hash: h, start: len(p.tokens) - n, tokens: n})
	}
	return p, nil
}

func (p *prompt) id(w *window) pageID {
	return pageID{kvwire.PageKey{Tenant: p.tenant, Namespace: p.layout.namespace, Hash: w.hash}, p.layout.form}
}

// view returns a window's bytes, checked, or nil.
func (p *prompt) view(w *window) *cache.View {
	v, _ := p.space.View(kvwire.Shard{Count: 1}, p.layout.form, w.hash, true)
	if v != nil && len(v.Bytes()) != p.model.PageBytes(w.tokens) {
		v.Close() // written by something that is not this model
		return nil
	}
	return v
}

// look finds out which windows are held here.
func (p *prompt) look() {
	for i := range p.windows {
		w := &p.windows[i]
		if w.found != nil || !p.space.Has(p.layout.form, w.hash) {
			continue
		}
		if f, ok := p.s.index.page(p.id(w)); ok {
			w.found = &f
			continue
		}
		if v := p.view(w); v != nil { // it came from a peer
			p.found(w, payloadHash(v.Bytes()))
			v.Close()
		}
	}
}

// found describes a window that is held and enters it into the index.
func (p *prompt) found(w *window, hash string) {
	f := describe(p.tenant, p.modelID, hash, p.model.Config(), w.start, w.tokens, int64(p.model.PageBytes(w.tokens)))
	p.s.index.add(p.id(w), f)
	w.found = &f
}

// fetch gets missing windows from peers. A window that nobody has does not
// keep those behind it from coming: a gap can be computed.
func (p *prompt) fetch(ctx context.Context) {
	if p.s.cfg.Fill == nil || p.complete() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, p.s.cfg.FillTimeout)
	defer cancel()
	missing := make(map[int][]kvwire.Hash) // by tokens: all pages of one fill are equally long
	for _, w := range p.windows {
		if w.found == nil {
			missing[w.tokens] = append(missing[w.tokens], w.hash)
		}
	}
	for tokens, hashes := range missing {
		for len(hashes) > 0 && ctx.Err() == nil {
			n, why := p.s.cfg.Fill.Fill(ctx, engineport.FillRequest{
				Space: p.space, Form: p.layout.form, Shards: 1, ObjectBytes: []int64{int64(p.model.PageBytes(tokens))}, Hashes: hashes,
			})
			n = min(max(n, 0), len(hashes))
			if n == len(hashes) || why == kvwire.ReasonDraining {
				break
			}
			hashes = hashes[n+1:]
		}
	}
	before := p.covered()
	p.look()
	p.s.fetched.Add(p.covered() - before)
}

// compute computes what is missing and stores it, and returns the number of
// tokens. It needs the engine.
func (p *prompt) compute(ctx context.Context) (int, error) {
	last := -1
	for i := range p.windows {
		if p.windows[i].found == nil {
			last = i
		}
	}
	kv := p.model.NewKV(WindowTokens)
	computed := 0
	for i := range p.windows[:last+1] {
		w := &p.windows[i]
		if w.found != nil {
			if v := p.view(w); v != nil {
				err := kv.LoadWindow(w.start, w.tokens, v.Bytes())
				v.Close()
				if err != nil {
					return computed, err
				}
				p.s.loaded.Add(w.tokens)
				continue
			}
			w.found = nil // it has left since, or is corrupt
		}
		if _, err := p.model.Prefill(ctx, kv, p.tokens[w.start:w.start+w.tokens]); err != nil {
			return computed, err
		}
		computed += w.tokens
		p.s.computed.Add(w.tokens)
		b := kv.Window(w.start, w.tokens)
		res, err := p.space.Put(kvwire.Shard{Count: 1}, p.layout.form, w.hash, b)
		if err != nil {
			return computed, fmt.Errorf("cannot store tokens %d to %d: %w", w.start, w.start+w.tokens-1, err)
		}
		switch {
		case res.Stored:
			p.found(w, payloadHash(b))
		case res.Exists: // somebody was first, and theirs are the bytes that are held
			p.look()
		}
	}
	return computed, nil
}

func (p *prompt) complete() bool { return p.covered() == len(p.tokens) }

func (p *prompt) covered() int {
	n := 0
	for _, w := range p.windows {
		if w.found != nil {
			n += w.tokens
		}
	}
	return n
}

func (p *prompt) result(prefilled bool) Reconstruction {
	r := Reconstruction{Fragments: []Fragment{}, Coverage: 1, Missing: [][2]int{}, Prefilled: prefilled, Prefetch: []string{}}
	for _, w := range p.windows {
		if w.found != nil {
			r.Fragments = append(r.Fragments, *w.found)
			continue
		}
		end := w.start + w.tokens - 1
		if n := len(r.Missing); n > 0 && r.Missing[n-1][1] == w.start-1 {
			r.Missing[n-1][1] = end
		} else {
			r.Missing = append(r.Missing, [2]int{w.start, end})
		}
	}
	if len(p.tokens) > 0 {
		r.Coverage = float64(p.covered()) / float64(len(p.tokens))
	}
	return r
}
