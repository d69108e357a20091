package forms

import (
	"fmt"
	"slices"
	"sync"

	"membrane/cache"
	"membrane/engines/layout"
	"membrane/kvwire"
)

// Reader is the form that an engine of this node reads.
type Reader struct {
	g      *Registry
	family *family // nil: there are too many
	known  *known  // nil: there are too many
	form   kvwire.Form
	layout string
	shards []layout.Descriptor
	err    error // why nothing can be made in this form

	mu       sync.Mutex
	version  uint64
	recipes  []*cache.Recipe
	refused  map[kvwire.Form]error
	siblings []int
	families uint64
}

// Close notes that the engine is gone.
func (r *Reader) Close() {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if r.known != nil {
		r.known.attached--
		r.known = nil
	}
}

// Sizes returns how long the objects of a page are in this form, in bytes, shard
// by shard; nil where the layout is not understood.
func (r *Reader) Sizes() []int64 {
	if len(r.shards) == 0 {
		return nil
	}
	return sizesOf(r.shards)
}

// Err says why pages in other forms cannot be made in this one, nil if they can.
func (r *Reader) Err() error { return r.err }

// Recipes returns how a page is made in this form, one recipe for each other
// form that is known and can be translated. The slice is not to be changed.
func (r *Reader) Recipes() []*cache.Recipe {
	if r.err != nil || r.family == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refresh()
	return r.recipes
}

// Refused says by name why a page in the given form is not made in this one, nil
// if it is.
func (r *Reader) Refused(from kvwire.Form) error {
	switch {
	case from == r.form:
		return nil
	case r.err != nil:
		return fmt.Errorf("layout %q is not translated: %w", r.layout, r.err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refresh()
	if err, ok := r.refused[from]; ok {
		return err
	}
	if slices.ContainsFunc(r.recipes, func(c *cache.Recipe) bool { return c.From == from }) {
		return nil
	}
	return fmt.Errorf("no engine that writes it has registered here or at a peer")
}

// refresh makes the recipes anew if forms became known. It needs r.mu.
func (r *Reader) refresh() {
	r.g.mu.RLock()
	all, version := r.family.known, r.family.version
	r.g.mu.RUnlock()
	if r.refused != nil && version == r.version {
		return
	}
	r.version, r.recipes, r.refused = version, nil, make(map[kvwire.Form]error)
	for _, k := range all {
		if k.form == r.form {
			continue
		}
		c, err := r.recipe(k)
		if err != nil {
			r.refused[k.form] = fmt.Errorf("layout %q, tensor parallel size %d: %w", k.wire.Layout, k.wire.TPSize, err)
			continue
		}
		r.recipes = append(r.recipes, c)
	}
}

// recipe plans every shard of this form out of those of another.
func (r *Reader) recipe(k *known) (*cache.Recipe, error) {
	if k.err != nil {
		return nil, k.err
	}
	plans := make([]*layout.Plan, len(r.shards))
	var needs []int
	for i, to := range r.shards {
		p, err := layout.NewPlan(to, k.shards...)
		if err != nil {
			return nil, err
		}
		plans[i] = p
		needs = append(needs, p.Needs()...)
	}
	slices.Sort(needs)
	needs = slices.Compact(needs)
	c := &cache.Recipe{From: k.form, Shards: len(k.shards), Needs: needs}
	for _, n := range needs {
		c.Bytes = append(c.Bytes, int64(k.shards[n].Bytes()))
	}
	// Where each plan finds its sources among those that are read.
	takes := make([][]int, len(plans))
	for i, p := range plans {
		for _, n := range p.Needs() {
			at, _ := slices.BinarySearch(needs, n)
			takes[i] = append(takes[i], at)
		}
	}
	c.Make = func(dst, src [][]byte) error {
		var few [16][]byte
		for i, p := range plans {
			srcs := few[:0]
			for _, at := range takes[i] {
				srcs = append(srcs, src[at])
			}
			if err := p.Run(dst[i], srcs...); err != nil {
				return err
			}
		}
		return nil
	}
	c.Drop = func() bool {
		r.g.mu.RLock()
		defer r.g.mu.RUnlock()
		return k.attached == 0
	}
	return c, nil
}

// SourceBytes returns how long the objects of a page are in the form that a
// recipe reads, in bytes, shard by shard; nil if the form is not known.
func (r *Reader) SourceBytes(from kvwire.Form) []int64 {
	r.g.mu.RLock()
	defer r.g.mu.RUnlock()
	if r.family == nil {
		return nil
	}
	k := r.family.of(from)
	if k == nil || k.err != nil {
		return nil
	}
	return sizesOf(k.shards)
}

// Siblings returns the page sizes, in tokens, of the namespaces here that differ
// from this one in nothing else. The slice is not to be changed.
func (r *Reader) Siblings() []int {
	if r.family == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.g.mu.RLock()
	defer r.g.mu.RUnlock()
	if r.families == r.g.version {
		return r.siblings
	}
	r.families, r.siblings = r.g.version, nil
	for _, f := range r.g.families {
		if f.facts == r.family.facts && f.pageTokens != r.family.pageTokens && len(r.siblings) < maxSiblings {
			r.siblings = append(r.siblings, f.pageTokens)
		}
	}
	return r.siblings
}

// maxSiblings bounds what a long prompt costs that is hashed in other sizes.
const maxSiblings = 8

func sizesOf(shards []layout.Descriptor) []int64 {
	sizes := make([]int64, len(shards))
	for i := range shards {
		sizes[i] = int64(shards[i].Bytes())
	}
	return sizes
}
