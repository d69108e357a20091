package layout

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/kvwire"
)

// TestShardsHoldEachHeadOfEachLayer: whichever shard they are asked of, the
// shards of a page are the same, in order, and hold the whole page.
func TestShardsHoldEachHeadOfEachLayer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := kvwire.ModelFacts{WeightsID: "w", DType: "float16", RoPE: "none", Layers: rapid.IntRange(1, 7).Draw(t, "layers"), KVHeads: rapid.SampledFrom([]int{1, 2, 3, 4, 8}).Draw(t, "heads"), HeadSize: 32}
		tp, pp := rapid.IntRange(1, 8).Draw(t, "tp"), rapid.IntRange(1, 4).Draw(t, "pp")
		w := kvwire.Descriptor{Layout: "vllm-lbhnc", DType: "float16", BlockTokens: 16, TPSize: tp, PPSize: pp, TPRank: rapid.IntRange(0, tp-1).Draw(t, "tp rank"), PPRank: rapid.IntRange(0, pp-1).Draw(t, "pp rank")}
		var err error
		if w.Heads, err = HeadWindow(m, tp, w.TPRank); err != nil {
			return
		}
		if w.Layers, err = LayerWindow(m, pp, w.PPRank); err != nil {
			return
		}
		w, err = Sized(m, w)
		require.NoError(t, err)
		d, err := Describe(m, w, 32)
		require.NoError(t, err)
		all, err := d.Shards()
		require.NoError(t, err)
		require.Len(t, all, tp*pp)
		require.Equal(t, w, all[w.Shard().Index].Wire())
		again, err := all[len(all)-1].Shards()
		require.NoError(t, err)
		held := map[[2]int]bool{}
		for i := range all {
			require.Equal(t, all[i].Wire(), again[i].Wire())
			require.Equal(t, uint16(i), all[i].Wire().Shard().Index)
			require.Equal(t, w.Form(), all[i].Wire().Form())
			for l := all[i].Wire().Layers[0]; l < all[i].Wire().Layers[1]; l++ {
				for h := all[i].Wire().Heads[0]; h < all[i].Wire().Heads[1]; h++ {
					held[[2]int{l, h}] = true
				}
			}
		}
		require.Len(t, held, m.Layers*m.KVHeads)
	})
}

func TestShardsRefuseWhatFollowsNoRule(t *testing.T) {
	m := kvwire.ModelFacts{WeightsID: "w", DType: "float16", RoPE: "none", Layers: 3, KVHeads: 4, HeadSize: 32}
	base := kvwire.Descriptor{Layout: "vllm-nhd", DType: "float16", BlockTokens: 16, TPSize: 2, PPSize: 1, Layers: [2]int{0, 3}, Heads: [2]int{0, 2}}
	for _, c := range []struct {
		says   string
		change func(*kvwire.Descriptor)
	}{
		{"descriptor.heads is [2, 4), must be [0, 2) on rank 0 of 2", func(w *kvwire.Descriptor) { w.Heads = [2]int{2, 4} }},
		{"descriptor.layers is [0, 2), must be [0, 1) on pipeline rank 0 of 2", func(w *kvwire.Descriptor) { w.PPSize, w.Layers = 2, [2]int{0, 2} }},
		{"model.kv_heads is 4", func(w *kvwire.Descriptor) { w.TPSize = 3 }},
		{"descriptor.pp_size is 4", func(w *kvwire.Descriptor) { w.PPSize = 4 }},
		{"as axes are given", func(w *kvwire.Descriptor) {
			w.PPSize, w.Layers = 2, [2]int{0, 1}
			w.Axes, w.Strides = []string{"layer", "kv", "token", "head", "dim"}, []int64{2 * 16 * 2 * 64, 16 * 2 * 64, 2 * 64, 64, 2}
		}},
	} {
		w := base
		c.change(&w)
		w, err := Sized(m, w)
		require.NoError(t, err)
		d, err := Describe(m, w, 16)
		require.NoError(t, err)
		_, err = d.Shards()
		assert.ErrorContains(t, err, c.says)
	}
	w, err := Sized(m, base)
	require.NoError(t, err)
	assert.NoError(t, CheckWindows(m, w))
}
