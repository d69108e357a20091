package capacity

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/bench"
)

func TestLookupsInThisProcess(t *testing.T) {
	rows, err := RunInProcess(t.Context(), 3, 200*time.Millisecond, func(s string) { t.Log(s) })
	require.NoError(t, err)
	require.Len(t, rows, 3)
	for _, r := range rows {
		assert.Positive(t, r.One)
		assert.Positive(t, r.Two)
		assert.Positive(t, r.Scaling)
	}
}

func TestMedian(t *testing.T) {
	assert.InDelta(t, 1.7, bench.Median([]float64{1.9, 1.5}), 1e-9, "not the better of two rounds")
	assert.InDelta(t, 2, bench.Median([]float64{3, 1, 2}), 1e-9)
}
