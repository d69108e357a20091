package layout

import (
	"fmt"
	"slices"
	"strings"

	"membrane/kvwire"
)

// Plan makes a reader's object out of writers' objects of the same page. It is
// not changed after it was made, and may be used by several goroutines.
type Plan struct {
	size  int
	needs []int
	sizes []int // of the sources, in the order of needs
	clear bool  // the destination has bytes that no element fills
	nests []nest
}

// NewPlan works out how the page of a reader's shard is made of those of
// writers' shards. from are shards of one page, in any number and order: only
// those that are needed are used, see [Plan.Needs]. An [*Error] names what
// cannot be translated; nothing is converted or guessed.
func NewPlan(to Descriptor, from ...Descriptor) (*Plan, error) {
	p, err := newPlan(to, from)
	if err != nil {
		return nil, fmt.Errorf("cannot translate to %s: %w", show(to.wire.Layout), err)
	}
	return p, nil
}

func newPlan(to Descriptor, from []Descriptor) (*Plan, error) {
	if to.pageTokens == 0 {
		return nil, refuse("descriptor", phrase("empty"), phrase("one that Describe returned"))
	}
	if len(from) == 0 || len(from) > kvwire.MaxShards {
		return nil, refuse("shards", len(from), phrase("from 1 to "+show(kvwire.MaxShards)))
	}
	for _, w := range from {
		if err := same(w, to); err != nil {
			return nil, err
		}
	}
	p := &Plan{size: to.Bytes(), clear: to.gaps}
	if to.Opaque() {
		return p, p.whole(to, from)
	}
	parts, err := cover(to, from)
	if err != nil {
		return nil, err
	}
	for _, part := range parts {
		w := from[part.writer]
		at := slices.Index(p.needs, part.writer)
		if at < 0 {
			at = len(p.needs)
			p.needs, p.sizes = append(p.needs, part.writer), append(p.sizes, w.Bytes())
		}
		for i := range to.arrays {
			if err := p.add(at, part, w, to, i); err != nil {
				return nil, err
			}
		}
	}
	return p, nil
}

// same refuses a writer whose numbers mean something else than the reader's.
func same(w, to Descriptor) error {
	a, b := w.model, to.model
	for _, f := range []struct {
		name       string
		have, want any
	}{
		{"page_tokens", w.pageTokens, to.pageTokens},
		{"model.weights_id", a.WeightsID, b.WeightsID},
		{"model.dtype", a.DType, b.DType},
		{"model.quantization", a.Quantization, b.Quantization},
		{"model.scales", a.Scales, b.Scales},
		{"model.rope", a.RoPE, b.RoPE},
		{"model.layers", a.Layers, b.Layers},
		{"model.kv_heads", a.KVHeads, b.KVHeads},
		{"model.head_size", a.HeadSize, b.HeadSize},
		{"model.mla", a.MLA, b.MLA},
		{"model.kv_epoch", a.KVEpoch, b.KVEpoch},
		{"descriptor.group", w.wire.Group, to.wire.Group},
		{"descriptor.dtype", w.dtype, to.dtype},
	} {
		if f.have != f.want {
			return refuse(f.name, f.have, f.want)
		}
	}
	if to.Opaque() {
		return nil
	}
	kinds := func(d Descriptor) string {
		var all []string
		for _, a := range d.arrays[1:] {
			all = append(all, a.per+" "+a.dtype)
		}
		return "[" + strings.Join(slices.Sorted(slices.Values(all)), ", ") + "]"
	}
	if have, want := kinds(w), kinds(to); have != want {
		return refuse("descriptor.scales", phrase(have), phrase(want))
	}
	return nil
}

// whole plans the copy of an opaque object, from the shard that is the same in
// every respect.
func (p *Plan) whole(to Descriptor, from []Descriptor) error {
	var first error
	for i, w := range from {
		err := identical(w.wire, to.wire)
		if err == nil {
			p.needs, p.sizes = []int{i}, []int{p.size}
			p.nests = []nest{newNest(0, 0, 0, p.size, nil)}
			return nil
		}
		if first == nil {
			first = err
		}
	}
	return first
}

func identical(a, b kvwire.Descriptor) error {
	for _, f := range []struct {
		name       string
		have, want any
	}{
		{"layout", a.Layout, b.Layout},
		{"dtype", a.DType, b.DType},
		{"packing", a.Packing, b.Packing},
		{"block_tokens", a.BlockTokens, b.BlockTokens},
		{"block_bytes", a.BlockBytes, b.BlockBytes},
		{"axes", fmt.Sprint(a.Axes), fmt.Sprint(b.Axes)},
		{"strides", fmt.Sprint(a.Strides), fmt.Sprint(b.Strides)},
		{"scales", fmt.Sprint(a.Scales), fmt.Sprint(b.Scales)},
		{"tp_size", a.TPSize, b.TPSize},
		{"pp_size", a.PPSize, b.PPSize},
		{"tp_rank", a.TPRank, b.TPRank},
		{"pp_rank", a.PPRank, b.PPRank},
		{"layers", a.Layers, b.Layers},
		{"heads", a.Heads, b.Heads},
	} {
		if f.have != f.want {
			return refuse("descriptor."+f.name, f.have, phrase(show(f.want)+" (blocks of the group "+show(b.Group)+" are opaque)"))
		}
	}
	return nil
}

// add plans one part of one array.
func (p *Plan) add(at int, part part, w, to Descriptor, i int) error {
	dst := to.arrays[i]
	src := w.arrays[slices.IndexFunc(w.arrays, func(a array) bool { return a.per == dst.per })]
	if dst.perBlock && w.wire.BlockTokens != to.wire.BlockTokens {
		return refuse("descriptor.block_tokens", w.wire.BlockTokens, phrase(show(to.wire.BlockTokens)+" as the tokens of a block share scales by "+dst.per))
	}
	layers, heads := part.layers[1]-part.layers[0], part.heads[1]-part.heads[0]
	if dst.per == kvwire.PerTensor {
		if heads != to.heads() {
			return refuse("descriptor.heads", w.wire.Heads, phrase("all of "+show(to.wire.Heads)+" as they share scales by "+dst.per))
		}
		heads = 1
	}
	var sides []paired
	for s := range dst.sides {
		from, into := src.sides[s], dst.sides[s]
		one := paired{
			src: from.base + (part.layers[0]-w.wire.Layers[0])*from.layer.stride + (part.heads[0]-w.wire.Heads[0])*from.head.stride,
			dst: into.base + (part.layers[0]-to.wire.Layers[0])*into.layer.stride + (part.heads[0]-to.wire.Heads[0])*into.head.stride,
			pairs: []pair{
				{layers, from.layer.stride, into.layer.stride},
				{heads, from.head.stride, into.head.stride},
			},
		}
		var ok bool
		if one.pairs, ok = refine(one.pairs, slices.Clone(from.token), slices.Clone(into.token)); !ok {
			return refuse("descriptor.block_tokens", w.wire.BlockTokens, phrase("a multiple or a divisor of "+show(to.wire.BlockTokens)))
		}
		if one.pairs, ok = refine(one.pairs, slices.Clone(from.inner), slices.Clone(into.inner)); !ok {
			return refuse("descriptor.packing", w.wire.Packing, to.wire.Packing)
		}
		sides = append(sides, one)
	}
	for _, s := range merged(sides) {
		p.nests = append(p.nests, newNest(at, s.src, s.dst, dst.unit, s.pairs))
	}
	return nil
}

// paired is how one side's elements move.
type paired struct {
	src, dst int
	pairs    []pair
}

// merged makes one of K and V where both move alike.
func merged(sides []paired) []paired {
	if len(sides) != 2 || !slices.Equal(sides[0].pairs, sides[1].pairs) {
		return sides
	}
	k, v := sides[0], sides[1]
	if v.src < k.src || v.dst < k.dst {
		return sides
	}
	k.pairs = append(k.pairs, pair{2, v.src - k.src, v.dst - k.dst})
	return []paired{k}
}

// Bytes returns the size of the destination.
func (p *Plan) Bytes() int { return p.size }

// Needs returns which of the writers' shards are read, as indices of what
// [NewPlan] was given, in the order in which [Plan.Run] takes them.
func (p *Plan) Needs() []int { return slices.Clone(p.needs) }

// Run makes the reader's object in dst from the objects of the shards that
// [Plan.Needs] names, which dst must not overlap. It allocates nothing. It is
// an error, before anything is written, if a size is not that of its
// descriptor.
func (p *Plan) Run(dst []byte, srcs ...[]byte) error {
	if len(srcs) != len(p.sizes) {
		return fmt.Errorf("cannot translate %d objects: the plan takes %d", len(srcs), len(p.sizes))
	}
	if len(dst) != p.size {
		return fmt.Errorf("cannot translate into %d bytes: the object has %d", len(dst), p.size)
	}
	for i, s := range srcs {
		if len(s) != p.sizes[i] {
			return fmt.Errorf("cannot translate object %d of %d bytes: it has %d", i, len(s), p.sizes[i])
		}
	}
	if p.clear {
		clear(dst)
	}
	for i := range p.nests {
		n := &p.nests[i]
		n.run(dst, srcs[n.source])
	}
	return nil
}

// String says what the plan does, for logs and tests: how the bytes of each
// nest move, and in pieces of how many bytes.
func (p *Plan) String() string {
	var b []string
	for _, n := range p.nests {
		b = append(b, n.String())
	}
	return strings.Join(b, "; ")
}
