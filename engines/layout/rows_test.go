package layout

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/kvwire"
)

// shape is the geometry of one shard: tokens B and blocks in a page, layers,
// heads and dims held.
type shape struct{ B, blocks, L, H, D int }

// row says again, as a formula of its own, where the package's table puts an
// element: which number of its block it is, for side c (K is 0), layer l, head
// h, token t of the block and dim d. With MLA c and h are 0, and H is 1.
type row struct {
	layout, packing string
	mha             func(s shape, c, l, h, t, d int) int
	mla             func(s shape, l, t, d int) int
}

func mlaLayerFirst(s shape, l, t, d int) int { return (l*s.B+t)*s.D + d }

func layerSideHead(s shape, c, l, h, t, d int) int {
	return (((l*2+c)*s.H+h)*s.B+t)*s.D + d
}

func layerSideToken(s shape, c, l, h, t, d int) int {
	return (((l*2+c)*s.B+t)*s.H+h)*s.D + d
}

func sideLayerToken(s shape, c, l, h, t, d int) int {
	return (((c*s.L+l)*s.B+t)*s.H+h)*s.D + d
}

func contentByHead(s shape, c, l, h, t, d int) int {
	return ((l*s.H+h)*s.B+t)*2*s.D + c*s.D + d
}

func contentByToken(s shape, c, l, h, t, d int) int {
	return ((l*s.B+t)*s.H+h)*2*s.D + c*s.D + d
}

func contentHeadOutermost(s shape, c, l, h, t, d int) int {
	return ((h*s.L+l)*s.B+t)*2*s.D + c*s.D + d
}

// vec and amx return the number within the 2·B·D of a head.
func vec(s shape, c, t, d int) int {
	if c == 0 {
		return d*s.B + t
	}
	return s.B*s.D + t*s.D + d
}

func amx(s shape, c, t, d int) int {
	if c == 0 {
		return t/16*16*s.D + d/2*32 + t%16*2 + d%2
	}
	return s.B*s.D + d/16*16*s.B + t/2*32 + d%16*2 + t%2
}

func packedBy(in func(s shape, c, t, d int) int) func(s shape, c, l, h, t, d int) int {
	return func(s shape, c, l, h, t, d int) int { return (l*s.H+h)*2*s.B*s.D + in(s, c, t, d) }
}

func packedHeadOutermost(in func(s shape, c, t, d int) int) func(s shape, c, l, h, t, d int) int {
	return func(s shape, c, l, h, t, d int) int { return (h*s.L+l)*2*s.B*s.D + in(s, c, t, d) }
}

var rows = []row{
	{"canonical", "", layerSideHead, mlaLayerFirst},
	{"vllm-nhd", "", layerSideToken, mlaLayerFirst},
	{"vllm-hnd", "", layerSideHead, mlaLayerFirst},
	{"vllm-packed-nhd", "", contentByToken, mlaLayerFirst},
	{"vllm-packed-hnd", "", contentByHead, mlaLayerFirst},
	{"vllm-lbhnc", "", contentByHead, mlaLayerFirst},
	{"vllm-lbhnc", "vec", packedBy(vec), nil},
	{"vllm-lbhnc", "vec16", packedBy(vec), nil},
	{"vllm-lbhnc", "amx", packedBy(amx), nil},
	{"vllm-packed-hnd", "vec", packedBy(vec), nil},
	{"vllm-bhlnc", "amx", packedHeadOutermost(amx), nil},
	{"vllm-bhlnc", "vec", packedHeadOutermost(vec), nil},
	{"vllm-lbnhc", "", contentByToken, mlaLayerFirst},
	{"vllm-blhnc", "", contentByHead, mlaLayerFirst},
	{"vllm-blnhc", "", contentByToken, mlaLayerFirst},
	{"vllm-lhbnc", "", contentByHead, mlaLayerFirst},
	{"vllm-bhlnc", "", contentHeadOutermost, mlaLayerFirst},
	{"sglang-layer_first", "", layerSideToken, mlaLayerFirst},
	{"sglang-layer_first-flat", "", sideLayerToken, mlaLayerFirst},
	{"sglang-page_first", "", func(s shape, c, l, h, t, d int) int {
		return (((c*s.B+t)*s.L+l)*s.H+h)*s.D + d
	}, func(s shape, l, t, d int) int { return (t*s.L+l)*s.D + d }},
	{"sglang-page_first_direct", "", sideLayerToken, mlaLayerFirst},
	{"sglang-page_head", "", func(s shape, c, l, h, t, d int) int {
		return (((c*s.H+h)*s.B+t)*s.L+l)*s.D + d
	}, nil},
	{"trtllm-hnd", "", layerSideHead, nil},
	{"trtllm-nhd", "", layerSideToken, nil},
	{"trtllm-mla", "", nil, mlaLayerFirst},
}

func TestEveryLayoutAndPackingHasARow(t *testing.T) {
	for _, name := range Names() {
		assert.True(t, hasRow(func(r row) bool { return r.layout == name && r.packing == "" }), name)
		e, _ := entryNamed(name)
		for _, r := range rows {
			if r.layout == name && r.packing == "" {
				assert.Equal(t, e.kinds&mha != 0, r.mha != nil, "%s has MHA", name)
				assert.Equal(t, e.kinds&mla != 0, r.mla != nil, "%s has MLA", name)
			}
		}
	}
	for _, packing := range Packings() {
		assert.True(t, hasRow(func(r row) bool { return r.packing == packing }), packing)
	}
}

func hasRow(is func(row) bool) bool {
	for _, r := range rows {
		if is(r) {
			return true
		}
	}
	return false
}

// at returns the element's place in the object, counted in elements.
func (r row) at(s shape, latent bool, c, l, h, t, d int) int {
	b, t := t/s.B, t%s.B
	if latent {
		return b*s.L*s.B*s.D + r.mla(s, l, t, d)
	}
	return b*2*s.L*s.H*s.B*s.D + r.mha(s, c, l, h, t, d)
}

// one is a shard in a drawn layout, with its row for the reference.
type one struct {
	row
	Descriptor
}

func (o one) shape() shape {
	return shape{o.wire.BlockTokens, o.blocks(), o.layers(), o.heads(), o.model.HeadSize}
}

func (o one) element(s shape, c, l, h, t, d int) int {
	return o.at(s, o.model.MLA, c, l-o.wire.Layers[0], h-o.wire.Heads[0], t, d)
}

// reference moves every number of a page by itself, for as many layers, heads
// and tokens as the reader holds.
func reference(t require.TestingT, to one, dst []byte, from []one, srcs [][]byte) {
	unit := len(dst) / (to.layers() * to.sides() * to.heads() * to.pageTokens * to.model.HeadSize)
	for l := to.wire.Layers[0]; l < to.wire.Layers[1]; l++ {
		for h := to.wire.Heads[0]; h < to.wire.Heads[1]; h++ {
			w := holder(t, from, l, h)
			into, out := to.shape(), from[w].shape()
			for c := range to.sides() {
				for tok := range to.pageTokens {
					for d := range to.model.HeadSize {
						i, j := to.element(into, c, l, h, tok, d)*unit, from[w].element(out, c, l, h, tok, d)*unit
						copy(dst[i:i+unit], srcs[w][j:j+unit])
					}
				}
			}
		}
	}
}

func holder(t require.TestingT, from []one, l, h int) int {
	for i, w := range from {
		if w.wire.Layers[0] <= l && l < w.wire.Layers[1] && w.wire.Heads[0] <= h && h < w.wire.Heads[1] {
			return i
		}
	}
	require.Fail(t, "no holder", "layer %d head %d", l, h)
	return -1
}

func drawModel(t *rapid.T, latent bool) kvwire.ModelFacts {
	m := kvwire.ModelFacts{
		WeightsID: "w", DType: "float32", RoPE: "base=10000", MLA: latent,
		Layers: rapid.IntRange(1, 3).Draw(t, "layers"), KVHeads: rapid.IntRange(1, 3).Draw(t, "heads"),
		HeadSize: rapid.SampledFrom([]int{1, 3, 8, 12, 16, 32, 48}).Draw(t, "dim"),
	}
	if latent {
		m.KVHeads = 1
	}
	return m
}

// pages are the drawn sizes of pages; each drawn block divides each of them.
var (
	drawnPages  = []int{32, 64, 96}
	drawnBlocks = []int{1, 2, 8, 16, 32}
)

func drawWire(t *rapid.T, r row, m kvwire.ModelFacts, dtype, label string) (kvwire.Descriptor, bool) {
	w := kvwire.Descriptor{
		Layout: r.layout, Packing: r.packing, DType: dtype, BlockTokens: rapid.SampledFrom(drawnBlocks).Draw(t, label+" block"),
		TPSize: 1, PPSize: 1, Layers: [2]int{0, m.Layers}, Heads: [2]int{0, m.KVHeads},
	}
	if p, ok := packings[r.packing]; ok {
		if m.HeadSize%p.dims != 0 || dtypes[dtype] == 1 || r.packing == "amx" && dtypes[dtype] != 2 {
			return w, false
		}
		w.BlockTokens = p.tokens
	}
	return w, true
}

func describe(t require.TestingT, r row, m kvwire.ModelFacts, w kvwire.Descriptor, page int) one {
	w, err := Sized(m, w)
	require.NoError(t, err, "%s %s", r.layout, r.packing)
	d, err := Describe(m, w, page)
	require.NoError(t, err, "%s %s", r.layout, r.packing)
	return one{r, d}
}

// pairsOf calls do for every two rows that can be translated into each other.
func pairsOf(t *testing.T, do func(t *testing.T, from, to row, latent bool)) {
	for _, from := range rows {
		for _, to := range rows {
			for _, latent := range []bool{false, true} {
				if latent && (from.mla == nil || to.mla == nil) || !latent && (from.mha == nil || to.mha == nil) {
					continue
				}
				name := fmt.Sprintf("%s%s to %s%s mla=%t", from.layout, from.packing, to.layout, to.packing, latent)
				t.Run(name, func(t *testing.T) { do(t, from, to, latent) })
			}
		}
	}
}
