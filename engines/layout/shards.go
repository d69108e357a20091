package layout

import (
	"slices"

	"membrane/kvwire"
)

// LayerWindow returns the layers that a pipeline parallel rank holds: from
// rank·layers/pp to (rank+1)·layers/pp, rounded down. It is an [*Error] where
// a rank would have none.
func LayerWindow(m kvwire.ModelFacts, pp, rank int) ([2]int, error) {
	switch {
	case pp < 1 || rank < 0 || rank >= pp:
		return [2]int{}, refuse("descriptor.pp_rank", rank, phrase("from 0 to below the size "+show(pp)))
	case m.Layers < pp:
		return [2]int{}, refuse("descriptor.pp_size", pp, phrase("at most the "+show(m.Layers)+" layers of the model"))
	}
	return [2]int{rank * m.Layers / pp, (rank + 1) * m.Layers / pp}, nil
}

// CheckWindows refuses a registration whose layers or heads are not those that
// [LayerWindow] and [HeadWindow] give its rank. A form names sizes and no
// windows, so that only ranks that follow one rule may share it. It asks
// nothing else of the layout, which need not be known.
func CheckWindows(m kvwire.ModelFacts, w kvwire.Descriptor) error {
	heads, err := HeadWindow(m, w.TPSize, w.TPRank)
	if err != nil {
		return err
	}
	if w.Heads != heads {
		return refuse("descriptor.heads", w.Heads, phrase(show(heads)+" on rank "+show(w.TPRank)+" of "+show(w.TPSize)))
	}
	layers, err := LayerWindow(m, w.PPSize, w.PPRank)
	if err != nil {
		return err
	}
	if w.Layers != layers {
		return refuse("descriptor.layers", w.Layers, phrase(show(layers)+" on pipeline rank "+show(w.PPRank)+" of "+show(w.PPSize)))
	}
	return nil
}

// Shards returns the descriptors of all shards of a page, d's own among them,
// in the order of [kvwire.Descriptor.Shard], by the rules of [HeadWindow] and
// [LayerWindow]. It refuses a d that does not follow them, and one that spells
// out axes where ranks hold unlike numbers of layers.
func (d Descriptor) Shards() ([]Descriptor, error) {
	if err := CheckWindows(d.model, d.wire); err != nil {
		return nil, err
	}
	_, known := entryNamed(d.wire.Layout)
	spelled := len(d.wire.Axes) > 0 || slices.ContainsFunc(d.wire.Scales, func(s kvwire.ScaleArray) bool { return len(s.Axes) > 0 })
	all := make([]Descriptor, 0, d.wire.PPSize*d.wire.TPSize)
	for pp := range d.wire.PPSize {
		layers, err := LayerWindow(d.model, d.wire.PPSize, pp)
		if err != nil {
			return nil, err
		}
		alike := layers[1]-layers[0] == d.layers()
		if !alike && (!known || spelled || d.Opaque()) {
			return nil, refuse("descriptor.layers", layers, phrase("as many as the "+show(d.layers())+" of the other ranks, as axes are given"))
		}
		for tp := range d.wire.TPSize {
			w := d.wire
			w.PPRank, w.TPRank, w.Layers = pp, tp, layers
			if w.Heads, err = HeadWindow(d.model, w.TPSize, tp); err != nil {
				return nil, err
			}
			if !alike {
				if w, err = Sized(d.model, w); err != nil {
					return nil, err
				}
			}
			shard, err := Describe(d.model, w, d.pageTokens)
			if err != nil {
				return nil, err
			}
			all = append(all, shard)
		}
	}
	return all, nil
}
