package disagg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/mesh"
)

// whole is the shard of a backend's page: the built-in one has no ranks.
var whole = kvwire.Shard{Count: 1}

// prompt is one prompt's pages in a tenant's space.
type prompt struct {
	s      *Service
	tenant string
	model  Model
	space  *cache.Space
	form   kvwire.Form
	handle kvwire.Hash
	tokens []uint32
	pages  []page
}

type page struct {
	hash   kvwire.Hash
	start  int
	tokens int
	held   bool   // when it was last looked at
	pin    uint64 // 0: not pinned
}

// newPrompt names the pages of a prompt. wire is its tokens, four bytes each.
func (s *Service) newPrompt(tenant string, model Model, modelID string, wire []byte) (*prompt, error) {
	ns, form, pageTokens := model.Layout()
	m := kvwire.Manifest{Namespace: ns, PageTokens: pageTokens, Model: modelID, Tokens: wire}
	hashes, handle, err := m.Check()
	if err != nil {
		return nil, known(err)
	}
	space, err := model.Space(tenant)
	if err != nil {
		return nil, known(err)
	}
	p := &prompt{s: s, tenant: tenant, model: model, space: space, form: form, handle: handle}
	p.tokens = make([]uint32, len(wire)/4)
	for i := range p.tokens {
		p.tokens[i] = binary.LittleEndian.Uint32(wire[4*i:])
	}
	for i, h := range hashes {
		p.pages = append(p.pages, page{hash: h, start: i * pageTokens, tokens: min(pageTokens, len(p.tokens)-i*pageTokens)})
	}
	return p, nil
}

func (p *prompt) id() handleID { return handleID{p.tenant, p.handle} }

// look finds out which pages are held here and returns the tokens of those.
func (p *prompt) look() (tokens int) {
	for i := range p.pages {
		g := &p.pages[i]
		if g.held = p.space.Has(p.form, g.hash); g.held {
			tokens += g.tokens
		}
	}
	return tokens
}

// leading returns how many tokens from the first on are held.
func (p *prompt) leading() (tokens int) {
	for _, g := range p.pages {
		if !g.held {
			break
		}
		tokens += g.tokens
	}
	return tokens
}

// complete reports whether all pages from one on are held.
func (p *prompt) complete(from int) bool {
	return !slices.ContainsFunc(p.pages[from:], func(g page) bool { return !g.held })
}

// fetch gets pages that are missing from peers, from a node that is known to
// hold them or whoever lists them, and returns how many tokens came.
func (p *prompt) fetch(ctx context.Context, from string) (tokens int) {
	if p.s.cfg.Peers == nil {
		return 0
	}
	missing := make(map[int][]kvwire.Hash) // by tokens: all pages of one fill are equally long
	held := 0
	for _, g := range p.pages {
		if g.held {
			held += g.tokens
		} else {
			missing[g.tokens] = append(missing[g.tokens], g.hash)
		}
	}
	if len(missing) == 0 {
		return 0
	}
	for n, hashes := range missing {
		size := []int64{int64(p.model.PageBytes(n))}
		for len(hashes) > 0 && ctx.Err() == nil {
			got, why := p.s.cfg.Peers.Fill(ctx, mesh.FillRequest{Space: p.space, Form: p.form, Shards: 1, ObjectBytes: size, Hashes: hashes, From: from})
			if got = min(max(got, 0), len(hashes)); got == len(hashes) || why == kvwire.ReasonDraining {
				break
			}
			hashes = hashes[got+1:] // a page that nobody has does not keep those behind it
		}
	}
	return p.look() - held
}

// errUnpinned is a page that cannot be kept now.
var errUnpinned = errors.New("page cannot be pinned")

// pinHeld pins the pages that are held and not pinned yet.
func (p *prompt) pinHeld() error {
	for i := range p.pages {
		if g := &p.pages[i]; g.held && g.pin == 0 {
			if err := p.pin(g); err != nil {
				return err
			}
		}
	}
	return nil
}

// pin keeps one page. A page that has left meanwhile is held no more, which is
// no error.
func (p *prompt) pin(g *page) error {
	pin, why, err := p.space.Pin(p.form, []kvwire.Hash{g.hash}, p.s.cfg.TTL)
	switch {
	case err != nil:
		return err
	case pin.ID != 0:
		g.pin = pin.ID
		if !guard.handover() {
			p.s.handles.unpin(pin.ID)
		}
	case why == kvwire.ReasonPinned:
		return fmt.Errorf("%w: %s", errUnpinned, why)
	default:
		g.held = false
	}
	return nil
}

// unpin lets go of all pages.
func (p *prompt) unpin() {
	for i := range p.pages {
		p.drop(&p.pages[i])
	}
}

func (p *prompt) drop(g *page) {
	if g.pin != 0 {
		p.s.handles.unpin(g.pin)
		g.pin = 0
	}
}

func (p *prompt) pins() (out []uint64) {
	for _, g := range p.pages {
		if g.pin != 0 {
			out = append(out, g.pin)
		}
	}
	return out
}

// load appends a page that is held to the sequence, and reports false when it
// is not here any more or has not the bytes that it should.
func (p *prompt) load(seq Sequence, g *page) (bool, error) {
	v, _ := p.space.View(whole, p.form, g.hash, guard.page())
	if v == nil {
		return false, nil
	}
	defer v.Close()
	if len(v.Bytes()) != p.model.PageBytes(g.tokens) {
		return false, nil // written by something that is not this model
	}
	return true, seq.Load(g.tokens, v.Bytes())
}

// work brings the whole prompt into the sequence: pages that are here are
// loaded, the others are computed behind what precedes them and stored. State
// is that behind the last token, nil if the last page was loaded. With pin,
// each page is pinned as soon as it is here, so that a long prompt does not push
// out its own beginning. Those before page from are in the sequence already.
func (p *prompt) work(ctx context.Context, seq Sequence, from int, pin bool) (computed int, state []byte, err error) {
	for i := from; i < len(p.pages); i++ {
		g := &p.pages[i]
		state = nil
		if g.held {
			ok, err := p.load(seq, g)
			if err != nil {
				return computed, nil, err
			}
			if ok {
				continue
			}
			g.held = false
			p.drop(g)
		}
		if state, err = seq.Compute(ctx, p.tokens[g.start:g.start+g.tokens]); err != nil {
			return computed, nil, err
		}
		computed += g.tokens
		if err := p.store(seq, g, pin); err != nil {
			return computed, nil, err
		}
	}
	return computed, state, nil
}

// store keeps a page that was computed. Without pin, a page that finds no room
// is no error: the sequence has it.
func (p *prompt) store(seq Sequence, g *page, pin bool) error {
	b := seq.Page(g.start, g.tokens)
	res, err := p.space.Put(whole, p.form, g.hash, b)
	if err != nil {
		return err
	}
	g.held = res.Stored || res.Exists
	if res.Stored {
		p.model.Stored(p.tenant, g.hash, g.start, g.tokens, b)
	}
	if !pin {
		return nil
	}
	if g.held {
		if err := p.pin(g); err != nil {
			return err
		}
	}
	if g.pin == 0 {
		return busy(time.Second, "the cache has no room for tokens %d to %d of the prompt: %s", g.start, g.start+g.tokens-1, res.Reason)
	}
	return nil
}
