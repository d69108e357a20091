package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/bench"
)

func TestHandoverIsDrawn(t *testing.T) {
	r := bench.PDReport{Handover: []bench.PDHandover{
		{Tokens: 512, Plain: bench.PDTimes{Median: 5, Min: 4, Max: 9}, Overlap: bench.PDTimes{Median: 2, Min: 1, Max: 3}},
		{Tokens: 4096, Plain: bench.PDTimes{Median: 40, Min: 30, Max: 60}, Overlap: bench.PDTimes{Median: 2, Min: 2, Max: 2}},
	}}
	b, err := json.Marshal(r)
	require.NoError(t, err)
	dir := t.TempDir()
	report := filepath.Join(dir, "pd.json")
	require.NoError(t, os.WriteFile(report, b, 0o600))
	require.NoError(t, draw("pd", report, dir))
	for _, ext := range []string{".svg", ".png"} {
		info, err := os.Stat(filepath.Join(dir, "handover"+ext))
		require.NoError(t, err)
		assert.Greater(t, info.Size(), int64(3000))
	}
	assert.ErrorContains(t, plotPD(bench.PDReport{}, dir), "no hand-over")
}
