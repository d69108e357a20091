package layout

import (
	"cmp"
	"math/bits"
	"slices"

	"membrane/kvwire"
)

// Sized returns w with the BlockBytes that its layout, packing and scales take,
// for the given model. The layout must be one that is known by name.
func Sized(m kvwire.ModelFacts, w kvwire.Descriptor) (kvwire.Descriptor, error) {
	w.BlockBytes = 1
	if err := m.Validate(); err != nil {
		return w, err
	}
	if err := w.Validate(m); err != nil {
		return w, err
	}
	d := Descriptor{model: m, wire: w}
	_, unit, err := dtypeOf(m, w.DType)
	if err != nil {
		return w, err
	}
	n, err := d.size(unit, []axis{layer, side, head, token, dim})
	if err != nil {
		return w, err
	}
	for _, s := range w.Scales {
		if len(s.Axes) > 0 {
			return w, refuse("descriptor.scales.axes", phrase("given"), phrase("left out where the size is asked for"))
		}
		size, ok := dtypes[s.DType]
		if !ok {
			return w, refuse("descriptor.scales.dtype", s.DType, phrase("one of "+names(dtypes)))
		}
		more, err := d.size(size, scaleAxes[s.Per])
		if err != nil {
			return w, err
		}
		n += more
	}
	w.BlockBytes = n
	return w, w.Validate(m)
}

// size returns the bytes of a dense array over the given axes of a block.
func (d Descriptor) size(unit int, over []axis) (int64, error) {
	n := uint64(unit)
	for _, a := range over {
		high, low := bits.Mul64(n, uint64(d.count(a)))
		if high != 0 || low > kvwire.MaxObject {
			return 0, kvwire.Errorf(kvwire.CodeTooLarge, "descriptor.block_bytes", "the axes up to %s take more than %d bytes", axisNames[a], kvwire.MaxObject)
		}
		n = low
	}
	return int64(n), nil
}

// resolve works out the arrays.
func (d *Descriptor) resolve() error {
	if d.model.MLA && d.model.KVHeads != 1 {
		return refuse("model.kv_heads", d.model.KVHeads, phrase("1 with MLA: head_size is that of the latent"))
	}
	var unit int
	var err error
	if d.dtype, unit, err = dtypeOf(d.model, d.wire.DType); err != nil {
		return err
	}
	numbers, used, err := d.numbers(unit)
	if err != nil {
		return err
	}
	d.arrays = append(d.arrays, numbers)
	spans := []span{{0, used}}
	for _, s := range d.wire.Scales {
		a, where, err := d.scales(s, spans[len(spans)-1].end)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(d.arrays, func(b array) bool { return b.per == a.per }) {
			return refuse("descriptor.scales.per", a.per, phrase("given once"))
		}
		if end, between := d.between(numbers, a, where); between {
			spans[0].end = max(spans[0].end, end)
		} else {
			spans = append(spans, where)
		}
		d.arrays = append(d.arrays, a)
	}
	return d.checkSpans(spans)
}

// span is a range of bytes of a block.
type span struct{ begin, end int64 }

// checkSpans sees to it that arrays lie apart and inside the block, and that a
// layout that is known by name takes all of it.
func (d *Descriptor) checkSpans(spans []span) error {
	dense := int64(0)
	for _, a := range d.arrays {
		n, err := d.size(a.unit, a.over())
		if err != nil {
			return err
		}
		dense += n
	}
	_, known := entryNamed(d.wire.Layout)
	placed := slices.ContainsFunc(d.wire.Scales, func(s kvwire.ScaleArray) bool { return len(s.Axes) > 0 })
	if known && !placed && dense != d.wire.BlockBytes {
		return refuse("descriptor.block_bytes", d.wire.BlockBytes, dense)
	}
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	end := int64(0)
	for _, s := range spans {
		if s.begin < end {
			return refuse("descriptor.scales.offset", s.begin, phrase("beyond the array before it, which ends at "+show(end)))
		}
		end = s.end
	}
	if end > d.wire.BlockBytes {
		return refuse("descriptor.block_bytes", d.wire.BlockBytes, phrase("at least "+show(end)))
	}
	d.gaps = dense != d.wire.BlockBytes
	return nil
}

// numbers resolves the array of the numbers and returns the block's bytes that
// it spans.
func (d *Descriptor) numbers(unit int) (array, int64, error) {
	e, known := entryNamed(d.wire.Layout)
	switch {
	case !known && len(d.wire.Axes) == 0:
		return array{}, 0, refuse("descriptor.layout", d.wire.Layout, phrase("a layout that is known by name, or with axes and strides"))
	case known && d.model.MLA && e.kinds&mla == 0:
		return array{}, 0, refuse("descriptor.layout", d.wire.Layout, phrase("one that exists for MLA"))
	case known && !d.model.MLA && e.kinds&mha == 0:
		return array{}, 0, refuse("descriptor.layout", d.wire.Layout, phrase("one that exists without MLA"))
	}
	if d.wire.Packing != "" {
		return d.packed(e, unit)
	}
	var order []axis
	var strides []int64
	var err error
	if known {
		order = e.orderOf(d.model.MLA)
		if strides, err = d.dense(unit, order); err != nil {
			return array{}, 0, err
		}
		if err := d.agree(order, strides); err != nil {
			return array{}, 0, err
		}
	} else {
		want := []axis{layer, side, head, token, dim}
		if d.model.MLA {
			want = []axis{layer, token, dim}
		}
		if order, err = d.order("descriptor", d.wire.Axes, want); err != nil {
			return array{}, 0, err
		}
		strides = d.wire.Strides
	}
	used, err := d.nested("descriptor", unit, order, strides)
	if err != nil {
		return array{}, 0, err
	}
	return d.strided(array{dtype: d.dtype, unit: unit}, 0, order, strides), used, nil
}

// dense returns the strides of axes that are densely packed.
func (d *Descriptor) dense(unit int, order []axis) ([]int64, error) {
	if _, err := d.size(unit, order); err != nil {
		return nil, err
	}
	strides := make([]int64, len(order))
	stride := int64(unit)
	for i, a := range slices.Backward(order) {
		strides[i] = stride
		stride *= int64(d.count(a))
	}
	return strides, nil
}

// agree refuses axes that an engine gives beside a layout that it names, where
// the two say different things.
func (d *Descriptor) agree(order []axis, strides []int64) error {
	if len(d.wire.Axes) == 0 {
		return nil
	}
	given, err := d.order("descriptor", d.wire.Axes, order)
	if err != nil {
		return err
	}
	if !slices.Equal(given, order) {
		return refuse("descriptor.axes", phrase(nameAxes(given)), phrase(nameAxes(order)+" as descriptor.layout "+d.wire.Layout+" says"))
	}
	for i, s := range d.wire.Strides {
		if s != strides[i] {
			return refuse("descriptor.strides["+axisNames[order[i]]+"]", s, strides[i])
		}
	}
	return nil
}

// order turns the names of axes into axes: each of want once.
func (d *Descriptor) order(field string, given []string, want []axis) ([]axis, error) {
	var order []axis
	for _, name := range given {
		a, ok := axisNamed(name)
		if !ok || !slices.Contains(want, a) || slices.Contains(order, a) {
			return nil, refuse(field+".axes", name, phrase("one of "+nameAxes(want)+", each once"))
		}
		order = append(order, a)
	}
	if len(order) != len(want) {
		return nil, refuse(field+".axes", phrase(nameAxes(order)), phrase("all of "+nameAxes(want)))
	}
	return order, nil
}

// nested refuses strides with which two elements could share a byte: each axis
// must step over all that lies on the axes inside it. It returns the bytes from
// the first element to the end of the last.
func (d *Descriptor) nested(field string, unit int, order []axis, strides []int64) (int64, error) {
	inner := make([]int, len(order))
	for i := range inner {
		inner[i] = i
	}
	slices.SortStableFunc(inner, func(i, j int) int {
		return cmp.Or(cmp.Compare(strides[i], strides[j]), cmp.Compare(d.count(order[i]), d.count(order[j])))
	})
	used := int64(unit)
	for _, i := range inner {
		n := int64(d.count(order[i]))
		if strides[i] < used && n > 1 {
			return 0, refuse(field+".strides["+axisNames[order[i]]+"]", strides[i], phrase("at least "+show(used)+", what the axes inside it take"))
		}
		if n > 1 && strides[i] > (kvwire.MaxObject-used)/(n-1) {
			return 0, kvwire.Errorf(kvwire.CodeTooLarge, field+".strides", "%d steps of %d bytes along %s are more than %d", n-1, strides[i], axisNames[order[i]], kvwire.MaxObject)
		}
		if n > 1 {
			used += (n - 1) * strides[i]
		}
	}
	return used, nil
}

// strided completes an array that lies at base in each block with one stride
// for each axis.
func (d *Descriptor) strided(a array, base int64, order []axis, strides []int64) array {
	var stride [axes]int
	for i, ax := range order {
		stride[ax] = int(strides[i])
	}
	blocks := digit{d.blocks(), int(d.wire.BlockBytes)}
	for i := range d.sides() {
		s := sided{
			base:  int(base) + i*stride[side],
			layer: digit{d.layers(), stride[layer]}, head: digit{d.heads(), stride[head]},
			token: walk{{d.wire.BlockTokens, stride[token]}, blocks}, inner: walk{{d.model.HeadSize, stride[dim]}},
		}
		if !slices.Contains(order, token) {
			s.token = walk{blocks}
		}
		if !slices.Contains(order, dim) {
			s.inner = walk{{1, 0}}
		}
		if !slices.Contains(order, head) {
			s.head.stride = 0
		}
		a.sides = append(a.sides, s)
	}
	return a
}

// packed resolves an array in one of the packings of vLLM's CPU backend.
func (d *Descriptor) packed(e entry, unit int) (array, int64, error) {
	p, ok := packings[d.wire.Packing]
	switch {
	case !ok:
		return array{}, 0, refuse("descriptor.packing", d.wire.Packing, phrase(`"" or one of `+names(packings)))
	case !e.packs:
		return array{}, 0, refuse("descriptor.packing", d.wire.Packing, phrase(`"" with descriptor.layout `+d.wire.Layout))
	case d.model.MLA:
		return array{}, 0, refuse("descriptor.packing", d.wire.Packing, phrase(`"" with MLA`))
	case len(d.wire.Axes) > 0:
		return array{}, 0, refuse("descriptor.axes", phrase("given"), phrase("left out with descriptor.packing "+d.wire.Packing))
	case !slices.Contains(p.sizes, unit):
		return array{}, 0, refuse("descriptor.dtype", d.dtype, phrase("of a size that "+d.wire.Packing+" packs: "+show(p.sizes)+" bytes"))
	case d.wire.BlockTokens%p.tokens != 0:
		return array{}, 0, refuse("descriptor.block_tokens", d.wire.BlockTokens, phrase("a multiple of "+show(p.tokens)+" with descriptor.packing "+d.wire.Packing))
	case d.model.HeadSize%p.dims != 0:
		return array{}, 0, refuse("model.head_size", d.model.HeadSize, phrase("a multiple of "+show(p.dims)+" with descriptor.packing "+d.wire.Packing))
	}
	order := e.orderOf(false)
	strides, err := d.dense(unit, order)
	if err != nil {
		return array{}, 0, err
	}
	a := d.strided(array{dtype: d.dtype, unit: unit}, 0, order, strides)
	for i, pieces := range [][]piece{p.k, p.v} {
		s := &a.sides[i]
		s.base = i * unit * d.wire.BlockTokens * d.model.HeadSize
		s.token, s.inner = d.pieces(unit, pieces)
	}
	used, err := d.size(unit, order)
	return a, used, err
}

// pieces returns where the tokens of a page and the dims of a head lead when a
// head's block lies in the given order.
func (d *Descriptor) pieces(unit int, order []piece) (tokens, dims walk) {
	left := map[axis]int{token: d.wire.BlockTokens, dim: d.model.HeadSize}
	stride := unit
	for _, p := range slices.Backward(order) {
		n := p.n
		if n == 0 {
			n = left[p.axis]
		}
		left[p.axis] /= n
		if p.axis == token {
			tokens = append(tokens, digit{n, stride})
		} else {
			dims = append(dims, digit{n, stride})
		}
		stride *= n
	}
	return append(tokens, digit{d.blocks(), int(d.wire.BlockBytes)}), dims
}
