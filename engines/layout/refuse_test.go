package layout

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func smallModel() kvwire.ModelFacts {
	return kvwire.ModelFacts{WeightsID: "w", DType: "bfloat16", RoPE: "base=10000", Layers: 4, KVHeads: 4, HeadSize: 32}
}

func smallWire() kvwire.Descriptor {
	return kvwire.Descriptor{
		Layout: "vllm-lbhnc", DType: "bfloat16", BlockTokens: 32, BlockBytes: 4 * 2 * 4 * 32 * 32 * 2,
		TPSize: 1, PPSize: 1, Layers: [2]int{0, 4}, Heads: [2]int{0, 4},
	}
}

func TestWhatDescribeRefuses(t *testing.T) {
	_, err := Describe(smallModel(), smallWire(), 64)
	require.NoError(t, err)
	type change = func(m *kvwire.ModelFacts, w *kvwire.Descriptor, page *int)
	for _, c := range []struct {
		name   string
		change change
		want   string
	}{
		{"unknown layout", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Layout = "vllm-cbhln" }, `descriptor.layout is "vllm-cbhln"`},
		{"page not divisible", func(_ *kvwire.ModelFacts, _ *kvwire.Descriptor, p *int) { *p = 48 }, "descriptor.block_tokens is 32, must be 48 (page_tokens) divided by"},
		{"block bytes", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.BlockBytes-- }, "descriptor.block_bytes is 65535, must be 65536"},
		{"dtype", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.DType = "float64" }, `descriptor.dtype is "float64"`},
		{"bytes that are nothing", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.DType = "uint8" }, `model.quantization is ""`},
		{"dtype against quantization", func(m *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			m.Quantization, w.DType = "fp8_e5m2", "float8_e4m3fn"
		}, `descriptor.dtype is "float8_e4m3fn", must be float8_e5m2`},
		{"unknown packing", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Packing = "neon" }, `descriptor.packing is "neon", must be "" or one of amx, vec, vec16`},
		{"packing of the wrong layout", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Layout, w.Packing = "vllm-lbnhc", "vec"
		}, `descriptor.packing is "vec", must be "" with descriptor.layout vllm-lbnhc`},
		{"packing of axes", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Packing, w.Axes, w.Strides = "vec", []string{"layer"}, []int64{1}
		}, "descriptor.axes is given"},
		{"amx of float32", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Packing, w.DType = "amx", "float32" }, `descriptor.dtype is "float32", must be of a size that amx packs`},
		{"vec of a small block", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Packing, w.BlockTokens = "vec", 8 }, "descriptor.block_tokens is 8, must be a multiple of 16"},
		{"vec of a small head", func(m *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Packing, m.HeadSize = "vec", 80 }, "model.head_size is 80, must be a multiple of 32"},
		{"MLA with heads", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.MLA = true }, "model.kv_heads is 4, must be 1 with MLA"},
		{"MLA in page_head", func(m *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			m.MLA, m.KVHeads, w.Heads, w.Layout = true, 1, [2]int{0, 1}, "sglang-page_head"
		}, `descriptor.layout is "sglang-page_head", must be one that exists for MLA`},
		{"MHA in an MLA block", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Layout = "trtllm-mla" }, "must be one that exists without MLA"},
		{"MLA packed", func(m *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			m.MLA, m.KVHeads, w.Heads, w.Packing = true, 1, [2]int{0, 1}, "vec"
		}, `descriptor.packing is "vec", must be "" with MLA`},
		{"other axes than the layout's", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Axes, w.Strides = []string{"layer", "token", "head", "kv", "dim"}, []int64{1, 2, 3, 4, 5}
		}, "descriptor.axes is layer, token, head, kv, dim, must be layer, head, token, kv, dim"},
		{"other strides than the layout's", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Axes, w.Strides = []string{"layer", "head", "token", "kv", "dim"}, []int64{16384, 4096, 128, 64, 4}
		}, "descriptor.strides[dim] is 4, must be 2"},
		{"unknown axis", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Layout, w.Axes, w.Strides = "own", []string{"layer", "page"}, []int64{1, 2}
		}, `descriptor.axes is "page"`},
		{"axis twice", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Layout, w.Axes, w.Strides = "own", []string{"layer", "layer"}, []int64{1, 2}
		}, `descriptor.axes is "layer"`},
		{"axis left out", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Layout, w.Axes, w.Strides = "own", []string{"layer"}, []int64{1}
		}, "descriptor.axes is layer, must be all of layer, kv, head, token, dim"},
		{"axes that overlap", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Layout, w.Axes, w.Strides = "own", []string{"layer", "kv", "head", "token", "dim"}, []int64{16384, 8192, 2048, 62, 2}
		}, "descriptor.strides[token] is 62, must be at least 64"},
		{"axis that steps back", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Layout, w.Axes, w.Strides = "own", []string{"layer", "kv", "head", "token", "dim"}, []int64{-16384, 8192, 2048, 64, 2}
		}, "descriptor.strides[layer] is -16384"},
		{"axes beyond the block", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Layout, w.Axes, w.Strides = "own", []string{"layer", "kv", "head", "token", "dim"}, []int64{16386, 8192, 2048, 64, 2}
		}, "descriptor.block_bytes is 65536, must be at least 65542"},
		{"unknown scales", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Scales = []kvwire.ScaleArray{{Per: kvwire.PerHead, DType: "int4"}}
		}, `descriptor.scales.dtype is "int4"`},
		{"scales twice", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Scales = []kvwire.ScaleArray{{Per: kvwire.PerHead, DType: "float32"}, {Per: kvwire.PerHead, DType: "float32"}}
		}, `descriptor.scales.per is "head", must be given once`},
		{"scales with an offset and no axes", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Scales = []kvwire.ScaleArray{{Per: kvwire.PerHead, DType: "float32", Offset: 4}}
		}, "descriptor.scales.offset is 4, must be 0 without axes"},
		{"scales inside the numbers", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Scales = []kvwire.ScaleArray{{Per: kvwire.PerTensor, DType: "float32", Offset: 4, Axes: []string{"layer", "kv"}, Strides: []int64{8, 4}}}
		}, "descriptor.scales.offset is 4, must be beyond the array before it, which ends at 65536"},
		{"scales beyond the block", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Scales = []kvwire.ScaleArray{{Per: kvwire.PerTensor, DType: "float32", Offset: 65536, Axes: []string{"layer", "kv"}, Strides: []int64{8, 4}}}
		}, "descriptor.block_bytes is 65536, must be at least 65568"},
		{"scales with axes they do not have", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Scales = []kvwire.ScaleArray{{Per: kvwire.PerTensor, DType: "float32", Axes: []string{"head"}, Strides: []int64{4}}}
		}, `descriptor.scales.axes is "head", must be one of layer, kv`},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, w, page := smallModel(), smallWire(), 64
			c.change(&m, &w, &page)
			_, err := Describe(m, w, page)
			assert.ErrorContains(t, err, c.want)
		})
	}
}

func TestWhatAPlanRefuses(t *testing.T) {
	type change = func(m *kvwire.ModelFacts, w *kvwire.Descriptor, page *int)
	for _, c := range []struct {
		name   string
		change change
		want   string
	}{
		{"dtype of equal size", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.DType = "float16" }, `descriptor.dtype is "float16", must be "bfloat16"`},
		{"logical dtype", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.DType = "float16" }, `model.dtype is "float16", must be "bfloat16"`},
		{"weights of equal shape", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.WeightsID = "v" }, `model.weights_id is "v", must be "w"`},
		{"RoPE", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.RoPE = "base=500000" }, `model.rope is "base=500000", must be "base=10000"`},
		{"epoch", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.KVEpoch = "2" }, `model.kv_epoch is "2", must be ""`},
		{"quantization", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.Quantization = "int4" }, `model.quantization is "int4", must be ""`},
		{"scales", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.Scales = "s" }, `model.scales is "s", must be ""`},
		{"layers", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.Layers = 5 }, "model.layers is 5, must be 4"},
		{"heads", func(m *kvwire.ModelFacts, _ *kvwire.Descriptor, _ *int) { m.KVHeads = 5 }, "model.kv_heads is 5, must be 4"},
		{"page", func(_ *kvwire.ModelFacts, _ *kvwire.Descriptor, p *int) { *p = 128 }, "page_tokens is 128, must be 64"},
		{"a layer too few", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Layers[1] = 3 }, "without head 0 of layer 3, must be held by one of the 1 shards"},
		{"a head too few", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Heads[0] = 1 }, "without head 0 of layer 0"},
		{"a group", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) { w.Group = "mamba" }, `descriptor.group is "mamba", must be ""`},
		{"scales in the page", func(_ *kvwire.ModelFacts, w *kvwire.Descriptor, _ *int) {
			w.Scales = []kvwire.ScaleArray{{Per: kvwire.PerHead, DType: "float32"}}
		}, "descriptor.scales is [head float32], must be []"},
	} {
		t.Run(c.name, func(t *testing.T) {
			reader, err := Describe(smallModel(), smallWire(), 64)
			require.NoError(t, err)
			m, w, page := smallModel(), smallWire(), 64
			c.change(&m, &w, &page)
			w, err = Sized(m, w)
			require.NoError(t, err)
			writer, err := Describe(m, w, page)
			require.NoError(t, err)
			_, err = NewPlan(reader, writer)
			var refused *Error
			require.ErrorAs(t, err, &refused)
			assert.ErrorContains(t, err, c.want)
			assert.ErrorContains(t, err, `cannot translate to "vllm-lbhnc"`)
		})
	}
}

func TestBlocksThatDoNotDivideEachOther(t *testing.T) {
	m := smallModel()
	block := func(n int) Descriptor {
		w := smallWire()
		w.BlockTokens = n
		w, err := Sized(m, w)
		require.NoError(t, err)
		d, err := Describe(m, w, 48)
		require.NoError(t, err)
		return d
	}
	_, err := NewPlan(block(16), block(24))
	assert.ErrorContains(t, err, "descriptor.block_tokens is 24, must be a multiple or a divisor of 16")
	_, err = NewPlan(block(48), block(24))
	assert.NoError(t, err)
}

func TestPlansOfNothing(t *testing.T) {
	d, err := Describe(smallModel(), smallWire(), 64)
	require.NoError(t, err)
	_, err = NewPlan(Descriptor{}, d)
	assert.ErrorContains(t, err, "descriptor is empty")
	_, err = NewPlan(d, Descriptor{})
	assert.ErrorContains(t, err, "page_tokens is 0, must be 64")
	_, err = NewPlan(d)
	assert.ErrorContains(t, err, "shards is 0")
	many := make([]Descriptor, kvwire.MaxShards)
	for i := range many {
		many[i] = d
	}
	_, err = NewPlan(d, many...)
	assert.NoError(t, err)
	_, err = NewPlan(d, append(many, d)...)
	assert.ErrorContains(t, err, "shards is 513, must be from 1 to 512")
	assert.Zero(t, Descriptor{}.Bytes())
}

func TestRunRefusesOtherSizes(t *testing.T) {
	d, err := Describe(smallModel(), smallWire(), 64)
	require.NoError(t, err)
	p, err := NewPlan(d, d)
	require.NoError(t, err)
	b := make([]byte, d.Bytes())
	assert.NoError(t, p.Run(b, b[:len(b):len(b)]))
	assert.EqualError(t, p.Run(b), "cannot translate 0 objects: the plan takes 1")
	assert.EqualError(t, p.Run(b[1:], b), "cannot translate into 131071 bytes: the object has 131072")
	assert.EqualError(t, p.Run(b, b[1:]), "cannot translate object 0 of 131071 bytes: it has 131072")
}

// TestLimits: the largest value of each dimension is taken, one more is not.
func TestLimits(t *testing.T) {
	one := kvwire.ModelFacts{WeightsID: "w", DType: "int8", RoPE: "none", Layers: 1, KVHeads: 1, HeadSize: 1}
	wire := kvwire.Descriptor{Layout: canonical, DType: "int8", BlockTokens: 1, TPSize: 1, PPSize: 1}
	describe := func(m kvwire.ModelFacts, block, page int) error {
		w := wire
		w.BlockTokens, w.Layers, w.Heads = block, [2]int{0, m.Layers}, [2]int{0, m.KVHeads}
		w, err := Sized(m, w)
		if err != nil {
			return err
		}
		d, err := Describe(m, w, page)
		if err != nil {
			return err
		}
		_, err = NewPlan(d, d)
		return err
	}
	const most = 1 << 20
	for name, c := range map[string]struct {
		change func(m *kvwire.ModelFacts, block, page *int, n int)
		limit  int
		want   string
	}{
		"layers":             {func(m *kvwire.ModelFacts, _, _ *int, n int) { m.Layers = n }, most, "model.layers"},
		"heads":              {func(m *kvwire.ModelFacts, _, _ *int, n int) { m.KVHeads = n }, most, "model.kv_heads"},
		"dims":               {func(m *kvwire.ModelFacts, _, _ *int, n int) { m.HeadSize = n }, most, "model.head_size"},
		"tokens in a page":   {func(_ *kvwire.ModelFacts, _, page *int, n int) { *page = n }, kvwire.MaxPageTokens, "page_tokens"},
		"tokens in a block":  {func(_ *kvwire.ModelFacts, block, page *int, n int) { *block, *page = n, n }, kvwire.MaxPageTokens, "descriptor.block_tokens"},
		"bytes of a block":   {func(m *kvwire.ModelFacts, _, _ *int, n int) { m.Layers, m.KVHeads = 1<<8, n }, kvwire.MaxObject >> 9, "descriptor.block_bytes"},
		"bytes of an object": {func(m *kvwire.ModelFacts, _, page *int, n int) { m.Layers, *page = kvwire.MaxObject>>11, n }, 1 << 10, "descriptor.block_bytes"},
	} {
		m, block, page := one, 1, 1
		c.change(&m, &block, &page, c.limit)
		assert.NoError(t, describe(m, block, page), name)
		m, block, page = one, 1, 1
		c.change(&m, &block, &page, c.limit+1)
		err := describe(m, block, page)
		assert.ErrorContains(t, err, c.want, name)
		assert.Contains(t, []kvwire.Code{kvwire.CodeTooLarge, kvwire.CodeBadField}, kvwire.CodeOf(err), name)
	}
	huge := kvwire.ModelFacts{WeightsID: "w", DType: "int8", RoPE: "none", Layers: most, KVHeads: most, HeadSize: most}
	assert.ErrorContains(t, describe(huge, kvwire.MaxPageTokens, kvwire.MaxPageTokens), "descriptor.block_bytes", "a product beyond 64 bits")
	assert.ErrorContains(t, describe(one, 1, 0), "page_tokens")
}

func TestStridesHaveALimit(t *testing.T) {
	m := smallModel()
	w := smallWire()
	w.Layout, w.Axes = "own", []string{"kv", "head", "token", "dim", "layer"}
	w.Strides = []int64{8192, 2048, 64, 2, 1 << 62}
	w.BlockBytes = kvwire.MaxObject
	_, err := Describe(m, w, 32)
	assert.ErrorContains(t, err, "steps of 4611686018427387904 bytes along layer are more than")
	w.Strides[4] = (kvwire.MaxObject - 16384) / 3
	_, err = Describe(m, w, 32)
	assert.NoError(t, err)
	w.Strides[4] += 1
	_, err = Describe(m, w, 32)
	assert.Error(t, err)
}

func TestHeadWindowRefuses(t *testing.T) {
	m := smallModel()
	for _, c := range []struct {
		tp, rank int
		want     string
	}{
		{0, 0, "descriptor.tp_rank is 0"},
		{2, 2, "descriptor.tp_rank is 2"},
		{2, -1, "descriptor.tp_rank is -1"},
		{3, 0, "model.kv_heads is 4, must be a multiple or a divisor of descriptor.tp_size 3"},
		{6, 0, "descriptor.tp_size 6"},
	} {
		_, err := HeadWindow(m, c.tp, c.rank)
		assert.ErrorContains(t, err, c.want)
	}
	w := smallWire()
	w.TPSize, w.TPRank, w.Heads = 2, 1, [2]int{0, 2}
	w, err := Sized(m, w)
	require.NoError(t, err)
	d, err := Describe(m, w, 64)
	require.NoError(t, err, "a rank may hold any heads")
	_, err = d.Ranks()
	assert.ErrorContains(t, err, "descriptor.heads is [0, 2), must be [2, 4)")
}

func TestPartsHaveALimit(t *testing.T) {
	m := smallModel()
	m.Layers, m.KVHeads, m.HeadSize = 200, 8, 1
	describe := func(layers, heads [2]int) Descriptor {
		w := smallWire()
		w.BlockTokens, w.Layers, w.Heads = 1, layers, heads
		w, err := Sized(m, w)
		require.NoError(t, err)
		d, err := Describe(m, w, 1)
		require.NoError(t, err)
		return d
	}
	reader := describe([2]int{0, 200}, [2]int{0, 8})
	var writers []Descriptor
	for h := range 8 {
		writers = append(writers, describe([2]int{0, 200}, [2]int{h, h + 1}))
	}
	for cut := 1; cut < maxParts/8; cut++ {
		writers = append(writers, describe([2]int{0, cut}, [2]int{7, 8}))
	}
	p, err := NewPlan(reader, writers...)
	require.NoError(t, err)
	assert.Len(t, p.Needs(), 8)
	_, err = NewPlan(reader, append(writers, describe([2]int{0, maxParts / 8}, [2]int{7, 8}))...)
	assert.ErrorContains(t, err, "shards is in more than 1024 pieces")
}

func TestErrorsAreShort(t *testing.T) {
	w := smallWire()
	w.Layout = strings.Repeat("x", 1000)
	_, err := Describe(smallModel(), w, 64)
	require.Error(t, err)
	assert.Less(t, len(err.Error()), 300)
}
