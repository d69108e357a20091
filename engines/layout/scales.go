package layout

import (
	"slices"

	"membrane/kvwire"
)

// scaleAxes are the axes that arrays of scales have.
var scaleAxes = map[string][]axis{
	kvwire.PerTensor:    {layer, side},
	kvwire.PerHead:      {layer, side, head},
	kvwire.PerTokenHead: {layer, side, head, token},
}

// over returns the axes of a block that the array has.
func (a array) over() []axis {
	if a.per == "" {
		return []axis{layer, side, head, token, dim}
	}
	return scaleAxes[a.per]
}

// scales resolves one array of scales; next is where it lies without an offset.
func (d *Descriptor) scales(s kvwire.ScaleArray, next int64) (array, span, error) {
	want := scaleAxes[s.Per]
	unit, ok := dtypes[s.DType]
	if !ok {
		return array{}, span{}, refuse("descriptor.scales.dtype", s.DType, phrase("one of "+names(dtypes)))
	}
	if d.model.MLA {
		want = slices.DeleteFunc(slices.Clone(want), func(a axis) bool { return a == side || a == head })
	}
	order, strides, base := want, s.Strides, s.Offset
	var err error
	if len(s.Axes) > 0 {
		order, err = d.order("descriptor.scales", s.Axes, want)
	} else {
		if s.Offset != 0 {
			return array{}, span{}, refuse("descriptor.scales.offset", s.Offset, phrase("0 without axes"))
		}
		base = next
		strides, err = d.dense(unit, order)
	}
	if err != nil {
		return array{}, span{}, err
	}
	used, err := d.nested("descriptor.scales", unit, order, strides)
	if err != nil {
		return array{}, span{}, err
	}
	a := array{per: s.Per, dtype: s.DType, unit: unit, perBlock: !slices.Contains(order, token)}
	return d.strided(a, base, order, strides), span{base, base + used}, nil
}

// between reports whether scales lie between the numbers, each behind the dims
// of its token and head as in vLLM's per-token-head caches, without sharing a
// byte; and where the last of both ends. Where they do not, their spans tell.
func (d *Descriptor) between(numbers, scales array, where span) (end int64, ok bool) {
	if scales.per != kvwire.PerTokenHead || d.wire.Packing != "" || where.begin == 0 {
		return 0, false
	}
	n, s := numbers.sides[0], scales.sides[0]
	strides := []int64{int64(n.layer.stride), 0, int64(n.head.stride), int64(n.token[0].stride)}
	same := n.layer == s.layer && n.head == s.head && n.token[0] == s.token[0]
	if last := d.sides() - 1; last > 0 {
		strides[side] = int64(numbers.sides[last].base - n.base)
		same = same && strides[side] == int64(scales.sides[last].base-s.base)
	}
	dims := int64(d.model.HeadSize-1)*int64(n.inner[0].stride) + int64(numbers.unit)
	if !same || where.begin < dims {
		return 0, false
	}
	// Together they are one element that each axis has to step over.
	end, err := d.nested("descriptor.scales", int(where.begin)+scales.unit, []axis{layer, side, head, token}, strides)
	return end, err == nil
}
