package llama

import "math"

// attendBlock is how many rows of V are taken at a time: they stay in the
// first-level cache while every column of them is used.
const attendBlock = 64

// rotate applies RoPE to heads rows of HeadDim values, first half against
// second half as transformers does.
func rotate(x []float32, heads, dim int, cos, sin []float32) {
	half := dim / 2
	cos, sin = cos[:half], sin[:half]
	for h := range heads {
		a, b := x[h*dim:][:half], x[h*dim+half:][:half]
		for i, c := range cos {
			p, q, s := a[i], b[i], sin[i]
			a[i] = float32(p*c) - float32(q*s)
			b[i] = float32(q*c) + float32(p*s)
		}
	}
}

// ropeTables fills cos and sin, [rows][HeadDim/2], for positions first onward.
func (m *Model) ropeTables(cos, sin []float32, first, rows int) {
	half := len(m.invFreq)
	for r := range rows {
		for i, f := range m.invFreq {
			// The angle is rounded to float32, as transformers does.
			s, c := math.Sincos(float64(float32(first+r) * f))
			cos[r*half+i], sin[r*half+i] = float32(c), float32(s)
		}
	}
}

// attend computes causal attention of one head for rows queries whose first is
// at position first. q and out are rows of Heads*HeadDim values, already offset
// to the head; k and v are [token][HeadDim]; scores has room for tileRows rows of
// step values.
func attend(out, q []float32, qStep, rows, first int, k, v []float32, dim int, scores []float32, step int) {
	scale := float32(1 / math.Sqrt(float64(dim)))
	for r := 0; r < rows; r += tileRows {
		n := min(tileRows, rows-r)
		common := first + r + 1 // keys that all n queries see
		qr, outr := q[r*qStep:], out[r*qStep:]
		dotRows(scores, step, qr, qStep, n, k, dim, 0, common)
		for i := range n {
			row := scores[i*step:][:common+i]
			for j := common; j < len(row); j++ {
				row[j] = dot(qr[i*qStep:], k[j*dim:], dim)
			}
			softmax(row, scale)
			clear(outr[i*qStep:][:dim])
		}
		for j := 0; j < common; j += attendBlock {
			count := min(attendBlock, common-j)
			if n == tileRows {
				addTile3(outr, qStep, scores[j:], step, count, v[j*dim:], dim)
				continue
			}
			for i := range n {
				addRows(outr[i*qStep:], scores[i*step+j:][:count], v[j*dim:], dim)
			}
		}
		for i := 1; i < n; i++ {
			addRows(outr[i*qStep:], scores[i*step+common:][:i], v[common*dim:], dim)
		}
	}
}

func softmax(row []float32, scale float32) {
	top := float32(math.Inf(-1))
	for i, s := range row {
		s *= scale
		row[i] = s
		if s > top {
			top = s
		}
	}
	var sum float32
	for i, s := range row {
		e := exp32(s - top)
		row[i] = e
		sum += e
	}
	inverse := 1 / sum
	for i := range row {
		row[i] *= inverse
	}
}
