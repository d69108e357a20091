package llama

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// goldenTolerance is how far a logit may lie from transformers' value.
const goldenTolerance = 1e-4

type goldenVectors struct {
	Prompt []uint32             `json:"prompt"`
	Logits map[string][]float32 `json:"logits"`
	Greedy []uint32             `json:"greedy"`
}

// checkGolden loads the checkpoint in dir and compares it with the vectors of
// the same folder.
func checkGolden(t *testing.T, dir string) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "golden.json"))
	require.NoError(t, err)
	var g goldenVectors
	require.NoError(t, json.Unmarshal(raw, &g))
	require.NotEmpty(t, g.Logits)
	require.NotEmpty(t, g.Greedy)
	m, err := Load(dir)
	require.NoError(t, err)

	worst := 0.0
	for position, want := range g.Logits {
		i, err := strconv.Atoi(position)
		require.NoError(t, err)
		got := prefill(t, m, m.NewKV(64), g.Prompt[:i+1])
		require.Len(t, got, len(want))
		for j := range want {
			worst = max(worst, math.Abs(float64(got[j]-want[j])))
		}
	}
	t.Logf("largest difference of a logit: %.2g", worst)
	require.LessOrEqual(t, worst, goldenTolerance)

	kv := m.NewKV(64)
	assert.Equal(t, g.Greedy, greedy(t, m, kv, prefill(t, m, kv, g.Prompt), len(g.Greedy)))
}

func TestLogitsEqualTransformers(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"small-f32", "small-bf16"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkGolden(t, filepath.Join("testdata", name))
		})
	}
}
