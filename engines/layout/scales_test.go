package layout

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func quantModel() kvwire.ModelFacts {
	return kvwire.ModelFacts{
		WeightsID: "w", DType: "bfloat16", Quantization: "int8", Scales: "page", RoPE: "base=1", Layers: 3, KVHeads: 4, HeadSize: 8,
	}
}

func withScales(t *testing.T, layout string, block, page int, heads [2]int, per ...string) Descriptor {
	t.Helper()
	w := kvwire.Descriptor{
		Layout: layout, DType: "int8", BlockTokens: block, TPSize: 1, PPSize: 1, Layers: [2]int{0, 3}, Heads: heads,
	}
	for _, p := range per {
		w.Scales = append(w.Scales, kvwire.ScaleArray{Per: p, DType: "float32"})
	}
	w, err := Sized(quantModel(), w)
	require.NoError(t, err)
	d, err := Describe(quantModel(), w, page)
	require.NoError(t, err)
	return d
}

// TestScalesGoWithTheirNumbers: each scale says of which layer, side, head and
// token it is, and is found where the reader looks for it.
func TestScalesGoWithTheirNumbers(t *testing.T) {
	const block, page = 16, 32
	from := withScales(t, "vllm-lbhnc", block, page, [2]int{0, 4}, kvwire.PerTensor, kvwire.PerTokenHead, kvwire.PerHead)
	to := withScales(t, "sglang-page_first", block, page, [2]int{0, 4}, kvwire.PerHead, kvwire.PerTensor, kvwire.PerTokenHead)
	numbers := 3 * 2 * 4 * block * 8
	tensors, perHead, perToken := 3*2*4, 3*2*4*4, 3*2*4*block*4
	require.Equal(t, 2*(numbers+tensors+perHead+perToken), from.Bytes())

	src := randomBytes(5, from.Bytes())
	dst := translate(t, to, []Descriptor{from}, [][]byte{src})
	half := from.Bytes() / 2
	for b := range 2 {
		s, d := src[b*half:], dst[b*half:]
		assert.Equal(t, s[numbers:][:tensors], d[numbers+perHead:][:tensors], "per tensor")
		assert.Equal(t, s[numbers+tensors:][:perToken], d[numbers+perHead+tensors:][:perToken], "per token and head")
		assert.Equal(t, s[numbers+tensors+perToken:][:perHead], d[numbers:][:perHead], "per head")
	}
	assert.Equal(t, src, translate(t, from, []Descriptor{to}, [][]byte{dst}))
	c, err := from.Canonical()
	require.NoError(t, err)
	assert.Equal(t, block, c.Wire().BlockTokens, "blocks stay where their tokens share scales")
	around := translate(t, to, []Descriptor{c}, [][]byte{translate(t, c, []Descriptor{from}, [][]byte{src})})
	assert.Equal(t, dst, around)
}

func TestScalesByTokenFollowTheirTokenIntoOtherBlocksAndShards(t *testing.T) {
	const page = 32
	left := withScales(t, "vllm-lbhnc", 16, page, [2]int{0, 2}, kvwire.PerTokenHead)
	right := withScales(t, "vllm-lbhnc", 16, page, [2]int{2, 4}, kvwire.PerTokenHead)
	to := withScales(t, "canonical", page, page, [2]int{1, 4}, kvwire.PerTokenHead)
	var srcs [][]byte
	for _, d := range []Descriptor{left, right} {
		b := make([]byte, d.Bytes())
		half := len(b) / 2
		for i := range 3 * 2 * 2 * page {
			l, c, h, tok := i/(2*2*page), i/(2*page)%2, i/page%2, i%page
			at := tok/16*half + 3*2*2*16*8 + (((l*2+c)*2+h)*16+tok%16)*4
			binary.LittleEndian.PutUint32(b[at:], uint32(l*1000000+c*100000+(h+d.wire.Heads[0])*1000+tok))
		}
		srcs = append(srcs, b)
	}
	got := translate(t, to, []Descriptor{left, right}, srcs)
	at := 3 * 2 * 3 * page * 8
	for l := range 3 {
		for c := range 2 {
			for h := 1; h < 4; h++ {
				for tok := range page {
					require.EqualValues(t, l*1000000+c*100000+h*1000+tok, binary.LittleEndian.Uint32(got[at:]))
					at += 4
				}
			}
		}
	}
}

func TestSharedScalesThatCannotBeShared(t *testing.T) {
	_, err := NewPlan(withScales(t, "canonical", 32, 32, [2]int{0, 4}, kvwire.PerHead), withScales(t, "canonical", 16, 32, [2]int{0, 4}, kvwire.PerHead))
	assert.ErrorContains(t, err, "descriptor.block_tokens is 16, must be 32 as the tokens of a block share scales by head")

	left, right := withScales(t, "canonical", 32, 32, [2]int{0, 2}, kvwire.PerTensor), withScales(t, "canonical", 32, 32, [2]int{2, 4}, kvwire.PerTensor)
	_, err = NewPlan(withScales(t, "canonical", 32, 32, [2]int{0, 4}, kvwire.PerTensor), left, right)
	assert.ErrorContains(t, err, "descriptor.heads is [0, 2), must be all of [0, 4) as they share scales by tensor")
	_, err = NewPlan(withScales(t, "vllm-lbhnc", 32, 32, [2]int{2, 3}, kvwire.PerTensor), left, right)
	assert.NoError(t, err, "one shard has all the heads")

	_, err = NewPlan(withScales(t, "canonical", 32, 32, [2]int{0, 4}, kvwire.PerTokenHead), withScales(t, "canonical", 32, 32, [2]int{0, 4}, kvwire.PerHead))
	assert.ErrorContains(t, err, "descriptor.scales is [head float32], must be [token_head float32]")
}

// TestBytesBetweenAreCleared: what no number fills must not show what the
// destination held before.
func TestBytesBetweenAreCleared(t *testing.T) {
	m := kvwire.ModelFacts{WeightsID: "w", DType: "int8", RoPE: "none", Layers: 2, KVHeads: 2, HeadSize: 4}
	w := kvwire.Descriptor{
		Layout: "padded", DType: "int8", BlockTokens: 2, BlockBytes: 200, TPSize: 1, PPSize: 1, Layers: [2]int{0, 2}, Heads: [2]int{0, 2},
		Axes: []string{"dim", "layer", "kv", "head", "token"}, Strides: []int64{48, 24, 12, 6, 2},
	}
	padded, err := Describe(m, w, 4)
	require.NoError(t, err)
	c, err := padded.Canonical()
	require.NoError(t, err)
	src := bytes.Repeat([]byte{7}, c.Bytes())
	got := translate(t, padded, []Descriptor{c}, [][]byte{src})
	assert.Equal(t, len(src), bytes.Count(got, []byte{7}))
	assert.Equal(t, len(got)-len(src), bytes.Count(got, []byte{0}))
	assert.Equal(t, src, translate(t, c, []Descriptor{padded}, [][]byte{got}))
}

func TestRawBytesAreTheNumbersThatTheModelNames(t *testing.T) {
	for quantization, dtype := range map[string]string{"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"} {
		m := quantModel()
		m.Quantization = quantization
		make1 := func(name string) Descriptor {
			w, err := Sized(m, kvwire.Descriptor{Layout: "trtllm-hnd", DType: name, BlockTokens: 16, TPSize: 1, PPSize: 1, Layers: [2]int{0, 3}, Heads: [2]int{0, 4}})
			require.NoError(t, err)
			d, err := Describe(m, w, 16)
			require.NoError(t, err)
			return d
		}
		_, err := NewPlan(make1(dtype), make1("uint8"))
		assert.NoError(t, err, quantization)
	}
}

// TestScalesBetweenTheNumbers: vLLM's per-token-head caches keep a scale behind
// the dims of each token and head.
func TestScalesBetweenTheNumbers(t *testing.T) {
	m := quantModel()
	const block, page, dims = 16, 32, 8
	cell := int64(dims + 4)
	w := kvwire.Descriptor{
		Layout: "vllm-lbhnc-padded", DType: "int8", BlockTokens: block, BlockBytes: 3 * 4 * block * 2 * cell,
		TPSize: 1, PPSize: 1, Layers: [2]int{0, 3}, Heads: [2]int{0, 4},
		Axes: []string{"layer", "head", "token", "kv", "dim"}, Strides: []int64{4 * block * 2 * cell, block * 2 * cell, 2 * cell, cell, 1},
	}
	scales := kvwire.ScaleArray{
		Per: kvwire.PerTokenHead, DType: "float32", Offset: dims,
		Axes: []string{"layer", "head", "token", "kv"}, Strides: []int64{4 * block * 2 * cell, block * 2 * cell, 2 * cell, cell},
	}
	w.Scales = []kvwire.ScaleArray{scales}
	from, err := Describe(m, w, page)
	require.NoError(t, err)
	to := withScales(t, "trtllm-hnd", page, page, [2]int{0, 4}, kvwire.PerTokenHead)
	src := randomBytes(9, from.Bytes())
	dst := translate(t, to, []Descriptor{from}, [][]byte{src})
	at := func(l, c, h, tok int) int { return (((l*2+c)*4+h)*page + tok) }
	for i := range 3 * 2 * 4 * page {
		l, c, h, tok := i/(2*4*page), i/(4*page)%2, i/page%4, i%page
		cellAt := tok/block*int(w.BlockBytes) + (((l*4+h)*block+tok%block)*2+c)*int(cell)
		require.Equal(t, src[cellAt:][:dims], dst[at(l, c, h, tok)*dims:][:dims])
		require.Equal(t, src[cellAt+dims:][:4], dst[3*2*4*page*dims+at(l, c, h, tok)*4:][:4])
	}
	assert.Equal(t, src, translate(t, from, []Descriptor{to}, [][]byte{dst}))

	for name, change := range map[string]func(s *kvwire.ScaleArray){
		"into the numbers":      func(s *kvwire.ScaleArray) { s.Offset = dims - 1 },
		"into the next numbers": func(s *kvwire.ScaleArray) { s.Offset = dims + 1 },
		"another stride":        func(s *kvwire.ScaleArray) { s.Strides = []int64{4 * block * 2 * cell, block * 2 * cell, 2 * cell, 4} },
		"a scale for all the block": func(s *kvwire.ScaleArray) {
			s.Per, s.Axes, s.Strides = kvwire.PerHead, []string{"layer", "head", "kv"}, []int64{4 * block * 2 * cell, block * 2 * cell, cell}
		},
	} {
		changed := scales
		change(&changed)
		w.Scales = []kvwire.ScaleArray{changed}
		_, err := Describe(m, w, page)
		assert.ErrorContains(t, err, "descriptor.scales.offset", name)
	}
}
