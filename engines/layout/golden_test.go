package layout

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// golden is an object that an engine's own code made, see
// testdata/make_golden.py.
type golden struct {
	File       string `json:"file"`
	MadeBy     string `json:"made_by"`
	Layout     string `json:"layout"`
	Packing    string `json:"packing"`
	DType      string `json:"dtype"`
	Layers     int    `json:"layers"`
	Heads      int    `json:"heads"`
	Dim        int    `json:"dim"`
	Block      int    `json:"block_tokens"`
	PageTokens int    `json:"page_tokens"`
	MLA        bool   `json:"mla"`
}

func (g golden) descriptor(t *testing.T) Descriptor {
	t.Helper()
	m := kvwire.ModelFacts{WeightsID: "golden", DType: g.DType, RoPE: "none", Layers: g.Layers, KVHeads: g.Heads, HeadSize: g.Dim, MLA: g.MLA}
	w, err := Sized(m, kvwire.Descriptor{
		Layout: g.Layout, Packing: g.Packing, DType: g.DType, BlockTokens: g.Block,
		TPSize: 1, PPSize: 1, Layers: [2]int{0, g.Layers}, Heads: [2]int{0, g.Heads},
	})
	require.NoError(t, err)
	d, err := Describe(m, w, g.PageTokens)
	require.NoError(t, err)
	return d
}

// numbers are the page's numbers in canonical order, as the maker gave them to
// the engine.
func numbers(n, unit int) []byte {
	var b []byte
	for i := range n {
		mixed := uint32(uint64(i) * 2654435761)
		switch unit {
		case 4:
			b = binary.LittleEndian.AppendUint32(b, 0x20000000+mixed&0x1FFFFFFF)
		case 2:
			b = binary.LittleEndian.AppendUint16(b, uint16(0x2000+mixed>>16&0x3FFF))
		case 1:
			b = append(b, byte(0x20+mixed>>24&0x3F))
		}
	}
	return b
}

func TestGoldenObjects(t *testing.T) {
	covered := map[string]bool{}
	for _, maker := range []string{"vllm", "sglang", "shapes"} {
		list, err := os.ReadFile(filepath.Join("testdata", "golden", maker+".json"))
		require.NoError(t, err)
		var cases []golden
		require.NoError(t, json.Unmarshal(list, &cases))
		for _, g := range cases {
			covered[g.Layout+" "+g.Packing] = true
			t.Run(g.File, func(t *testing.T) {
				want := inflate(t, filepath.Join("testdata", "golden", g.File))
				d := g.descriptor(t)
				c, err := d.Canonical()
				require.NoError(t, err)
				unit := dtypes[g.DType]
				page := numbers(c.Bytes()/unit, unit)
				got := translate(t, d, []Descriptor{c}, [][]byte{page})
				assert.True(t, bytes.Equal(want, got), "not the bytes that %s made", g.MadeBy)
				back := translate(t, c, []Descriptor{d}, [][]byte{want})
				assert.True(t, bytes.Equal(page, back), "not the numbers that %s was given", g.MadeBy)
			})
		}
	}
	for _, r := range rows {
		if r.layout == canonical || r.packing != "" && r.layout != "vllm-lbhnc" {
			continue // the embedded engine's test has the first; the rest has no engine
		}
		assert.True(t, covered[r.layout+" "+r.packing], "no golden object of %s %s", r.layout, r.packing)
	}
}

func inflate(t *testing.T, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	b, err := io.ReadAll(z)
	require.NoError(t, err)
	return b
}
