package layout

import "encoding/binary"

// kernel moves the innermost loops of a nest.
type kernel struct {
	name string
	// loops is how many loops it takes; with 2 the first walks through the
	// source unit by unit, the second through the destination.
	loops int
	move  func(dst, src []byte, unit int, loops []pair)
}

var (
	copyOne  = kernel{"copy", 0, func(dst, src []byte, unit int, _ []pair) { copy(dst[:unit], src[:unit]) }}
	copyRuns = kernel{"copy runs", 1, runs}
)

// elements are the kernels for units that are too small to be worth a call of
// copy, by their size in bytes.
var elements = map[int]struct{ gather, transpose kernel }{
	1: {kernel{"gather", 1, gather1}, kernel{"transpose", 2, transpose1}},
	2: {kernel{"gather", 1, gather2}, kernel{"transpose", 2, transpose2}},
	4: {kernel{"gather", 1, gather4}, kernel{"transpose", 2, transpose4}},
	8: {kernel{"gather", 1, gather8}, kernel{"transpose", 2, transpose8}},
}

// choose returns the kernel for a unit, and the loops with those that are the
// kernel's last. Loops come with the smallest step in the destination last.
func choose(unit int, loops []pair) (kernel, []pair) {
	last := len(loops) - 1
	if last < 0 {
		return copyOne, loops
	}
	k, small := elements[unit]
	if !small {
		return copyRuns, loops
	}
	near := 0 // the loop with the smallest step in the source
	for i, l := range loops {
		if l.src <= loops[near].src {
			near = i
		}
	}
	if near == last {
		return k.gather, loops
	}
	out := append([]pair(nil), loops[:near]...)
	out = append(out, loops[near+1:last]...)
	return k.transpose, append(out, loops[near], loops[last])
}

func runs(dst, src []byte, unit int, loops []pair) {
	l := loops[0]
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		copy(dst[d:d+unit], src[s:s+unit])
		s, d = s+l.src, d+l.dst
	}
}

func gather1(dst, src []byte, _ int, loops []pair) {
	l := loops[0]
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		dst[d] = src[s]
		s, d = s+l.src, d+l.dst
	}
}

func gather2(dst, src []byte, _ int, loops []pair) {
	l := loops[0]
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		binary.LittleEndian.PutUint16(dst[d:], binary.LittleEndian.Uint16(src[s:]))
		s, d = s+l.src, d+l.dst
	}
}

func gather4(dst, src []byte, _ int, loops []pair) {
	l := loops[0]
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		binary.LittleEndian.PutUint32(dst[d:], binary.LittleEndian.Uint32(src[s:]))
		s, d = s+l.src, d+l.dst
	}
}

func gather8(dst, src []byte, _ int, loops []pair) {
	l := loops[0]
	for i, s, d := 0, 0, 0; i < l.n; i++ {
		binary.LittleEndian.PutUint64(dst[d:], binary.LittleEndian.Uint64(src[s:]))
		s, d = s+l.src, d+l.dst
	}
}
