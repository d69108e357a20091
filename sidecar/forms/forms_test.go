package forms

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"membrane/engines/layout"
	"membrane/kvwire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var facts = kvwire.ModelFacts{WeightsID: "w", DType: "bfloat16", RoPE: "base=1", Layers: 4, KVHeads: 4, HeadSize: 32}

const page = 64

func descriptor(t *testing.T, name string, tp, block int) kvwire.Descriptor {
	t.Helper()
	w := kvwire.Descriptor{Layout: name, DType: "bfloat16", BlockTokens: block, TPSize: tp, PPSize: 1, Layers: [2]int{0, 4}, Heads: [2]int{0, max(1, 4/tp)}}
	w, err := layout.Sized(facts, w)
	require.NoError(t, err)
	return w
}

func TestAReaderHasARecipeForEachOtherForm(t *testing.T) {
	g := NewRegistry()
	ns := facts.Namespace(page)
	assert.Empty(t, g.Descriptors(ns))
	a := descriptor(t, "vllm-nhd", 2, 16)
	b := descriptor(t, "sglang-page_first", 8, 64)
	r := g.Attach(facts, page, a)
	assert.Empty(t, r.Recipes())
	assert.ErrorContains(t, r.Refused(b.Form()), "no engine that writes it")
	assert.NoError(t, r.Refused(a.Form()))

	g.Learn(ns, []kvwire.Descriptor{b, b, a})
	require.Len(t, r.Recipes(), 1)
	c := r.Recipes()[0]
	assert.Equal(t, b.Form(), c.From)
	assert.Equal(t, 8, c.Shards)
	assert.Equal(t, []int{0, 2, 4, 6}, c.Needs, "the others hold the same heads")
	assert.Equal(t, []int64{int64(page) * 4 * 2 * 32 * 2, int64(page) * 4 * 2 * 32 * 2, int64(page) * 4 * 2 * 32 * 2, int64(page) * 4 * 2 * 32 * 2}, c.Bytes)
	assert.Len(t, r.SourceBytes(b.Form()), 8)
	assert.Len(t, r.Sizes(), 2)
	assert.Equal(t, []kvwire.Descriptor{a, b}, g.Descriptors(ns))

	assert.True(t, c.Drop(), "nobody here reads it")
	other := g.Attach(facts, page, b)
	c = r.Recipes()[0]
	assert.False(t, c.Drop())
	other.Close()
	other.Close()
	assert.True(t, c.Drop())
	assert.Len(t, g.Descriptors(ns), 2, "its pages may still be here")
}

func TestWhatCannotBeTranslatedIsSaidByName(t *testing.T) {
	g := NewRegistry()
	a := descriptor(t, "vllm-nhd", 1, 16)
	r := g.Attach(facts, page, a)
	f32 := a
	f32.DType = "float32"
	f32.BlockBytes *= 2
	own := a
	own.Layout = "own"
	opaque := a
	opaque.Group = "mamba"
	odd := descriptor(t, "vllm-nhd", 2, 16)
	odd.Heads = [2]int{2, 4}
	g.Learn(facts.Namespace(page), []kvwire.Descriptor{f32, own, opaque, odd})
	assert.Empty(t, r.Recipes())
	assert.ErrorContains(t, r.Refused(f32.Form()), `descriptor.dtype is "float32", must be "bfloat16"`)
	assert.ErrorContains(t, r.Refused(own.Form()), `descriptor.layout is "own"`)
	assert.ErrorContains(t, r.Refused(opaque.Form()), `opaque`)
	assert.ErrorContains(t, r.Refused(odd.Form()), `descriptor.heads is [2, 4)`)

	mine := g.Attach(facts, page, own)
	assert.Nil(t, mine.Sizes())
	assert.ErrorContains(t, mine.Err(), "descriptor.layout")
	assert.ErrorContains(t, mine.Refused(a.Form()), `layout "own" is not translated`)
	assert.Empty(t, mine.Recipes())
}

// What a peer said under the digest of a form does not stand in the way of an
// engine here that really has it.
func TestAnEngineHereKnowsBetterThanAPeer(t *testing.T) {
	g := NewRegistry()
	a, b := descriptor(t, "vllm-nhd", 1, 16), descriptor(t, "vllm-hnd", 2, 16)
	r := g.Attach(facts, page, a)
	wrong := b
	wrong.BlockBytes++
	require.Equal(t, b.Form(), wrong.Form())
	g.Learn(facts.Namespace(page), []kvwire.Descriptor{wrong})
	assert.Error(t, r.Refused(b.Form()))
	g.Attach(facts, page, b)
	assert.NoError(t, r.Refused(b.Form()))
	assert.Len(t, r.Recipes(), 1)
}

func TestFormsOfANamespaceHaveALimit(t *testing.T) {
	g := NewRegistry()
	a := descriptor(t, "vllm-nhd", 1, 16)
	r := g.Attach(facts, page, a)
	many := make([]kvwire.Descriptor, 2*kvwire.MaxForms)
	for i := range many {
		many[i] = a
		many[i].Layout = fmt.Sprint("own-", i)
	}
	ns := facts.Namespace(page)
	g.Learn(ns, many)
	assert.Len(t, g.Descriptors(ns), kvwire.MaxForms)
	b := descriptor(t, "vllm-hnd", 1, 16)
	g.Attach(facts, page, b)
	assert.Len(t, g.Descriptors(ns), kvwire.MaxForms)
	assert.Len(t, r.Recipes(), 1, "an engine here makes room for its own")
	g.Learn(kvwire.Namespace{1}, many)
	assert.Empty(t, g.Descriptors(kvwire.Namespace{1}), "no engine here is of that namespace")
}

func TestSiblingsDifferInThePageSizeOnly(t *testing.T) {
	g := NewRegistry()
	a := descriptor(t, "vllm-nhd", 1, 16)
	r := g.Attach(facts, page, a)
	assert.Empty(t, r.Siblings())
	g.Attach(facts, 128, a)
	other := facts
	other.WeightsID = "other"
	g.Attach(other, 32, a)
	assert.Equal(t, []int{128}, r.Siblings())
}
