package llama

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
)

// Bounds and defaults of generated models.
const (
	MaxModelIDBytes      = 4096
	MaxGeneratedLayers   = 64
	MaxGeneratedHidden   = 1024
	DefaultLayers        = 4
	DefaultHidden        = 128
	generatedVocab       = 1024
	generatedHeadDim     = 32
	generatedMaxPosition = 1 << 20
)

// Option changes the shape of a generated model.
type Option func(*Config)

// WithLayers sets the number of layers, 1 to MaxGeneratedLayers.
func WithLayers(n int) Option { return func(c *Config) { c.Layers = n } }

// WithHidden sets the hidden size, a multiple of 64 up to MaxGeneratedHidden.
// Heads of 32 values, KV heads (half as many) and the intermediate size (twice
// the hidden size) follow from it.
func WithHidden(n int) Option { return func(c *Config) { c.HiddenSize = n } }

// Generate makes a model whose weights follow from the SHA-256 of the model id,
// so that any id of 1 to MaxModelIDBytes bytes answers, in every process the
// same. It has VocabSize 1024 for output and accepts every token id as input.
// Weights are such that attention is peaked and that greedy tokens depend on
// single bytes of the KV cache: flipping bit 6 of the fourth byte of any stored
// value changes them. (A flip in the low bytes of a mantissa changes logits,
// but seldom a token.)
func Generate(modelID string, opts ...Option) (*Model, error) {
	if n := len(modelID); n < 1 || n > MaxModelIDBytes {
		return nil, fmt.Errorf("cannot generate model: model id has %d bytes, must have 1 to %d", n, MaxModelIDBytes)
	}
	c := Config{
		HiddenSize:   DefaultHidden,
		Layers:       DefaultLayers,
		HeadDim:      generatedHeadDim,
		VocabSize:    generatedVocab,
		MaxPositions: generatedMaxPosition,
		RMSNormEps:   1e-5,
		RopeTheta:    10000,
		AnyInputID:   true,
	}
	for _, o := range opts {
		o(&c)
	}
	if c.HiddenSize < 64 || c.HiddenSize > MaxGeneratedHidden || c.HiddenSize%64 != 0 {
		return nil, fmt.Errorf("cannot generate model: hidden size is %d, must be a multiple of 64 from 64 to %d", c.HiddenSize, MaxGeneratedHidden)
	}
	if c.Layers < 1 || c.Layers > MaxGeneratedLayers {
		return nil, fmt.Errorf("cannot generate model: layers is %d, must be from 1 to %d", c.Layers, MaxGeneratedLayers)
	}
	c.Heads = c.HiddenSize / c.HeadDim
	c.KVHeads = c.Heads / 2
	c.IntermediateSize = 2 * c.HiddenSize
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("cannot generate model: %w", err)
	}
	m := &Model{config: c, id: modelID, weightsID: generatedID(modelID, c), threads: 1}
	m.seedWeights(sha256.Sum256([]byte(modelID)))
	m.setRope()
	return m, nil
}

func generatedID(modelID string, c Config) string {
	// The version must change with anything that changes the weights.
	shape := fmt.Sprintf("membrane-generated-v1\x00%d %d %d %d %d %d %d %g %g\x00",
		c.Layers, c.HiddenSize, c.IntermediateSize, c.Heads, c.KVHeads, c.HeadDim, c.VocabSize, c.RMSNormEps, c.RopeTheta)
	sum := sha256.Sum256([]byte(shape + modelID))
	return "generated:" + hex.EncodeToString(sum[:])
}

func (m *Model) seedWeights(seed [32]byte) {
	c := m.config
	hidden, inter, q, kv := c.HiddenSize, c.IntermediateSize, c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	// The standard deviations are per input: each matrix scales a vector of
	// unit values to the given one. Scores are about 3, so attention is peaked.
	// Keys and values are small against 2, and q and o make up for it: then any
	// stored value becomes huge when the highest bit of its exponent flips.
	matrix := func(name string, outputs, inputs int, std float64) []float32 {
		return uniform(tensorSeed(seed, name), outputs*inputs, std/math.Sqrt(float64(inputs)))
	}
	for i := range c.Layers {
		p := fmt.Sprintf("layer %d ", i)
		m.layers = append(m.layers, layer{
			attnNorm: ones(hidden),
			mlpNorm:  ones(hidden),
			q:        matrix(p+"q", q, hidden, 9.6),
			k:        matrix(p+"k", kv, hidden, 0.3),
			v:        matrix(p+"v", kv, hidden, 0.3),
			o:        matrix(p+"o", hidden, q, 9.6),
			gate:     matrix(p+"gate", inter, hidden, 0.9),
			up:       matrix(p+"up", inter, hidden, 0.9),
			down:     matrix(p+"down", hidden, inter, 1.3),
		})
	}
	m.norm = ones(hidden)
	m.head = matrix("head", c.VocabSize, hidden, 3.4)
	embedSeed := tensorSeed(seed, "embed")
	base := binary.LittleEndian.Uint64(embedSeed[:])
	m.embed = func(dst []float32, token uint32) { hashEmbedding(dst, base, token) }
}

func tensorSeed(seed [32]byte, name string) [32]byte {
	return sha256.Sum256(append(seed[:], name...))
}

// uniform returns n values of mean 0 and the given standard deviation. Uniform
// rather than normal values need no function whose last bit could differ
// between machines.
func uniform(seed [32]byte, n int, std float64) []float32 {
	random := rand.NewChaCha8(seed)
	scale := float32(std * math.Sqrt(3))
	out := make([]float32, n)
	for i := 0; i < n; i += 2 {
		bits := random.Uint64()
		out[i] = unit(uint32(bits)) * scale
		if i+1 < n {
			out[i+1] = unit(uint32(bits>>32)) * scale
		}
	}
	return out
}

// hashEmbedding fills dst with the input embedding of a token: values of
// standard deviation 1 from the SplitMix64 sequence that starts at a mix of
// base and token.
func hashEmbedding(dst []float32, base uint64, token uint32) {
	const step = 0x9e3779b97f4a7c15
	state := mix64(base + uint64(token)*step)
	for i := 0; i < len(dst); i += 2 {
		state += step
		bits := mix64(state)
		dst[i] = unit(uint32(bits)) * 1.7320508
		if i+1 < len(dst) {
			dst[i+1] = unit(uint32(bits>>32)) * 1.7320508
		}
	}
}

// mix64 is the finalizer of SplitMix64.
func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// unit maps 32 random bits to a value from -1 up to 1, exactly.
func unit(bits uint32) float32 { return float32(bits>>8)*(1.0/(1<<23)) - 1 }

func ones(n int) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = 1
	}
	return out
}
