package layout

import (
	"slices"

	"membrane/kvwire"
)

// Descriptor is where every number of one shard's object lies: an engine's
// registration, checked and resolved. The zero value is no descriptor. It is
// not changed after it was made, and may be used by several goroutines.
type Descriptor struct {
	model      kvwire.ModelFacts
	wire       kvwire.Descriptor
	pageTokens int
	dtype      string
	// arrays are the numbers and then the scales in the order of the wire;
	// none where the blocks are opaque.
	arrays []array
	// gaps says that some bytes of the object belong to no array.
	gaps bool
}

// array is one array of an object. The address of an element is the base of its
// side and the sum of where its layer, head, token in the page and dim lead.
type array struct {
	per   string // "" for the numbers
	dtype string
	unit  int // bytes in an element
	sides []sided
	// perBlock says that the tokens of a block share an element.
	perBlock bool
}

// sided is one side, K or V, of an array.
type sided struct {
	base         int
	layer, head  digit
	token, inner walk
}

// Describe resolves what an engine registered. An object is pageTokens tokens,
// a whole number of blocks. An [*Error] or a [*kvwire.Error] names the field
// that is not allowed or not known.
func Describe(m kvwire.ModelFacts, w kvwire.Descriptor, pageTokens int) (Descriptor, error) {
	if err := m.Validate(); err != nil {
		return Descriptor{}, err
	}
	if err := w.Validate(m); err != nil {
		return Descriptor{}, err
	}
	if pageTokens < kvwire.MinPageTokens || pageTokens > kvwire.MaxPageTokens {
		return Descriptor{}, kvwire.Errorf(kvwire.CodeBadField, "page_tokens", "%d is not between %d and %d", pageTokens, kvwire.MinPageTokens, kvwire.MaxPageTokens)
	}
	if pageTokens%w.BlockTokens != 0 {
		return Descriptor{}, refuse("descriptor.block_tokens", w.BlockTokens, phrase(show(pageTokens)+" (page_tokens) divided by a whole number"))
	}
	if blocks := int64(pageTokens / w.BlockTokens); blocks > kvwire.MaxObject/w.BlockBytes {
		return Descriptor{}, kvwire.Errorf(kvwire.CodeTooLarge, "descriptor.block_bytes", "%d blocks of %d bytes are more than %d", blocks, w.BlockBytes, kvwire.MaxObject)
	}
	d := Descriptor{model: m, wire: w, pageTokens: pageTokens}
	d.wire.Axes, d.wire.Strides, d.wire.Scales = slices.Clone(w.Axes), slices.Clone(w.Strides), slices.Clone(w.Scales)
	if w.Group != "" {
		d.dtype = w.DType
		return d, nil
	}
	if err := d.resolve(); err != nil {
		return Descriptor{}, err
	}
	return d, nil
}

// Wire returns what the engine registered.
func (d Descriptor) Wire() kvwire.Descriptor { return d.wire }

// Model returns the facts of the model whose pages these are.
func (d Descriptor) Model() kvwire.ModelFacts { return d.model }

// Bytes returns the size of an object, a page of this shard, in bytes.
func (d Descriptor) Bytes() int {
	if d.pageTokens == 0 {
		return 0
	}
	return d.blocks() * int(d.wire.BlockBytes)
}

// Opaque reports whether the blocks belong to a group of a hybrid model. They
// can be read by an engine with the identical descriptor only.
func (d Descriptor) Opaque() bool { return d.wire.Group != "" }

func (d Descriptor) blocks() int { return d.pageTokens / d.wire.BlockTokens }

func (d Descriptor) layers() int { return d.wire.Layers[1] - d.wire.Layers[0] }

func (d Descriptor) heads() int { return d.wire.Heads[1] - d.wire.Heads[0] }

func (d Descriptor) sides() int {
	if d.model.MLA {
		return 1
	}
	return 2
}

// count returns how many there are along an axis of a block, in this shard.
func (d Descriptor) count(a axis) int {
	return [axes]int{d.layers(), d.sides(), d.heads(), d.wire.BlockTokens, d.model.HeadSize}[a]
}

// Canonical returns the descriptor of the same shard in the canonical form,
// axes and strides spelled out: layer, kv, head, token, dim, and scales after
// the numbers in the order layer, kv, head, token. A block there is the page,
// but for scales that the tokens of a block share: their blocks stay.
func (d Descriptor) Canonical() (Descriptor, error) {
	if d.Opaque() {
		return Descriptor{}, refuse("descriptor.group", d.wire.Group, phrase(`"" (blocks of a hybrid group are opaque)`))
	}
	w := d.wire
	w.Layout, w.DType, w.Packing, w.Axes, w.Strides = canonical, d.dtype, "", nil, nil
	if !slices.ContainsFunc(d.arrays, func(a array) bool { return a.perBlock }) {
		w.BlockTokens = d.pageTokens
	}
	w.Scales = slices.Clone(w.Scales)
	for i := range w.Scales {
		w.Scales[i] = kvwire.ScaleArray{Per: w.Scales[i].Per, DType: w.Scales[i].DType}
	}
	w, err := Sized(d.model, w)
	if err != nil {
		return Descriptor{}, err
	}
	stride := int64(d.arrays[0].unit)
	e, _ := entryNamed(canonical)
	c := Descriptor{model: d.model, wire: w, pageTokens: d.pageTokens}
	order := e.orderOf(d.model.MLA)
	w.Axes, w.Strides = make([]string, len(order)), make([]int64, len(order))
	for i, a := range slices.Backward(order) {
		w.Axes[i], w.Strides[i] = axisNames[a], stride
		stride *= int64(c.count(a))
	}
	return Describe(d.model, w, d.pageTokens)
}

// HeadWindow returns the KV heads that a tensor parallel rank holds: its part
// of them, or one head where there are more ranks than heads, which several
// ranks then hold alike. It is an [*Error] where heads and ranks do not divide
// each other. With MLA every rank holds the latent.
func HeadWindow(m kvwire.ModelFacts, tp, rank int) ([2]int, error) {
	switch h := m.KVHeads; {
	case tp < 1 || rank < 0 || rank >= tp:
		return [2]int{}, refuse("descriptor.tp_rank", rank, phrase("from 0 to below the size "+show(tp)))
	case m.MLA:
		return [2]int{0, h}, nil
	case h >= tp && h%tp == 0:
		return [2]int{rank * h / tp, (rank + 1) * h / tp}, nil
	case h < tp && tp%h == 0:
		first := rank * h / tp
		return [2]int{first, first + 1}, nil
	}
	return [2]int{}, refuse("model.kv_heads", m.KVHeads, phrase("a multiple or a divisor of descriptor.tp_size "+show(tp)))
}

// Ranks returns the descriptors of all tensor parallel ranks that share d's
// layers, d's own among them, by the rule of [HeadWindow]. It refuses a d that
// does not follow the rule and one whose axes give strides that depend on how
// many heads a rank holds.
func (d Descriptor) Ranks() ([]Descriptor, error) {
	all := make([]Descriptor, d.wire.TPSize)
	for rank := range all {
		heads, err := HeadWindow(d.model, d.wire.TPSize, rank)
		if err != nil {
			return nil, err
		}
		if rank == d.wire.TPRank && heads != d.wire.Heads {
			return nil, refuse("descriptor.heads", d.wire.Heads, heads)
		}
		w := d.wire
		w.TPRank, w.Heads = rank, heads
		if all[rank], err = Describe(d.model, w, d.pageTokens); err != nil {
			return nil, err
		}
	}
	return all, nil
}
