package bench

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRowsOfVLLMAreThereWithoutIt(t *testing.T) {
	r, err := vllmFigures{}.report(Report{})
	require.NoError(t, err)
	assert.Empty(t, r.Ceilings)
	require.Len(t, r.Rows, 12)
	for _, row := range r.Rows {
		assert.Nil(t, row.OK)
		assert.Equal(t, vllmNotRun, row.Why)
	}
	assert.Empty(t, r.Missed())
	assert.NoError(t, Floors{}.Check(r), "what was not run has no floor")
	assert.ErrorContains(t, Floors{r.Rows[0].Name: "<= 1"}.Check(r), "was not run")
	var text strings.Builder
	require.NoError(t, r.WriteText(&text))
	assert.Contains(t, text.String(), "not run: needs vLLM, run make bench-vllm")
}

func TestRowsOfVLLMCompareMediansAndLeasts(t *testing.T) {
	f := vllmFigures{
		cold: samples{2000, 1000, 3000}, missed: samples{2020, 1010, 3030}, filled: samples{2100, 1100, 3100},
		baseline: samples{100, 80, 90}, local: samples{120, 88, 180}, peer: samples{200, 200, 160}, overhead: samples{1, 2.5, 3},
	}
	r, err := f.report(Report{})
	require.NoError(t, err)
	require.Len(t, r.Ceilings, 3)
	ratios := map[string]float64{}
	for _, row := range r.Rows {
		if row.Ratio != nil {
			ratios[row.Name] = *row.Ratio
		}
	}
	assert.InDelta(t, 1.2, ratios["vLLM first token, local sidecar"], 1e-9)
	assert.InDelta(t, 1.1, ratios["vLLM first token, local sidecar, least"], 1e-9)
	assert.InDelta(t, 2, ratios["vLLM first token, peer's sidecar"], 1e-9)
	assert.InDelta(t, 2, ratios["vLLM first token, peer's sidecar, least"], 1e-9)
	assert.InDelta(t, 1000.0/60, ratios["vLLM first token, local sidecar, times sooner"], 1e-9)
	assert.InDelta(t, 1000.0/88, ratios["vLLM first token, local sidecar, times sooner, least"], 1e-9)
	assert.InDelta(t, 1.01, ratios["vLLM first token, held nowhere"], 1e-9)
	assert.NotContains(t, ratios, "vLLM first token, local sidecar, beside LMCache")
	assert.Equal(t, []string{
		"vLLM first token, peer's sidecar", "vLLM first token, peer's sidecar, least",
		"vLLM first token, peer's sidecar, times sooner, least",
		"vLLM held nowhere, hooks and waiting in the first token",
	}, r.Missed())
}

func TestRowsBesideLMCache(t *testing.T) {
	f := vllmFigures{local: samples{100, 120, 90}, cold: samples{1, 1, 1}, baseline: samples{1, 1, 1}, peer: samples{1, 1, 1}, missed: samples{1, 1, 1}, lmcache: samples{400, 200, 300}}
	rows := map[string]Row{}
	for _, v := range f.rows() {
		row, err := v.row()
		require.NoError(t, err)
		rows[row.Name] = row
	}
	assert.InDelta(t, 0.3, *rows["vLLM first token, local sidecar, beside LMCache"].Ratio, 1e-9)
	least := rows["vLLM first token, local sidecar, beside LMCache, least"]
	assert.InDelta(t, 0.45, *least.Ratio, 1e-9)
	assert.False(t, *least.OK)

	f.lmcache = nil
	row, err := f.rows()[8].row()
	require.NoError(t, err)
	assert.Equal(t, "vLLM first token, local sidecar, beside LMCache", row.Name)
	assert.Equal(t, lmcacheNotRun, row.Why)
	assert.Equal(t, "<= 0.4", *row.Target)
}
