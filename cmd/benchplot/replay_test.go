package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/bench/replay"
)

func TestReplayIsDrawn(t *testing.T) {
	w := replay.Workloads()[0]
	tr, err := w.Trace(1, 300)
	require.NoError(t, err)
	r, err := replay.Run(t.Context(), []*replay.Trace{tr}, replay.Options{Fractions: []float64{0.1, 0.3}})
	require.NoError(t, err)
	b, err := json.Marshal(r)
	require.NoError(t, err)
	dir := t.TempDir()
	report := filepath.Join(dir, "replay.json")
	require.NoError(t, os.WriteFile(report, b, 0o600))
	require.NoError(t, draw("replay", report, dir))
	for _, ext := range []string{".svg", ".png"} {
		info, err := os.Stat(filepath.Join(dir, "hit-ratio"+ext))
		require.NoError(t, err)
		assert.Greater(t, info.Size(), int64(5000))
	}
	require.ErrorContains(t, plotReplay(replay.Report{}, dir), "no trace")
	assert.ErrorContains(t, draw("chaos", report, dir), "peers, replay and pd")
}
