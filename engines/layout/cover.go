package layout

import (
	"slices"

	"membrane/kvwire"
)

// part is a window of layers and heads that one writer's shard gives.
type part struct {
	writer        int
	layers, heads [2]int
}

// maxParts bounds the parts of a plan. A grid of ranks has at most as many as
// shards; only windows that overlap without order make more.
const maxParts = 2 * kvwire.MaxShards

// cover chooses which writers give which part of the reader's windows: as few
// as it can, the first where several hold the same, as when KV heads are
// replicated. The writers' windows may overlap in any way.
func cover(to Descriptor, from []Descriptor) ([]part, error) {
	var parts []part
	want := to.wire.Layers
	for _, layers := range segments(want, from) {
		for h := to.wire.Heads[0]; h < to.wire.Heads[1]; {
			best, end := -1, h
			for i, w := range from {
				l, heads := w.wire.Layers, w.wire.Heads
				if l[0] <= layers[0] && layers[1] <= l[1] && heads[0] <= h && heads[1] > end {
					best, end = i, heads[1]
				}
			}
			if best < 0 {
				return nil, refuse("descriptor.heads",
					phrase("without head "+show(h)+" of layer "+show(layers[0])), phrase("held by one of the "+show(len(from))+" shards that are given"))
			}
			if len(parts) == maxParts {
				return nil, refuse("shards", phrase("in more than "+show(maxParts)+" pieces"), phrase("windows of layers and heads in a grid"))
			}
			end = min(end, to.wire.Heads[1])
			parts = append(parts, part{best, layers, [2]int{h, end}})
			h = end
		}
	}
	return join(parts), nil
}

// segments cuts a window of layers wherever a writer's window begins or ends.
func segments(want [2]int, from []Descriptor) [][2]int {
	cuts := []int{want[0], want[1]}
	for _, w := range from {
		for _, l := range w.wire.Layers {
			if l > want[0] && l < want[1] {
				cuts = append(cuts, l)
			}
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var all [][2]int
	for i := 1; i < len(cuts); i++ {
		all = append(all, [2]int{cuts[i-1], cuts[i]})
	}
	return all
}

// join puts parts together that differ only in that the layers of one follow
// those of the other.
func join(parts []part) []part {
	var out []part
	for _, p := range parts {
		i := slices.IndexFunc(out, func(q part) bool {
			return q.writer == p.writer && q.heads == p.heads && q.layers[1] == p.layers[0]
		})
		if i >= 0 {
			out[i].layers[1] = p.layers[1]
			continue
		}
		out = append(out, p)
	}
	return out
}
