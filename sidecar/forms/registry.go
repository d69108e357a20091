package forms

import (
	"fmt"
	"slices"
	"sync"

	"membrane/engines/layout"
	"membrane/kvwire"
)

// maxFamilies bounds the namespaces whose forms are known.
const maxFamilies = 4096

// Registry is the forms that are known of each namespace.
type Registry struct {
	mu       sync.RWMutex
	families map[kvwire.Namespace]*family
	version  uint64 // counts new families
}

// family is what is known of one namespace. It is guarded by Registry.mu.
type family struct {
	ns         kvwire.Namespace
	facts      kvwire.ModelFacts
	pageTokens int
	known      []*known // at most kvwire.MaxForms
	version    uint64   // counts changes
}

// known is one form.
type known struct {
	form     kvwire.Form
	wire     kvwire.Descriptor // of some shard
	shards   []layout.Descriptor
	err      error // why shards is empty
	attached int   // readers here
}

// NewRegistry returns a registry that knows no form.
func NewRegistry() *Registry { return &Registry{families: make(map[kvwire.Namespace]*family)} }

// Attach enters what an engine of this node has registered and returns how its
// pages are made of those in other forms. The reader is to be closed when the
// engine is gone; its form stays known, as its pages may stay.
func (g *Registry) Attach(facts kvwire.ModelFacts, pageTokens int, d kvwire.Descriptor) *Reader {
	r := &Reader{g: g, form: d.Form(), layout: d.Layout}
	shards, err := shardsOf(facts, pageTokens, d)
	r.shards, r.err = shards, err
	g.mu.Lock()
	defer g.mu.Unlock()
	ns := facts.Namespace(pageTokens)
	f := g.families[ns]
	if f == nil {
		if len(g.families) >= maxFamilies {
			r.err = fmt.Errorf("forms of %d namespaces are known, which is the most", maxFamilies)
			return r
		}
		f = &family{ns: ns, facts: facts, pageTokens: pageTokens}
		g.families[ns] = f
		g.version++
	}
	r.family = f
	k := f.of(r.form)
	if k != nil && k.attached == 0 { // what a peer said, or an engine that is gone
		f.known = slices.DeleteFunc(slices.Clone(f.known), func(o *known) bool { return o == k })
		k = nil
	}
	if k == nil && len(f.known) >= kvwire.MaxForms {
		// One that no engine here has makes room.
		if i := slices.IndexFunc(f.known, func(k *known) bool { return k.attached == 0 }); i >= 0 {
			f.known = slices.Delete(slices.Clone(f.known), i, i+1)
		}
	}
	if k == nil && len(f.known) < kvwire.MaxForms {
		k = &known{form: r.form, wire: d, shards: shards, err: err}
		f.add(k)
	}
	if k != nil {
		k.attached++
		r.known = k
	}
	return r
}

// Learn enters what peers say of a namespace, as far as it is new and can be
// true, if an engine here is or was of that namespace.
func (g *Registry) Learn(ns kvwire.Namespace, ds []kvwire.Descriptor) {
	for _, d := range ds {
		form := d.Form()
		g.mu.RLock()
		f := g.families[ns]
		enough := f == nil || len(f.known) >= kvwire.MaxForms || f.of(form) != nil
		g.mu.RUnlock()
		if enough {
			continue
		}
		shards, err := shardsOf(f.facts, f.pageTokens, d)
		g.mu.Lock()
		if f.of(form) == nil && len(f.known) < kvwire.MaxForms {
			f.add(&known{form: form, wire: d, shards: shards, err: err})
		}
		g.mu.Unlock()
	}
}

// Descriptors returns one descriptor of each form that is known of a namespace.
func (g *Registry) Descriptors(ns kvwire.Namespace) []kvwire.Descriptor {
	g.mu.RLock()
	defer g.mu.RUnlock()
	f := g.families[ns]
	if f == nil {
		return nil
	}
	ds := make([]kvwire.Descriptor, len(f.known))
	for i, k := range f.known {
		ds[i] = k.wire
	}
	return ds
}

// of needs Registry.mu.
func (f *family) of(form kvwire.Form) *known {
	i := slices.IndexFunc(f.known, func(k *known) bool { return k.form == form })
	if i < 0 {
		return nil
	}
	return f.known[i]
}

// add needs Registry.mu. Readers hold the old slice.
func (f *family) add(k *known) {
	f.known = append(slices.Clip(f.known), k)
	f.version++
}

// shardsOf resolves all shards of the form that d is one of.
func shardsOf(facts kvwire.ModelFacts, pageTokens int, d kvwire.Descriptor) ([]layout.Descriptor, error) {
	one, err := layout.Describe(facts, d, pageTokens)
	if err != nil {
		return nil, err
	}
	if one.Opaque() {
		return nil, fmt.Errorf("blocks of the group %q are opaque", d.Group)
	}
	return one.Shards()
}
