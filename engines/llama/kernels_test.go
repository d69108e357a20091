package llama

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestTilesEqualPlainLoops compares every tile with the loop that it stands
// for, bit by bit.
func TestTilesEqualPlainLoops(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		rows := rapid.IntRange(1, 9).Draw(r, "rows")
		outs := rapid.IntRange(1, 9).Draw(r, "outs")
		n := 2 * rapid.IntRange(1, 9).Draw(r, "n")
		seed := [32]byte{byte(rows), byte(outs), byte(n)}
		x, w := uniform(seed, rows*(n+1), 1), uniform(tensorSeed(seed, "w"), outs*n, 1)

		got := make([]float32, rows*outs)
		cut := rapid.IntRange(0, outs).Draw(r, "cut")
		dotRows(got, outs, x, n+1, rows, w, n, 0, cut)
		dotRows(got, outs, x, n+1, rows, w, n, cut, outs)
		for i := range rows {
			for o := range outs {
				require.Equal(r, dot(x[i*(n+1):], w[o*n:], n), got[i*outs+o])
			}
		}

		// p as rows of weights over the rows of w.
		p := uniform(tensorSeed(seed, "p"), tileRows*outs, 1)
		tile, plain := make([]float32, tileRows*n), make([]float32, tileRows*n)
		addTile3(tile, n, p, outs, outs, w, n)
		for i := range tileRows {
			addRows(plain[i*n:], p[i*outs:][:outs], w, n)
		}
		require.Equal(r, plain, tile)
	})
}

func TestExp32(t *testing.T) {
	t.Parallel()
	for x := -87.2; x < 88.7; x += 0.0317 {
		f := float32(x)
		want := math.Exp(float64(f))
		got := float64(exp32(f))
		if math.Abs(got-want)/want > 2.4e-7 {
			t.Fatalf("exp(%g) is %g, want %g", f, got, want)
		}
	}
	inf := float32(math.Inf(1))
	assert.EqualValues(t, 1, exp32(0))
	assert.EqualValues(t, 0, exp32(-88))
	assert.EqualValues(t, 0, exp32(-inf))
	assert.Equal(t, inf, exp32(89))
	assert.Equal(t, inf, exp32(inf))
	assert.True(t, math.IsNaN(float64(exp32(float32(math.NaN())))))
}

func TestHalfPrecision(t *testing.T) {
	t.Parallel()
	for u := range 1 << 16 {
		sign, exp, frac := 1-float64(u>>15)*2, u>>10&31, float64(u&1023)
		got := float64(f16(uint16(u)))
		switch {
		case exp == 31 && frac != 0:
			require.True(t, math.IsNaN(got))
		case exp == 31:
			require.Equal(t, sign*math.Inf(1), got)
		case exp == 0:
			require.Equal(t, sign*frac/(1<<24), got)
		default:
			require.Equal(t, sign*math.Ldexp(1024+frac, exp-25), got)
		}
	}
	assert.EqualValues(t, 1, bf16(0x3f80))
	assert.EqualValues(t, -2, bf16(0xc000))
	assert.EqualValues(t, 3.140625, bf16(0x4049))
}

func TestParallelCoversAll(t *testing.T) {
	t.Parallel()
	for n := 1; n < 20; n++ {
		for threads := 2; threads < 9; threads++ {
			hits := make([]int, n)
			parallel(threads, n, func(lo, hi int) {
				for i := lo; i < hi; i++ {
					hits[i]++
				}
			})
			for i := range hits {
				require.Equal(t, 1, hits[i])
			}
		}
	}
}
