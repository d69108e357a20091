package llama

import (
	"math"
	"sync"
)

// Every loop below adds the products of one result in the order of their index,
// into one accumulator, whichever tile it falls into; that is what makes results
// independent of chunks and threads. Speed comes from computing a tile of six
// results at a time, so that six additions are in flight; eight would not fit
// the sixteen registers with their operands, and run at half the speed.

// tileRows is how many rows of x a tile takes.
const tileRows = 3

// dotRows sets dst[r*dstStep+o] to the dot product of row r of x and row o of
// w, for r below rows and o from lo to hi-1. Rows of w have n values and lie
// one after another; rows of x begin xStep apart.
func dotRows(dst []float32, dstStep int, x []float32, xStep, rows int, w []float32, n, lo, hi int) {
	r := 0
	for ; r+tileRows <= rows; r += tileRows {
		o := lo
		for ; o+2 <= hi; o += 2 {
			dotTile3x2(dst[r*dstStep+o:], dstStep, x[r*xStep:], xStep, w[o*n:], n)
		}
		if o < hi {
			for i := r; i < r+tileRows; i++ {
				dst[i*dstStep+o] = dot(x[i*xStep:], w[o*n:], n)
			}
		}
	}
	for ; r < rows; r++ {
		o := lo
		for ; o+4 <= hi; o += 4 {
			dotTile1x4(dst[r*dstStep+o:], x[r*xStep:], w[o*n:], n)
		}
		for ; o < hi; o++ {
			dst[r*dstStep+o] = dot(x[r*xStep:], w[o*n:], n)
		}
	}
}

func dot(x, w []float32, n int) float32 {
	x, w = x[:n], w[:n]
	var s float32
	for i := range x {
		s += float32(x[i] * w[i])
	}
	return s
}

func dotTile1x4(dst, x, w []float32, n int) {
	x = x[:n]
	w0, w1, w2, w3 := w[:n], w[n:2*n], w[2*n:3*n], w[3*n:4*n]
	var s0, s1, s2, s3 float32
	for i, p := range x {
		s0 += float32(p * w0[i])
		s1 += float32(p * w1[i])
		s2 += float32(p * w2[i])
		s3 += float32(p * w3[i])
	}
	dst = dst[:4]
	dst[0], dst[1], dst[2], dst[3] = s0, s1, s2, s3
}

func dotTile3x2(dst []float32, dstStep int, x []float32, xStep int, w []float32, n int) {
	x0, x1, x2 := x[:n], x[xStep:][:n], x[2*xStep:][:n]
	w0, w1 := w[:n], w[n:][:n]
	var a0, a1, a2, b0, b1, b2 float32
	for i, u := range w0 {
		v := w1[i]
		p := x0[i]
		a0 += float32(p * u)
		b0 += float32(p * v)
		p = x1[i]
		a1 += float32(p * u)
		b1 += float32(p * v)
		p = x2[i]
		a2 += float32(p * u)
		b2 += float32(p * v)
	}
	dst[0], dst[1] = a0, b0
	dst[dstStep], dst[dstStep+1] = a1, b1
	dst[2*dstStep], dst[2*dstStep+1] = a2, b2
}

// addTile3 adds to each of three rows of dst the sum over j of p[r][j]*v[j].
// Rows of v have n values, an even number.
func addTile3(dst []float32, dstStep int, p []float32, pStep, count int, v []float32, n int) {
	p0, p1, p2 := p[:count], p[pStep:][:count], p[2*pStep:][:count]
	for d := 0; d < n; d += 2 {
		d0, d1, d2 := dst[d:][:2], dst[dstStep+d:][:2], dst[2*dstStep+d:][:2]
		a0, b0, a1, b1, a2, b2 := d0[0], d0[1], d1[0], d1[1], d2[0], d2[1]
		at := d
		for j, q := range p0 {
			row := v[at:][:2]
			x, y := row[0], row[1]
			at += n
			a0 += float32(q * x)
			b0 += float32(q * y)
			q = p1[j]
			a1 += float32(q * x)
			b1 += float32(q * y)
			q = p2[j]
			a2 += float32(q * x)
			b2 += float32(q * y)
		}
		d0[0], d0[1], d1[0], d1[1], d2[0], d2[1] = a0, b0, a1, b1, a2, b2
	}
}

// addRows adds to dst the sum over j of p[j]*v[j].
func addRows(dst, p, v []float32, n int) {
	dst = dst[:n]
	for j, q := range p {
		for d, x := range v[j*n:][:n] {
			dst[d] += float32(q * x)
		}
	}
}

func rmsNorm(dst, x, weight []float32, rows, n int, eps float64) {
	for r := range rows {
		row, out := x[r*n:][:n], dst[r*n:][:n]
		var sum float64
		for _, v := range row {
			sum += float64(v) * float64(v) // exact: 48 bits fit
		}
		scale := float32(1 / math.Sqrt(sum/float64(n)+eps))
		for i, v := range row {
			out[i] = weight[i] * float32(v*scale)
		}
	}
}

// exp32 is e^x to within two units in the last place; results below the normal
// range are zero.
func exp32(x float32) float32 {
	switch {
	case x < -87.3:
		return 0
	case x > 88.72283:
		return float32(math.Inf(1))
	case x != x:
		return x
	}
	// Adding and taking away 1.5*2^52 rounds to the nearest integer.
	const round = 3 << 51
	t := float64(x) * math.Log2E
	k := float64(t+round) - round
	r := float64(t-k) * math.Ln2
	// Taylor series to r^7: |r| is at most ln2/2, the rest below 6e-9.
	p := float64(r*(1.0/5040)) + 1.0/720
	p = float64(r*p) + 1.0/120
	p = float64(r*p) + 1.0/24
	p = float64(r*p) + 1.0/6
	p = float64(r*p) + 0.5
	p = float64(r*p) + 1
	p = float64(r*p) + 1
	return float32(p * math.Float64frombits(uint64(int64(k)+1023)<<52))
}

// parallel splits 0 to n-1 among threads and waits for all; both are at least 1.
// Callers with one thread do their work directly: the closure would allocate.
func parallel(threads, n int, work func(lo, hi int)) {
	threads = min(threads, n)
	var wg sync.WaitGroup
	for i := 1; i < threads; i++ {
		wg.Go(func() { work(i*n/threads, (i+1)*n/threads) })
	}
	work(0, n/threads)
	wg.Wait()
}
