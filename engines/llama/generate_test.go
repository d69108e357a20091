package llama

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestGeneratedModelIsFixed pins the weights, the weights id and some tokens of
// one model: engines of different builds share KV under that id, so whoever
// changes the weights must change the version in the id.
func TestGeneratedModelIsFixed(t *testing.T) {
	t.Parallel()
	m := generated(t)
	assert.Equal(t, "llama-3-8b", m.ID())
	assert.Equal(t, "generated:f152bbc06f58f765f5bef5adfbc59d30bcc221f9304426f3f6e95260f6639e44", m.WeightsID())

	h := sha256.New()
	hash := func(tensors ...[]float32) {
		for _, x := range tensors {
			require.NoError(t, binary.Write(h, binary.LittleEndian, x))
		}
	}
	for _, l := range m.layers {
		hash(l.attnNorm, l.q, l.k, l.v, l.o, l.mlpNorm, l.gate, l.up, l.down)
	}
	embedding := make([]float32, m.Config().HiddenSize)
	m.embed(embedding, 123456789)
	hash(m.norm, m.head, embedding)
	assert.Equal(t, "1f9263e5f8a772e57343ed122c6b112951e8913711b8de0239ae12869f222d8c", hex.EncodeToString(h.Sum(nil)))

	kv := m.NewKV(64)
	assert.Equal(t, []uint32{280, 828, 939, 352, 190, 522, 43, 464}, greedy(t, m, kv, prefill(t, m, kv, []uint32{1, 2, 3, 4}), 8))
}

func TestGeneratedModelsDiffer(t *testing.T) {
	t.Parallel()
	tokens := func(m *Model) []uint32 {
		kv := m.NewKV(64)
		return greedy(t, m, kv, prefill(t, m, kv, prompt(10)), 8)
	}
	a := generated(t)
	b, err := Generate("mistral-7b")
	require.NoError(t, err)
	c := generated(t, WithLayers(2))
	assert.Equal(t, tokens(a), tokens(generated(t)))
	assert.NotEqual(t, tokens(a), tokens(b))
	assert.NotEqual(t, a.WeightsID(), b.WeightsID())
	assert.NotEqual(t, a.WeightsID(), c.WeightsID())
}

func TestGeneratedModelTakesAnyToken(t *testing.T) {
	t.Parallel()
	m := generated(t, WithLayers(1))
	logits := map[uint32][]float32{}
	for _, id := range []uint32{0, 1, 1023, 1024, 1 << 31, math.MaxUint32} {
		got := prefill(t, m, m.NewKV(64), []uint32{id})
		require.Len(t, got, 1024)
		for other, was := range logits {
			assert.NotEqual(t, was, got, "tokens %d and %d", other, id)
		}
		logits[id] = got
	}
}

func TestGeneratedShapes(t *testing.T) {
	t.Parallel()
	m := generated(t, WithLayers(3), WithHidden(192))
	c := m.Config()
	assert.Equal(t, 3, c.Layers)
	assert.Equal(t, 6, c.Heads)
	assert.Equal(t, 3, c.KVHeads)
	assert.Equal(t, 1024, c.VocabSize)
	for _, v := range prefill(t, m, m.NewKV(64), prompt(20)) {
		require.False(t, math.IsNaN(float64(v)) || math.IsInf(float64(v), 0))
	}
	for name, opt := range map[string]Option{
		"layers is 0":         WithLayers(0),
		"layers is 65":        WithLayers(MaxGeneratedLayers + 1),
		"hidden size is 0":    WithHidden(0),
		"hidden size is 96":   WithHidden(96),
		"hidden size is 1088": WithHidden(MaxGeneratedHidden + 64),
	} {
		_, err := Generate("x", opt)
		assert.ErrorContains(t, err, name)
	}
	_, err := Generate("")
	assert.ErrorContains(t, err, "model id has 0 bytes")
	_, err = Generate(strings.Repeat("x", MaxModelIDBytes+1), WithLayers(1))
	assert.ErrorContains(t, err, "model id has 4097 bytes")
	_, err = Generate(strings.Repeat("x", MaxModelIDBytes), WithLayers(1))
	assert.NoError(t, err)

	_, err = m.WithThreads(0)
	assert.ErrorContains(t, err, "threads to 0")
	_, err = m.WithThreads(MaxThreads + 1)
	assert.ErrorContains(t, err, "threads to 65")
}

// TestModelIsSafeForConcurrentUse runs sequences of one model side by side.
func TestModelIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	m, err := generated(t, WithLayers(2)).WithThreads(2)
	require.NoError(t, err)
	want := prefill(t, m, m.NewKV(64), prompt(80))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			got, err := m.Prefill(t.Context(), m.NewKV(64), prompt(80))
			assert.NoError(t, err)
			assert.Equal(t, want, got)
		})
	}
	wg.Wait()
}
