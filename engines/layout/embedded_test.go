package layout

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/engines/embedded"
	"membrane/engines/llama"
)

// TestTheEmbeddedEngineIsCanonical: the numbers of a page are where its windows
// of one token say, and what it registers is the canonical form itself.
func TestTheEmbeddedEngineIsCanonical(t *testing.T) {
	const block = 16
	m, err := llama.Generate("layout")
	require.NoError(t, err)
	reg := embedded.Registration(m, "e", block, 1)
	d, err := Describe(reg.Model, reg.Descriptor, 2*block)
	require.NoError(t, err)
	small, err := Describe(reg.Model, reg.Descriptor, block)
	require.NoError(t, err)
	c, err := small.Canonical()
	require.NoError(t, err)
	assert.Equal(t, reg.Descriptor, c.Wire())
	assert.Equal(t, reg.Descriptor.Form(), c.Wire().Form())

	kv := m.NewKV(block)
	tokens := make([]uint32, 2*block)
	for i := range tokens {
		tokens[i] = uint32(i * 7)
	}
	_, err = m.Prefill(context.Background(), kv, tokens)
	require.NoError(t, err)
	object := make([]byte, d.Bytes())
	require.NoError(t, kv.ReadPage(object[:len(object)/2], 0))
	require.NoError(t, kv.ReadPage(object[len(object)/2:], 1))

	c2, err := d.Canonical()
	require.NoError(t, err)
	page := translate(t, c2, []Descriptor{d}, [][]byte{object})
	lanes, row := d.layers()*2*d.heads(), d.model.HeadSize*4
	for tok := range tokens {
		window := kv.Window(tok, 1)
		for lane := range lanes {
			at := (lane*len(tokens) + tok) * row
			require.Equal(t, window[lane*row:][:row], page[at:][:row], "lane %d of token %d", lane, tok)
		}
	}
}
