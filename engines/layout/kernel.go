package layout

import (
	"encoding/binary"
	"slices"
)

// kernel moves the innermost loops of a nest.
type kernel struct {
	name string
	// loops is how many loops it takes: none, the row, or the column and the
	// row. A row walks through the destination, with the smallest steps there
	// are, a column through the source.
	loops int
	move  func(dst, src []byte, unit int, column, row pair)
}

var (
	copyOne  = kernel{"copy", 0, func(dst, src []byte, unit int, _, _ pair) { copy(dst[:unit], src[:unit]) }}
	copyRuns = kernel{"copy runs", 1, runs}
)

// element is a kernel for a unit that is too small to be worth a call of copy.
type element struct {
	unit int // bytes
	kernel
	// fits says for which column and row; nil for all.
	fits func(column, row pair) bool
}

// elements are the kernels by unit, with one loop and with two; of those that
// fit the first is taken.
var elements = []element{
	{1, kernel{"gather", 1, gather1}, nil},
	{2, kernel{"gather", 1, gather2}, nil},
	{4, kernel{"gather", 1, gather4}, nil},
	{8, kernel{"gather", 1, gather8}, nil},
	{1, kernel{"transpose", 2, transpose1}, nil},
	{2, kernel{"zip", 2, zip2}, func(column, row pair) bool {
		return row.n == 2 && row.dst == 2 && column.src == 2 && column.dst == 4
	}},
	{2, kernel{"unzip", 2, unzip2}, func(column, row pair) bool {
		return column.n == 2 && column.src == 2 && row.dst == 2 && row.src == 4
	}},
	{2, kernel{"transpose", 2, transpose2}, nil},
	{4, kernel{"transpose", 2, transpose4}, nil},
	{8, kernel{"transpose", 2, transpose8}, nil},
}

func elementOf(unit, loops int, column, row pair) (kernel, bool) {
	for _, e := range elements {
		if e.unit == unit && e.loops == loops && (e.fits == nil || e.fits(column, row)) {
			return e.kernel, true
		}
	}
	return kernel{}, false
}

// choose returns the kernel for a unit, and the loops with those that are the
// kernel's last. Loops come with the smallest step in the destination last.
func choose(unit int, loops []pair) (kernel, []pair) {
	last := len(loops) - 1
	if last < 0 {
		return copyOne, loops
	}
	near := 0 // the loop with the smallest step in the source
	for i, l := range loops {
		if l.src <= loops[near].src {
			near = i
		}
	}
	column, row := loops[near], loops[last]
	if near == last {
		if k, ok := elementOf(unit, 1, pair{}, row); ok {
			return k, loops
		}
	} else if k, ok := elementOf(unit, 2, column, row); ok {
		loops = slices.Delete(slices.Clone(loops), near, near+1)
		return k, slices.Insert(loops, last-1, column)
	}
	return copyRuns, loops
}

func runs(dst, src []byte, unit int, _, l pair) {
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		copy(dst[d:d+unit], src[s:s+unit])
		s, d = s+l.src, d+l.dst
	}
}

func gather1(dst, src []byte, _ int, _, l pair) {
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		dst[d] = src[s]
		s, d = s+l.src, d+l.dst
	}
}

func gather2(dst, src []byte, _ int, _, l pair) {
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		binary.LittleEndian.PutUint16(dst[d:], binary.LittleEndian.Uint16(src[s:]))
		s, d = s+l.src, d+l.dst
	}
}

func gather4(dst, src []byte, _ int, _, l pair) {
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		binary.LittleEndian.PutUint32(dst[d:], binary.LittleEndian.Uint32(src[s:]))
		s, d = s+l.src, d+l.dst
	}
}

func gather8(dst, src []byte, _ int, _, l pair) {
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		binary.LittleEndian.PutUint64(dst[d:], binary.LittleEndian.Uint64(src[s:]))
		s, d = s+l.src, d+l.dst
	}
}
