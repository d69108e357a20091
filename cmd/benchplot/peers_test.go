package main

import (
	"encoding/json"
	"encoding/xml"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/bench"
	"membrane/bench/peers"
)

// made is a report with a peer that was not run.
func made() peers.Report {
	row := func(cell, system, op string, streams int, value float64, why string) bench.Row {
		return bench.Row{
			Name: cell + ": " + system, Value: value, Min: value * 0.9, Max: value * 1.2, Unit: "GB/s", Why: why,
			Throughput: &bench.Throughput{System: system, Op: op, Size: 2 << 20, Batch: 1, Streams: streams, GBs: value},
		}
	}
	names := peers.SystemNames()
	return peers.Report{Report: bench.Report{Rows: []bench.Row{
		row("get 2MiB streams=1", names[0], "get", 1, 4, ""), row("get 2MiB streams=1", names[5], "get", 1, 3, ""),
		row("get 2MiB streams=8", names[0], "get", 8, 5, ""), row("get 2MiB streams=8", names[5], "get", 8, 0, "it is not here"),
		{Name: "copied", Value: 7},
	}}}
}

func TestPlotsAreDrawn(t *testing.T) {
	dir := t.TempDir()
	b, err := json.Marshal(made())
	require.NoError(t, err)
	report := filepath.Join(dir, "peers.json")
	require.NoError(t, os.WriteFile(report, b, 0o600))
	out := filepath.Join(dir, "plots")
	require.NoError(t, draw("peers", report, out))

	f, err := os.Open(filepath.Join(out, "peers-reads.png"))
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	img, err := png.Decode(f)
	require.NoError(t, err)
	colours := map[[3]uint32]int{}
	for y := range img.Bounds().Dy() {
		for x := range img.Bounds().Dx() {
			r, g, b, _ := img.At(x, y).RGBA()
			colours[[3]uint32{r, g, b}]++
		}
	}
	for _, system := range []string{peers.SystemNames()[0], peers.SystemNames()[5]} {
		r, g, b, _ := colour(system).RGBA()
		assert.Greater(t, colours[[3]uint32{r, g, b}], 500, "bars of %s", system)
	}
	svg, err := os.Open(filepath.Join(out, "peers-reads.svg"))
	require.NoError(t, err)
	defer func() { _ = svg.Close() }()
	for d := xml.NewDecoder(svg); ; {
		if _, err := d.Token(); err != nil {
			require.ErrorIs(t, err, io.EOF)
			break
		}
	}
	_, err = os.Stat(filepath.Join(out, "peers-writes.png"))
	assert.ErrorIs(t, err, os.ErrNotExist, "nothing to draw")
}

func TestWhatIsNoReportIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.json")
	require.ErrorContains(t, draw("peers", path, t.TempDir()), "cannot read the report")
	require.NoError(t, os.WriteFile(path, []byte("no"), 0o600))
	require.ErrorContains(t, draw("peers", path, t.TempDir()), "cannot read the report of peers")
}

func TestEverySystemHasAColourOfItsOwn(t *testing.T) {
	seen := map[any]string{}
	for _, s := range peers.SystemNames() {
		if peers.Kind(s) == peers.Ceiling || s == "membrane (HTTP)" || s == "predecessor" { // alone in their plot
			continue
		}
		assert.Empty(t, seen[colour(s)], s)
		seen[colour(s)] = s
	}
}

func TestAxisLabels(t *testing.T) {
	for cell, want := range map[string]string{
		"get 2MiB streams=1": "get 2MiB\n1 stream", "get 64KiB x32 streams=64": "get 64KiB x32\n64 streams",
		"get 2MiB streams=8 hit=50%": "get 2MiB\n8 streams\nhit=50%", "memory 64KiB": "memory 64KiB",
		"get 2MiB streams=16": "get 2MiB\n16 streams",
	} {
		assert.Equal(t, want, axisLabel(cell))
	}
}
