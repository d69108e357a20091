package llama

import (
	"fmt"
	"math"
)

// Upper bounds of a model's shape. They keep every product of two sizes far
// from overflow, and a hostile config.json from asking for absurd buffers.
const (
	MaxHiddenSize       = 1 << 14
	MaxIntermediateSize = 1 << 16
	MaxLayers           = 256
	MaxHeads            = 256
	MaxHeadDim          = 512
	MaxVocabSize        = 1 << 20
	MaxMaxPositions     = 1 << 24
	// MaxPageTokens bounds the page size of a KV cache, in tokens.
	MaxPageTokens = 1 << 14
)

// Config is the shape of a model. Sizes are counts of float32 values, heads,
// layers or tokens.
type Config struct {
	HiddenSize       int
	IntermediateSize int
	Layers           int
	Heads            int
	KVHeads          int
	HeadDim          int
	VocabSize        int // number of logits
	MaxPositions     int // tokens that one KV cache may hold
	RMSNormEps       float64
	RopeTheta        float64
	TieEmbeddings    bool
	// AnyInputID is true for generated models: every token id from 0 to 2^32-1
	// is accepted as input, while the output stays below VocabSize.
	AnyInputID bool
}

func (c Config) validate() error {
	sizes := []struct {
		name       string
		value, max int
	}{
		{"hidden_size", c.HiddenSize, MaxHiddenSize},
		{"intermediate_size", c.IntermediateSize, MaxIntermediateSize},
		{"num_hidden_layers", c.Layers, MaxLayers},
		{"num_attention_heads", c.Heads, MaxHeads},
		{"num_key_value_heads", c.KVHeads, MaxHeads},
		{"head_dim", c.HeadDim, MaxHeadDim},
		{"vocab_size", c.VocabSize, MaxVocabSize},
		{"max_position_embeddings", c.MaxPositions, MaxMaxPositions},
	}
	for _, s := range sizes {
		if s.value < 1 || s.value > s.max {
			return fmt.Errorf("%s is %d, must be from 1 to %d", s.name, s.value, s.max)
		}
	}
	if c.Heads%c.KVHeads != 0 {
		return fmt.Errorf("num_attention_heads is %d, must be a multiple of num_key_value_heads %d", c.Heads, c.KVHeads)
	}
	if c.HeadDim%2 != 0 {
		return fmt.Errorf("head_dim is %d, must be even", c.HeadDim)
	}
	if !(c.RMSNormEps > 0 && c.RMSNormEps < 1) {
		return fmt.Errorf("rms_norm_eps is %g, must be between 0 and 1", c.RMSNormEps)
	}
	if !(c.RopeTheta >= 1) || math.IsInf(c.RopeTheta, 0) {
		return fmt.Errorf("rope_theta is %g, must be at least 1 and finite", c.RopeTheta)
	}
	return nil
}

// kvRow is the number of float32 values that one token adds to the KV cache.
func (c Config) kvRow() int { return c.Layers * 2 * c.KVHeads * c.HeadDim }
