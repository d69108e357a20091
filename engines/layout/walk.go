package layout

// digit is one digit of a coordinate: it counts to n, and each step is stride
// bytes.
type digit struct{ n, stride int }

// walk is where a coordinate leads, as the digits of a number with mixed
// radices, the least significant first: coordinate x lies at the sum of each
// digit of x times its stride. A block of tokens inside a page is a digit, and
// so is each part of an axis that a packing has cut.
type walk []digit

// pair is a digit that both sides of a translation share.
type pair struct{ n, src, dst int }

// refine returns the digits into which both walks can be cut, and false where
// the boundaries of one lie across those of the other, as with blocks of 16 and
// of 24 tokens. Both walks count equally far.
func refine(dst []pair, src, to walk) ([]pair, bool) {
	for i, j := 0, 0; i < len(src) && j < len(to); {
		s, d := &src[i], &to[j]
		n := min(s.n, d.n)
		if n == 0 || s.n%n != 0 || d.n%n != 0 {
			return nil, false
		}
		dst = append(dst, pair{n, s.stride, d.stride})
		*s = digit{s.n / n, s.stride * n}
		*d = digit{d.n / n, d.stride * n}
		if s.n == 1 {
			i++
		}
		if d.n == 1 {
			j++
		}
	}
	return dst, true
}
