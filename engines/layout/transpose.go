package layout

import "encoding/binary"

// line is how many bytes of each source row a tile takes: those that the
// processor has fetched together.
const line = 64

// The transposes move rows × columns units. Rows are row.src apart in the source
// and follow each other in the destination; columns the other way round. A strip
// of columns, a line of each row wide, is done for all rows before the next, so
// that what was fetched is used up.

// squares is what the transposes share: how many rows and columns there are, and
// how many of them make whole squares that registers can hold.
type squares struct{ rows, columns, wholeRows, wholeColumns int }

func squaresOf(unit, side int, row, column pair) squares {
	s := squares{rows: row.n, columns: column.n}
	if row.dst == unit && column.src == unit {
		s.wholeRows, s.wholeColumns = row.n/side*side, column.n/side*side
	}
	return s
}

// edges moves by gather what lies outside whole squares.
func (s squares) edges(dst, src []byte, unit int, gather func(dst, src []byte, unit int, _, l pair), column, row pair) {
	for c := range s.columns {
		from := s.wholeRows
		if c >= s.wholeColumns {
			from = 0
		}
		if n := s.rows - from; n > 0 {
			gather(dst[c*column.dst+from*row.dst:], src[c*column.src+from*row.src:], unit, pair{}, pair{n, row.src, row.dst})
		}
	}
}

func transpose1(dst, src []byte, unit int, column, row pair) {
	s := squaresOf(unit, 8, row, column)
	for first := 0; first < s.wholeColumns; first += line {
		end := min(first+line, s.wholeColumns)
		for r := 0; r < s.wholeRows; r += 8 {
			for c := first; c < end; c += 8 {
				square1(dst[c*column.dst+r:], src[r*row.src+c:], column.dst, row.src)
			}
		}
	}
	s.edges(dst, src, unit, gather1, column, row)
}

func transpose2(dst, src []byte, unit int, column, row pair) {
	s := squaresOf(unit, 4, row, column)
	for first := 0; first < s.wholeColumns; first += line / 2 {
		end := min(first+line/2, s.wholeColumns)
		for r := 0; r < s.wholeRows; r += 4 {
			for c := first; c < end; c += 4 {
				square2(dst[c*column.dst+r*2:], src[r*row.src+c*2:], column.dst, row.src)
			}
		}
	}
	s.edges(dst, src, unit, gather2, column, row)
}

// zip2 makes of two rows one in which their numbers alternate.
func zip2(dst, src []byte, _ int, column, row pair) {
	other := src[row.src:]
	whole := column.n / 4 * 4
	for c := 0; c < whole; c += 4 {
		a, b := binary.LittleEndian.Uint64(src[c*2:]), binary.LittleEndian.Uint64(other[c*2:])
		d := dst[c*4 : c*4+16]
		binary.LittleEndian.PutUint64(d, spread(a)|spread(b)<<16)
		binary.LittleEndian.PutUint64(d[8:], spread(a>>32)|spread(b>>32)<<16)
	}
	for c := whole; c < column.n; c++ {
		copy(dst[c*4:c*4+2], src[c*2:])
		copy(dst[c*4+2:c*4+4], other[c*2:])
	}
}

// unzip2 is the reverse of zip2.
func unzip2(dst, src []byte, _ int, column, row pair) {
	other := dst[column.dst:]
	whole := row.n / 4 * 4
	for r := 0; r < whole; r += 4 {
		s := src[r*4 : r*4+16]
		p, q := binary.LittleEndian.Uint64(s), binary.LittleEndian.Uint64(s[8:])
		binary.LittleEndian.PutUint64(dst[r*2:], collect(p)|collect(q)<<32)
		binary.LittleEndian.PutUint64(other[r*2:], collect(p>>16)|collect(q>>16)<<32)
	}
	for r := whole; r < row.n; r++ {
		copy(dst[r*2:r*2+2], src[r*4:])
		copy(other[r*2:r*2+2], src[r*4+2:])
	}
}

// spread puts the two lower numbers of 2 bytes into the even places.
func spread(x uint64) uint64 { return x&0xffff | x&0xffff0000<<16 }

// collect is the reverse of spread.
func collect(x uint64) uint64 { return x&0xffff | x>>16&0xffff0000 }

func transpose4(dst, src []byte, unit int, column, row pair) {
	s := squaresOf(unit, 2, row, column)
	for first := 0; first < s.wholeColumns; first += line / 4 {
		end := min(first+line/4, s.wholeColumns)
		for r := 0; r < s.wholeRows; r += 2 {
			for c := first; c < end; c += 2 {
				square4(dst[c*column.dst+r*4:], src[r*row.src+c*4:], column.dst, row.src)
			}
		}
	}
	s.edges(dst, src, unit, gather4, column, row)
}

func transpose8(dst, src []byte, unit int, column, row pair) {
	s := squaresOf(unit, 1, row, column)
	for first := 0; first < s.wholeColumns; first += line / 8 {
		end := min(first+line/8, s.wholeColumns)
		for r := range s.wholeRows {
			for c := first; c < end; c++ {
				binary.LittleEndian.PutUint64(dst[c*column.dst+r*8:], binary.LittleEndian.Uint64(src[r*row.src+c*8:]))
			}
		}
	}
	s.edges(dst, src, unit, gather8, column, row)
}

// square4 transposes 2 × 2 numbers of 4 bytes in registers; down and across are
// the steps from row to row of destination and source.
func square4(dst, src []byte, down, across int) {
	const low = 1<<32 - 1
	a := binary.LittleEndian.Uint64(src)
	b := binary.LittleEndian.Uint64(src[across:])
	binary.LittleEndian.PutUint64(dst, a&low|b<<32)
	binary.LittleEndian.PutUint64(dst[down:], a>>32|b&^low)
}

// square2 transposes 4 × 4 numbers of 2 bytes.
func square2(dst, src []byte, down, across int) {
	const (
		even = 0x0000ffff0000ffff
		low  = 1<<32 - 1
	)
	a := binary.LittleEndian.Uint64(src)
	b := binary.LittleEndian.Uint64(src[across:])
	c := binary.LittleEndian.Uint64(src[2*across:])
	d := binary.LittleEndian.Uint64(src[3*across:])
	// Columns 0 and 2, then 1 and 3, of the upper and the lower two rows.
	ab, cd := a&even|b&even<<16, c&even|d&even<<16
	ba, dc := a>>16&even|b&^even, c>>16&even|d&^even
	binary.LittleEndian.PutUint64(dst, ab&low|cd<<32)
	binary.LittleEndian.PutUint64(dst[down:], ba&low|dc<<32)
	binary.LittleEndian.PutUint64(dst[2*down:], ab>>32|cd&^low)
	binary.LittleEndian.PutUint64(dst[3*down:], ba>>32|dc&^low)
}

// square1 transposes 8 × 8 bytes: squares of 4 bytes, of 2, then bytes.
func square1(dst, src []byte, down, across int) {
	var r [8]uint64
	for i := range r {
		r[i] = binary.LittleEndian.Uint64(src[i*across:])
	}
	const (
		low  = 1<<32 - 1
		even = 0x0000ffff0000ffff
		odd  = 0x00ff00ff00ff00ff
	)
	for i := range 4 {
		a, b := r[i], r[i+4]
		r[i], r[i+4] = a&low|b<<32, a>>32|b&^low
	}
	for _, i := range [4]int{0, 1, 4, 5} {
		a, b := r[i], r[i+2]
		r[i], r[i+2] = a&even|b&even<<16, a>>16&even|b&^even
	}
	for i := 0; i < 8; i += 2 {
		a, b := r[i], r[i+1]
		r[i], r[i+1] = a&odd|b&odd<<8, a>>8&odd|b&^odd
	}
	for i := range r {
		binary.LittleEndian.PutUint64(dst[i*down:], r[i])
	}
}
