package engineport

import (
	"errors"
	"slices"
	"time"

	"membrane/cache"
	"membrane/engines/layout"
	"membrane/kvwire"
)

// translateStep is about how many bytes are fetched in another form before they
// are translated, so that no more than that lies in the arena twice.
const translateStep = 64 << 20

// complete extends a prefix by what can be had of the wanted pages that follow
// it: pages that are here in other forms, pages of peers in this engine's form,
// and pages of peers in other forms. It returns how many came from peers and why
// the next page is missing.
func (c *conn) complete(p *cache.Prefix, a ask, wanted []kvwire.Hash, why kvwire.Reason) (brought int, _ kvwire.Reason) {
	e := c.eng
	peers := a.flags&kvwire.MatchLocal == 0 && c.s.cfg.Fill != nil && a.deadline.After(c.arrived) // see deadline
	for {
		before := p.Pages()
		if why == kvwire.ReasonLayout || why == kvwire.ReasonIncomplete {
			why = c.translate(p, wanted, why, a.deadline)
		}
		if p.Pages() == len(wanted) {
			return brought, kvwire.ReasonNone
		}
		if !peers || why == kvwire.ReasonPinned || why == kvwire.ReasonDeadline || why == kvwire.ReasonDraining {
			return brought, why
		}
		local := why
		n, fetched := c.fill(p, wanted, why, a.deadline)
		brought += n
		if why = fetched; p.Pages() < len(wanted) && why != kvwire.ReasonPinned && why != kvwire.ReasonDeadline {
			n, why = c.fillOther(p, wanted, why, a.deadline)
			brought += n
		}
		if why == kvwire.ReasonAbsent && p.Pages() == before && local != kvwire.ReasonNone {
			why = local // nobody else has it either: what is wrong here says more
		}
		if p.Pages() == before || p.Pages() == len(wanted) || why != kvwire.ReasonNone && why != kvwire.ReasonAbsent {
			return brought, why
		}
		// Behind what peers had, there may be more here.
		_, next := e.space.Shards(e.form, wanted[p.Pages()])
		if next != kvwire.ReasonLayout && next != kvwire.ReasonIncomplete {
			return brought, kvwire.ReasonAbsent
		}
		why = next
	}
}

// by returns when to stop for the sake of a deadline.
func by(deadline time.Time) time.Time { return deadline.Add(-min(margin, time.Until(deadline)/4)) }

// room returns how many more pages the engine could lease at all.
func (c *conn) room(p *cache.Prefix) int {
	return max(0, int(c.s.cfg.Cache.Arena().Size()/4/c.eng.pageBytes)-p.Pages())
}

// fill gets the pages that follow the prefix from peers in this engine's form, as
// far as they could be leased at all, and extends it by them.
func (c *conn) fill(p *cache.Prefix, wanted []kvwire.Hash, why kvwire.Reason, deadline time.Time) (int, kvwire.Reason) {
	e := c.eng
	missing := wanted[p.Pages():]
	until := by(deadline)
	want := missing[:min(len(missing), c.room(p))]
	if len(want) == 0 {
		return 0, why
	}
	if !time.Now().Before(until) {
		return 0, kvwire.ReasonDeadline
	}
	if !guard.matchDeadline() {
		until = until.Add(time.Second)
	}
	ctx, stop := c.watch(until)
	defer stop()
	n, why := c.s.cfg.Fill.Fill(ctx, FillRequest{Space: e.space, Form: e.form, Shards: e.shards, ObjectBytes: e.objectBytes(), Hashes: want})
	n = min(max(n, 0), len(want))
	switch {
	case n == len(missing):
		why = kvwire.ReasonNone
	case n == len(want):
		why = kvwire.ReasonPinned
	case guard.missReason() && why == kvwire.ReasonNone:
		why = kvwire.ReasonAbsent
	}
	had := p.Pages()
	if gone := p.Extend(want[:n]); gone != kvwire.ReasonNone {
		why = gone
	}
	return p.Pages() - had, why
}

// fillOther gets the pages that follow the prefix from peers in other forms, some
// at a time, translates them and extends the prefix by them.
func (c *conn) fillOther(p *cache.Prefix, wanted []kvwire.Hash, why kvwire.Reason, deadline time.Time) (brought int, _ kvwire.Reason) {
	e := c.eng
	until := by(deadline)
	if e.reader.Err() != nil || c.s.cfg.PeerForms == nil || !time.Now().Before(until) {
		return 0, why
	}
	ctx, stop := c.watch(until)
	defer stop()
	c.s.cfg.Forms.Learn(e.space.Namespace(), c.s.cfg.PeerForms.Forms(ctx, e.space.Namespace()))
	recipes := e.reader.Recipes()
	step := max(1, int(translateStep/e.pageBytes))
	for i := 0; i < len(recipes) && p.Pages() < len(wanted); {
		had := p.Pages()
		want := wanted[had:]
		room := c.room(p) / 2 // each is here twice for a moment
		want = want[:min(len(want), step, max(room, 1))]
		if c.room(p) == 0 {
			return brought, kvwire.ReasonPinned
		}
		n, fetched := c.s.cfg.Fill.Fill(ctx, FillRequest{
			Space: e.space, Form: recipes[i].From, Shards: recipes[i].Shards, ObjectBytes: e.reader.SourceBytes(recipes[i].From), Hashes: want,
		})
		if n > 0 {
			// What stopped the translation comes before what stopped the fill.
			if stopped := c.translateUntil(p, wanted[:had+min(n, len(want))], kvwire.ReasonLayout, until); stopped != kvwire.ReasonNone {
				fetched = stopped
			}
		}
		got := p.Pages() - had
		brought += got
		switch {
		case fetched == kvwire.ReasonDeadline || fetched == kvwire.ReasonPinned || fetched == kvwire.ReasonCorrupt:
			return brought, fetched
		case got == 0: // nobody has it in this form
			if fetched != kvwire.ReasonNone && fetched != kvwire.ReasonAbsent {
				why = fetched
			}
			i++
		default:
			i = 0
		}
	}
	if p.Pages() == len(wanted) {
		why = kvwire.ReasonNone
	}
	return brought, why
}

// translate makes the pages that follow the prefix, and are here in other forms,
// in this engine's, as long as the deadline allows (zero: however long it
// takes), and extends the prefix by them.
func (c *conn) translate(p *cache.Prefix, wanted []kvwire.Hash, why kvwire.Reason, deadline time.Time) kvwire.Reason {
	until := time.Time{}
	if deadline.After(c.arrived) {
		until = by(deadline)
	}
	return c.translateUntil(p, wanted, why, until)
}

func (c *conn) translateUntil(p *cache.Prefix, wanted []kvwire.Hash, why kvwire.Reason, until time.Time) kvwire.Reason {
	e := c.eng
	sizes, recipes := e.reader.Sizes(), e.reader.Recipes()
	first := p.Pages()
	began, made := time.Now(), int64(0)
	for len(recipes) > 0 && p.Pages() < len(wanted) {
		at := p.Pages()
		if !until.IsZero() && !c.s.making.fits(time.Until(until), e.pageBytes) {
			why = kvwire.ReasonDeadline
			break
		}
		if c.room(p) == 0 {
			why = kvwire.ReasonPinned
			break
		}
		out, now := e.space.Convert(&c.bench, e.form, sizes, wanted[at], recipes)
		if why = now; why != kvwire.ReasonNone {
			break
		}
		c.s.count.converted(out)
		made += out.Bytes
		if why = p.Extend(wanted[at:]); p.Pages() == at {
			break // it left again, or the engine's share is used up
		}
		if out.Recipe != nil {
			p.Trust(at, at+1)
		}
	}
	if made > 0 {
		took := time.Since(began)
		c.s.count.translateSeconds.Add(took.Seconds())
		c.s.making.learn(took, made)
	}
	if at := p.Pages(); at < len(wanted) && (why == kvwire.ReasonLayout || why == kvwire.ReasonIncomplete) {
		c.s.count.untranslated.Inc()
		c.explain(wanted[at])
	}
	if first == p.Pages() && why == kvwire.ReasonNone {
		why = kvwire.ReasonAbsent
	}
	return why
}

// explain logs, once for each engine and form, why a page that is here in other
// forms is not made in this engine's.
func (c *conn) explain(h kvwire.Hash) {
	e := c.eng
	c.forms = e.space.Forms(c.forms[:0], h)
	for _, form := range c.forms {
		err := e.reader.Refused(form)
		if err == nil {
			continue
		}
		e.mu.Lock()
		_, known := e.named[form]
		if known = known || len(e.named) >= maxNamed; !known {
			e.named[form] = err.Error()
		}
		e.mu.Unlock()
		if !known {
			c.s.cfg.Log.Warn().Err(err).Str("engine", e.key.name).Str("form", e.form.String()).Str("page_form", form.String()).
				Msg("pages in another layout cannot be translated for this engine: they count as missed for the reason layout")
		}
	}
}

// maxNamed bounds how many forms an engine remembers to have named.
const maxNamed = 2 * kvwire.MaxForms

// problem says what keeps an engine from pages of its namespace, "" if nothing
// that is known does.
func (e *engine) problem() string {
	if odd := e.odd.Load(); odd != nil {
		return odd.Error()
	}
	if err := e.reader.Err(); err != nil {
		return "only pages of the same layout are read: " + err.Error()
	}
	return ""
}

// checkShape notes what a rank that registers says of its object, and that the
// engine is not to be served if it holds other heads or layers than its place
// says. It needs Server.mu.
func (c *conn) checkShape(reg kvwire.Register, e *engine, object int64) {
	if reg.Role != kvwire.RoleScheduler {
		e.sizes[c.shard.Index].Store(object)
	}
	err := layout.CheckWindows(reg.Model, reg.Descriptor)
	var odd *layout.Error
	if !errors.As(err, &odd) {
		return
	}
	e.odd.Store(odd)
	c.s.cfg.Log.Warn().Err(odd).Str("engine", e.key.name).
		Msg("an engine holds other heads or layers than its rank says: its pages are neither served nor stored, for the reason layout")
}

// objectBytes returns how long each shard's object is, nil where that is not
// known of all.
func (e *engine) objectBytes() []int64 {
	sizes := make([]int64, len(e.sizes))
	for i := range e.sizes {
		if sizes[i] = e.sizes[i].Load(); sizes[i] == 0 {
			return nil
		}
	}
	return sizes
}

// fit guards invariant 1: an engine is given objects of its own size only.
func (e *engine) fit(locs []cache.Location) bool {
	if !guard.objectSize() {
		return true
	}
	for shard := range e.sizes {
		want := e.sizes[shard].Load()
		for i := shard; want > 0 && i < len(locs); i += len(e.sizes) {
			if locs[i].Length != want {
				return false
			}
		}
	}
	return true
}

// refine says more exactly why a page that is nowhere is missing: the same
// tokens may be here, computed by a model of other facts or in pages of another
// size.
func (c *conn) refine(why kvwire.Reason, missing []kvwire.Hash, others []otherSize, page int) kvwire.Reason {
	if why != kvwire.ReasonAbsent || len(missing) == 0 {
		return why
	}
	e := c.eng
	if e.space.Elsewhere(missing[0]) {
		return kvwire.ReasonNamespace
	}
	for _, o := range others {
		if page > 0 {
			break // some are here in this size
		}
		space := c.s.cfg.Cache.Lookup(e.key.tenant, e.facts.Namespace(o.pageTokens))
		if space != nil && len(space.Forms(nil, o.first)) > 0 {
			return kvwire.ReasonNamespace
		}
	}
	return why
}

// otherSize is the hash of a prompt's first page in the size of a namespace here
// that differs from the engine's in nothing else.
type otherSize struct {
	pageTokens int
	first      kvwire.Hash
}

// sizing is the beginning of a prompt that is hashed in another size.
type sizing struct {
	pageTokens int
	chain      *kvwire.Chain
}

// otherSizes begins to hash a prompt in other sizes, for [conn.refine].
func (e *engine) otherSizes(scope kvwire.Scope) []sizing {
	var all []sizing
	for _, n := range e.reader.Siblings() {
		if chain, err := kvwire.NewChain(n, scope); err == nil {
			all = append(all, sizing{n, chain})
		}
	}
	return all
}

// feedOthers goes on with the next tokens, in wire form, until each has a page.
// It returns those that have none yet.
func (ch *chain) feedOthers(all []sizing, b []byte) []sizing {
	return slices.DeleteFunc(all, func(s sizing) bool {
		left := (s.pageTokens - s.chain.Tokens()) * 4
		if s.chain.AppendWire(b[:min(left, len(b))]) != nil {
			return true
		}
		if s.chain.Tokens() < s.pageTokens {
			return false
		}
		ch.others = append(ch.others, otherSize{s.pageTokens, s.chain.Hashes()[0]})
		return true
	})
}
