package layout

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func opaque(t *testing.T, change func(w *kvwire.Descriptor)) Descriptor {
	t.Helper()
	w := kvwire.Descriptor{
		Layout: "vllm-mamba", DType: "int8", Group: "mamba", BlockTokens: 32, BlockBytes: 1000,
		TPSize: 2, PPSize: 1, Layers: [2]int{0, 4}, Heads: [2]int{0, 2},
	}
	change(&w)
	d, err := Describe(smallModel(), w, 64)
	require.NoError(t, err)
	return d
}

func TestHybridGroupsAreCarriedWhole(t *testing.T) {
	same := opaque(t, func(*kvwire.Descriptor) {})
	other := opaque(t, func(w *kvwire.Descriptor) { w.TPRank, w.Heads = 1, [2]int{2, 4} })
	p, err := NewPlan(same, other, same)
	require.NoError(t, err)
	assert.Equal(t, []int{1}, p.Needs())
	src, dst := randomBytes(1, 2000), make([]byte, 2000)
	require.NoError(t, p.Run(dst, src))
	assert.Equal(t, src, dst)
	_, err = same.Canonical()
	assert.ErrorContains(t, err, `descriptor.group is "mamba", must be ""`)
}

func TestHybridGroupsAreReadByTheirOwnKindOnly(t *testing.T) {
	reader := opaque(t, func(*kvwire.Descriptor) {})
	for want, change := range map[string]func(w *kvwire.Descriptor){
		`descriptor.group is "sliding-window-1024", must be "mamba"`: func(w *kvwire.Descriptor) { w.Group = "sliding-window-1024" },
		`descriptor.group is "", must be "mamba"`:                    func(w *kvwire.Descriptor) { *w = smallWire(); w.DType = "bfloat16" },
		`descriptor.layout is "x", must be "vllm-mamba" (blocks of`:  func(w *kvwire.Descriptor) { w.Layout = "x" },
		`descriptor.dtype is "uint8", must be "int8"`:                func(w *kvwire.Descriptor) { w.DType = "uint8" },
		"descriptor.packing is":                                      func(w *kvwire.Descriptor) { w.Packing = "vec" },
		"descriptor.block_tokens is 64, must be 32":                  func(w *kvwire.Descriptor) { w.BlockTokens = 64 },
		"descriptor.block_bytes is 999, must be 1000":                func(w *kvwire.Descriptor) { w.BlockBytes = 999 },
		"descriptor.axes is": func(w *kvwire.Descriptor) {
			w.Axes, w.Strides = []string{"layer"}, []int64{250}
		},
		"descriptor.tp_size is 4, must be 2":              func(w *kvwire.Descriptor) { w.TPSize = 4 },
		"descriptor.tp_rank is 1, must be 0":              func(w *kvwire.Descriptor) { w.TPRank = 1 },
		"descriptor.pp_size is 2, must be 1":              func(w *kvwire.Descriptor) { w.PPSize = 2 },
		"descriptor.layers is [0, 3), must be [0, 4)":     func(w *kvwire.Descriptor) { w.Layers[1] = 3 },
		"descriptor.heads is [1, 2), must be [0, 2)":      func(w *kvwire.Descriptor) { w.Heads[0] = 1 },
		`descriptor.scales is "[{head float32 0 [] []}]"`: func(w *kvwire.Descriptor) { w.Scales = []kvwire.ScaleArray{{Per: "head", DType: "float32"}} },
	} {
		_, err := NewPlan(reader, opaque(t, change))
		assert.ErrorContains(t, err, want)
	}
}
