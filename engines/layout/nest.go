package layout

import (
	"cmp"
	"fmt"
	"slices"
)

// maxLoops bounds the loops of a nest: layer, head and side, and the digits
// into which two layouts can cut token and dim.
const maxLoops = 16

// nest is loops around the move of one unit, all of one source.
type nest struct {
	source   int
	src, dst int // where the first unit lies
	unit     int // bytes that lie together on both sides
	count    int
	loops    [maxLoops]pair // the outermost first
	outer    int            // how many of them are not the kernel's
	kernel   kernel
}

// newNest joins what lies together, orders the loops and chooses the kernel.
func newNest(source, src, dst, unit int, pairs []pair) nest {
	n := nest{source: source, src: src, dst: dst}
	pairs = slices.DeleteFunc(slices.Clone(pairs), func(p pair) bool { return p.n == 1 })
	n.unit, pairs = grow(unit, pairs)
	pairs = chain(pairs)
	// Writes go forward through the destination.
	slices.SortStableFunc(pairs, func(a, b pair) int { return cmp.Compare(b.dst, a.dst) })
	n.kernel, pairs = choose(n.unit, pairs)
	n.count = copy(n.loops[:], pairs)
	n.outer = n.count - n.kernel.loops
	return n
}

// grow makes the unit as large as it can be: a loop that steps by the unit on
// both sides is part of it.
func grow(unit int, pairs []pair) (int, []pair) {
	for {
		i := slices.IndexFunc(pairs, func(p pair) bool { return p.src == unit && p.dst == unit })
		if i < 0 {
			return unit, pairs
		}
		unit *= pairs[i].n
		pairs = slices.Delete(pairs, i, i+1)
	}
}

// chain makes one loop of two where one goes on where the other ends, on both
// sides.
func chain(pairs []pair) []pair {
	for i := 0; i < len(pairs); i++ {
		for j := 0; j < len(pairs); j++ {
			in, out := pairs[i], pairs[j]
			if i == j || out.src != in.src*in.n || out.dst != in.dst*in.n {
				continue
			}
			pairs[i].n *= out.n
			pairs = slices.Delete(pairs, j, j+1)
			i = -1
			break
		}
	}
	return pairs
}

func (n *nest) run(dst, src []byte) {
	var at [maxLoops]int
	s, d := n.src, n.dst
	column, row := n.loops[max(n.count-2, 0)], n.loops[max(n.count-1, 0)]
	for {
		n.kernel.move(dst[d:], src[s:], n.unit, column, row)
		i := n.outer - 1
		for ; i >= 0; i-- {
			l := &n.loops[i]
			s, d = s+l.src, d+l.dst
			if at[i]++; at[i] < l.n {
				break
			}
			at[i], s, d = 0, s-l.n*l.src, d-l.n*l.dst
		}
		if i < 0 {
			return
		}
	}
}

// String names the kernel, the unit and the loops.
func (n *nest) String() string {
	return fmt.Sprintf("%s of %d bytes %v", n.kernel.name, n.unit, n.loops[:n.count])
}
