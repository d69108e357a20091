package layout

import (
	"maps"
	"slices"
	"strings"
)

// axis is one axis of the numbers of a page.
type axis uint8

// The axes.
const (
	layer axis = iota
	side       // K, then V
	head
	token // in the block
	dim
	axes // how many there are
)

var axisNames = [axes]string{"layer", "kv", "head", "token", "dim"}

func axisNamed(name string) (axis, bool) {
	i := slices.Index(axisNames[:], name)
	return axis(i), i >= 0
}

// kinds says for which attention a layout exists.
type kinds uint8

const (
	mha kinds = 1 << iota // MHA, GQA and MQA: keys and values for each KV head
	mla                   // one latent for all heads, no values
)

// entry is one layout: the axes of a block from the outermost to the innermost,
// densely packed. With MLA the axes kv and head are left out. Each entry has a
// row in the table of the tests.
type entry struct {
	name  string
	order [axes]axis
	kinds kinds
	// packs says that the packings of vLLM's CPU backend may replace the order
	// of token, kv and dim, which are then the innermost axes.
	packs bool
}

// canonical is the layout through which every two others can be translated, and
// that of the embedded engine: a cut by tensor parallel rank is a run for each
// layer and side, a cut by pipeline rank one run.
const canonical = "canonical"

// table is every layout that is known by name. A vLLM connector stores one
// block of each layer after the other, so that there "layer" is outermost
// wherever the engine keeps it, but in BHLNC, where a block's layers lie inside
// each head.
var table = []entry{
	{canonical, [axes]axis{layer, side, head, token, dim}, mha | mla, false},

	// vLLM to 0.25: K and V are two pieces of a layer's block.
	{"vllm-nhd", [axes]axis{layer, side, token, head, dim}, mha | mla, false},
	{"vllm-hnd", [axes]axis{layer, side, head, token, dim}, mha | mla, false},
	// vLLM 0.26 to 0.28: K and V of a token and head lie side by side.
	{"vllm-packed-nhd", [axes]axis{layer, token, head, side, dim}, mha | mla, false},
	{"vllm-packed-hnd", [axes]axis{layer, head, token, side, dim}, mha | mla, true},
	// vLLM from 0.29, named as it names them.
	{"vllm-lbhnc", [axes]axis{layer, head, token, side, dim}, mha | mla, true},
	{"vllm-lbnhc", [axes]axis{layer, token, head, side, dim}, mha | mla, false},
	{"vllm-blhnc", [axes]axis{layer, head, token, side, dim}, mha | mla, true},
	{"vllm-blnhc", [axes]axis{layer, token, head, side, dim}, mha | mla, false},
	{"vllm-lhbnc", [axes]axis{layer, head, token, side, dim}, mha | mla, true},
	{"vllm-bhlnc", [axes]axis{head, layer, token, side, dim}, mha | mla, true},

	// SGLang: the segments that its host pool lists for a page, one after the
	// other. "-flat" is the order of get_data_page, which differs for
	// layer_first only.
	{"sglang-layer_first", [axes]axis{layer, side, token, head, dim}, mha | mla, false},
	{"sglang-layer_first-flat", [axes]axis{side, layer, token, head, dim}, mha | mla, false},
	{"sglang-page_first", [axes]axis{side, token, layer, head, dim}, mha | mla, false},
	{"sglang-page_first_direct", [axes]axis{side, layer, token, head, dim}, mha | mla, false},
	{"sglang-page_head", [axes]axis{side, head, token, layer, dim}, mha, false},

	// TensorRT-LLM: a block of the pool [blocks, layers, kv, block]. Its own
	// attention keeps heads outside, FlashInfer's tokens.
	{"trtllm-hnd", [axes]axis{layer, side, head, token, dim}, mha, false},
	{"trtllm-nhd", [axes]axis{layer, side, token, head, dim}, mha, false},
	{"trtllm-mla", [axes]axis{layer, side, head, token, dim}, mla, false},
}

// piece is a part of an axis: its lowest digit that is not yet taken, which
// counts to n, or with n 0 all that is left.
type piece struct {
	axis axis
	n    int
}

// packing is the order of one head's block inside vLLM's CPU backend: K of the
// whole block, then V, each from its outermost piece to its innermost.
type packing struct {
	k, v []piece
	// tokens and dims divide the block and the head size; sizes are those of
	// the numbers, in bytes, that the kernel packs this way.
	tokens, dims int
	sizes        []int
}

var packings = map[string]packing{
	"vec":   {[]piece{{dim, 0}, {token, 0}}, []piece{{token, 0}, {dim, 0}}, 16, 32, []int{2, 4}},
	"vec16": {[]piece{{dim, 0}, {token, 0}}, []piece{{token, 0}, {dim, 0}}, 16, 16, []int{2, 4}},
	"amx":   {[]piece{{token, 0}, {dim, 0}, {token, 16}, {dim, 2}}, []piece{{dim, 0}, {token, 0}, {dim, 16}, {token, 2}}, 32, 32, []int{2}},
}

// Names returns the layouts that are known by name.
func Names() []string {
	var all []string
	for _, e := range table {
		all = append(all, e.name)
	}
	return all
}

// Packings returns the packings that are known by name, "" for none aside.
func Packings() []string { return sortedKeys(packings) }

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func entryNamed(name string) (entry, bool) {
	i := slices.IndexFunc(table, func(e entry) bool { return e.name == name })
	if i < 0 {
		return entry{}, false
	}
	return table[i], true
}

// orderOf returns the layout's axes, without kv and head for MLA.
func (e entry) orderOf(latent bool) []axis {
	order := slices.Clone(e.order[:])
	if latent {
		order = slices.DeleteFunc(order, func(a axis) bool { return a == side || a == head })
	}
	return order
}

func nameAxes(order []axis) string {
	var b []string
	for _, a := range order {
		b = append(b, axisNames[a])
	}
	return strings.Join(b, ", ")
}
