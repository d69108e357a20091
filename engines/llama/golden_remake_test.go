//go:build engines

package llama

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestGoldenRemade makes the checkpoints and vectors anew with the Python that
// MEMBRANE_PYTHON names (torch, transformers and safetensors installed), checks
// the engine against them, and checks that the committed ones are the same.
func TestGoldenRemade(t *testing.T) {
	python := os.Getenv("MEMBRANE_PYTHON")
	require.NotEmpty(t, python, "MEMBRANE_PYTHON must name a Python with torch, transformers and safetensors")
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), python, filepath.Join("testdata", "make_golden.py"), dir, "--medium")
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "CUDA_VISIBLE_DEVICES=")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, name := range []string{"small-f32", "small-bf16", "medium-f32"} {
		t.Run(name, func(t *testing.T) { checkGolden(t, filepath.Join(dir, name)) })
	}
	for _, name := range []string{"small-f32", "small-bf16"} {
		remade, err := Load(filepath.Join(dir, name))
		require.NoError(t, err)
		committed, err := Load(filepath.Join("testdata", name))
		require.NoError(t, err)
		assert.Equal(t, committed.config, remade.config)
		assert.Equal(t, committed.layers, remade.layers)
		assert.Equal(t, committed.head, remade.head)
	}
}
