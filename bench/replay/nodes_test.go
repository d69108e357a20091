package replay

import (
	"bytes"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSidecarsServeATrace(t *testing.T) {
	binary := os.Getenv("MEMBRANE_BIN")
	if binary == "" {
		t.Skip("MEMBRANE_BIN is not set: make test sets it")
	}
	tr, err := Workloads()[0].Trace(1, 300)
	require.NoError(t, err)
	var rows []NodesReport
	for _, random := range []bool{false, true} {
		r, err := RunNodes(t.Context(), tr, NodesOptions{Binary: binary, Nodes: 2, Fraction: 0.9, Random: random, TokenBytes: 1})
		require.NoError(t, err)
		assert.Equal(t, 300, r.Requests)
		assert.Positive(t, r.Local)
		assert.Positive(t, r.Verified)
		assert.InDelta(t, 1, r.Local+r.Peers+r.Miss, 1e-9)
		rows = append(rows, r)
	}
	assert.Greater(t, rows[1].Peers, rows[0].Peers, "turns at other nodes are fetched")
	assert.Positive(t, rows[1].Moved)
	var text, markdown bytes.Buffer
	require.NoError(t, WriteNodesText(&text, rows))
	require.NoError(t, WriteNodesMarkdown(&markdown, rows))
	assert.Contains(t, text.String(), "any node")
	assert.Contains(t, markdown.String(), "their session's node")
}

func TestWrongNodesOptionsAreRefused(t *testing.T) {
	for _, o := range []NodesOptions{
		{Nodes: 0, Fraction: 0.1},
		{Nodes: MaxNodes + 1, Fraction: 0.1},
		{Nodes: 1, Fraction: 0},
		{Nodes: 1, Fraction: 0.1, Speed: -1},
	} {
		_, err := RunNodes(t.Context(), &Trace{}, o)
		assert.Error(t, err, "%+v", o)
	}
}

func TestNodesOptionsThatAreNoNumbersAreRefused(t *testing.T) {
	_, err := RunNodes(t.Context(), &Trace{}, NodesOptions{Nodes: 1, Fraction: 0.1, Speed: math.NaN(), TokenBytes: 1})
	require.ErrorContains(t, err, "speed NaN")
	_, err = RunNodes(t.Context(), &Trace{}, NodesOptions{Nodes: 1, Fraction: 0.1, TokenBytes: -5})
	require.ErrorContains(t, err, "TokenBytes -5")
}
