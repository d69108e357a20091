package forms

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	"membrane/kvwire"
)

// Whatever a peer says of its forms, a recipe that comes of it reads what the
// cache has checked the length of, writes all it was given, and nothing panics.
func TestNoDescriptorOfAPeerBreaksAReader(t *testing.T) {
	numbers := rapid.OneOf(rapid.IntRange(-2, 9), rapid.SampledFrom([]int{16, 64, 511, 512, 513, math.MaxInt32, math.MaxInt64, math.MinInt64}))
	long := rapid.OneOf(rapid.Int64Range(-2, 9000), rapid.SampledFrom([]int64{16384, 32768, 65536, math.MaxInt64, math.MinInt64, 1 << 31, 1 << 62}))
	layouts := rapid.SampledFrom([]string{"vllm-nhd", "vllm-hnd", "sglang-page_first", "sglang-page_head", "canonical", "own", ""})
	axes := []string{"layer", "kv", "head", "token", "dim"}
	rapid.Check(t, func(rt *rapid.T) {
		mine := kvwire.Descriptor{Layout: "vllm-nhd", DType: "bfloat16", BlockTokens: 16, TPSize: 1, PPSize: 1, Layers: [2]int{0, 4}, Heads: [2]int{0, 4}, BlockBytes: 16 * 4 * 4 * 2 * 32 * 2}
		g := NewRegistry()
		r := g.Attach(facts, page, mine)
		n := rapid.IntRange(1, 4).Draw(rt, "n")
		var ds []kvwire.Descriptor
		for range n {
			d := mine
			d.Layout = layouts.Draw(rt, "layout")
			edits := rapid.SliceOfN(rapid.IntRange(0, 9), 0, 4).Draw(rt, "edits")
			for _, e := range edits {
				switch e {
				case 0:
					d.BlockTokens = numbers.Draw(rt, "block")
				case 1:
					d.BlockBytes = long.Draw(rt, "bytes")
				case 2:
					d.TPSize, d.TPRank = numbers.Draw(rt, "tp"), numbers.Draw(rt, "rank")
				case 3:
					d.PPSize, d.PPRank = numbers.Draw(rt, "pp"), numbers.Draw(rt, "rank")
				case 4:
					d.Layers = [2]int{numbers.Draw(rt, "l0"), numbers.Draw(rt, "l1")}
				case 5:
					d.Heads = [2]int{numbers.Draw(rt, "h0"), numbers.Draw(rt, "h1")}
				case 6:
					d.Axes = rapid.Permutation(axes).Draw(rt, "axes")
					d.Strides = rapid.SliceOfN(long, 5, 5).Draw(rt, "strides")
				case 7:
					d.Scales = []kvwire.ScaleArray{{Per: kvwire.PerHead, DType: "float32", Offset: long.Draw(rt, "offset")}}
				case 8:
					d.DType = rapid.SampledFrom([]string{"float32", "uint8", "", "bfloat16"}).Draw(rt, "dtype")
				case 9: // one that fits together
					d.TPSize, d.PPSize = rapid.SampledFrom([]int{1, 2, 4, 8}).Draw(rt, "tp"), rapid.SampledFrom([]int{1, 2, 4}).Draw(rt, "pp")
					d.Heads, d.Layers = [2]int{0, max(1, 4/d.TPSize)}, [2]int{0, 4 / d.PPSize}
					d.BlockBytes = int64(16 * d.Heads[1] * d.Layers[1] * 2 * 32 * 2)
				}
			}
			ds = append(ds, d)
		}
		g.Learn(facts.Namespace(page), ds)
		for _, c := range r.Recipes() {
			total := int64(0)
			for _, b := range c.Bytes {
				total += b
			}
			if total > 1<<24 {
				continue
			}
			var src [][]byte
			for _, b := range c.Bytes {
				src = append(src, make([]byte, b))
			}
			dst := [][]byte{make([]byte, r.Sizes()[0])}
			assert.NoError(rt, c.Make(dst, src))
			src[0] = src[0][:len(src[0])-1]
			assert.Error(rt, c.Make(dst, src), "a source that is too short")
		}
	})
}
