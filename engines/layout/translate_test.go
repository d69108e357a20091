package layout

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/kvwire"
)

func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	_, _ = rand.NewChaCha8(key).Read(b)
	return b
}

func translate(t require.TestingT, to Descriptor, from []Descriptor, srcs [][]byte) []byte {
	p, err := NewPlan(to, from...)
	require.NoError(t, err)
	used := make([][]byte, len(p.Needs()))
	for i, n := range p.Needs() {
		used[i] = srcs[n]
	}
	dst := bytes.Repeat([]byte{0xEE}, p.Bytes())
	require.NoError(t, p.Run(dst, used...))
	return dst
}

// checks returns how many geometries are drawn for each pair of layouts.
func checks() int {
	if raceEnabled {
		return 1 // nothing runs at the same time here
	}
	return 2
}

// TestEveryPairOfLayouts: for every two layouts and random geometry, the plan
// does what the reference does; there and back gives the same bytes; through
// the canonical form is the same as directly; and of two bytes that are
// exchanged or one that is changed the translation shows it.
func TestEveryPairOfLayouts(t *testing.T) {
	pairsOf(t, func(t *testing.T, fromRow, toRow row, latent bool) {
		seed := uint64(1)
		for n := 0; n < checks(); {
			rng := rapid.Custom(func(t *rapid.T) *drawn { return drawPair(t, fromRow, toRow, latent) }).Example(int(seed))
			seed++
			if rng == nil {
				continue
			}
			n++
			checkPair(t, *rng, seed)
		}
	})
}

type drawn struct{ from, to one }

func drawPair(t *rapid.T, fromRow, toRow row, latent bool) *drawn {
	m := drawModel(t, latent)
	dtype := rapid.SampledFrom(sortedKeys(dtypes)).Draw(t, "dtype")
	fw, ok := drawWire(t, fromRow, m, dtype, "from")
	tw, ok2 := drawWire(t, toRow, m, dtype, "to")
	if !ok || !ok2 {
		return nil
	}
	page := rapid.SampledFrom(drawnPages).Draw(t, "page")
	return &drawn{describe(t, fromRow, m, fw, page), describe(t, toRow, m, tw, page)}
}

func checkPair(t *testing.T, p drawn, seed uint64) {
	from, to := p.from, p.to
	src := randomBytes(seed, from.Bytes())
	direct := translate(t, to.Descriptor, []Descriptor{from.Descriptor}, [][]byte{src})

	want := make([]byte, to.Bytes())
	reference(t, to, want, []one{from}, [][]byte{src})
	require.True(t, bytes.Equal(want, direct), "%+v to %+v: not what the reference gives", from.wire, to.wire)

	back := translate(t, from.Descriptor, []Descriptor{to.Descriptor}, [][]byte{direct})
	require.True(t, bytes.Equal(src, back), "there and back")

	c, err := from.Canonical()
	require.NoError(t, err)
	between := translate(t, c, []Descriptor{from.Descriptor}, [][]byte{src})
	around := translate(t, to.Descriptor, []Descriptor{c}, [][]byte{between})
	require.True(t, bytes.Equal(direct, around), "through the canonical form")

	rng := rand.New(rand.NewPCG(seed, 0))
	changed := slices.Clone(src)
	changed[rng.IntN(len(src))] ^= 1
	other := translate(t, to.Descriptor, []Descriptor{from.Descriptor}, [][]byte{changed})
	require.Equal(t, 1, differences(direct, other), "one byte changed")

	copy(changed, src)
	i, j := rng.IntN(len(src)), rng.IntN(len(src))
	changed[i], changed[j] = src[j], src[i]
	other = translate(t, to.Descriptor, []Descriptor{from.Descriptor}, [][]byte{changed})
	require.Equal(t, differences(src, changed), differences(direct, other), "two bytes exchanged")
}

func differences(a, b []byte) int {
	n := 0
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

// TestEveryReaderOfEveryWriter: tensor parallel sizes 1, 2, 4 and 8 on both
// sides, with heads replicated where there are more ranks than heads, layers
// cut unevenly, and another layout, packing and block on each side.
func TestEveryReaderOfEveryWriter(t *testing.T) {
	m := kvwire.ModelFacts{WeightsID: "w", DType: "bfloat16", RoPE: "base=1", Layers: 5, HeadSize: 32}
	const page = 32
	for _, heads := range []int{1, 2, 4, 8} {
		m.KVHeads = heads
		for i, tpFrom := range []int{1, 2, 4, 8} {
			for j, tpTo := range []int{1, 2, 4, 8} {
				mixed := []row{rows[0], rows[6], rows[8], rows[1], rows[21], rows[19], rows[16], rows[22]}
				fromRow, toRow := mixed[(i+heads)%len(mixed)], mixed[(j*3+i)%len(mixed)]
				var from []one
				var srcs [][]byte
				truth := randomBytes(7, page*m.Layers*2*heads*m.HeadSize*2)
				for _, w := range grid(t, fromRow, m, page, tpFrom, [][2]int{{0, 2}, {2, 5}}) {
					from = append(from, w)
					srcs = append(srcs, cut(t, m, page, truth, w))
				}
				for _, to := range grid(t, toRow, m, page, tpTo, [][2]int{{0, 1}, {1, 4}, {4, 5}}) {
					plain := make([]Descriptor, len(from))
					for k := range from {
						plain[k] = from[k].Descriptor
					}
					got := translate(t, to.Descriptor, plain, srcs)
					require.True(t, bytes.Equal(cut(t, m, page, truth, to), got), "%d heads, tp %d to %d, %s to %s", heads, tpFrom, tpTo, fromRow.layout, toRow.layout)
				}
			}
		}
	}
}

// grid returns all ranks of an engine.
func grid(t *testing.T, r row, m kvwire.ModelFacts, page, tp int, layers [][2]int) []one {
	t.Helper()
	var all []one
	for pp, window := range layers {
		heads, err := HeadWindow(m, tp, 0)
		require.NoError(t, err)
		w := kvwire.Descriptor{
			Layout: r.layout, Packing: r.packing, DType: "bfloat16", BlockTokens: 32,
			TPSize: tp, PPSize: len(layers), PPRank: pp, Layers: window, Heads: heads,
		}
		ranks, err := describe(t, r, m, w, page).Ranks()
		require.NoError(t, err)
		for _, d := range ranks {
			all = append(all, one{r, d})
		}
	}
	return all
}

// cut returns a shard's object of a page whose numbers are, in the canonical
// order of the whole model, truth.
func cut(t *testing.T, m kvwire.ModelFacts, page int, truth []byte, to one) []byte {
	t.Helper()
	w := kvwire.Descriptor{
		Layout: canonical, DType: to.dtype, BlockTokens: page, TPSize: 1, PPSize: 1, Layers: [2]int{0, m.Layers}, Heads: [2]int{0, m.KVHeads},
	}
	whole := describe(t, rows[0], m, w, page)
	dst := make([]byte, to.Bytes())
	reference(t, to, dst, []one{whole}, [][]byte{truth})
	return dst
}

func TestAPlanNeedsOnlyTheShardsThatItReads(t *testing.T) {
	m := kvwire.ModelFacts{WeightsID: "w", DType: "bfloat16", RoPE: "base=1", Layers: 4, KVHeads: 4, HeadSize: 8}
	plain := func(all []one) (out []Descriptor) {
		for _, o := range all {
			out = append(out, o.Descriptor)
		}
		return out
	}
	r := rows[0]
	two := [][2]int{{0, 2}, {2, 4}}
	for _, c := range []struct {
		name         string
		tpFrom, tpTo int
		ppFrom, ppTo [][2]int
		reader       int
		want         []int
	}{
		{"itself", 1, 1, [][2]int{{0, 4}}, [][2]int{{0, 4}}, 0, []int{0}},
		{"second half of the heads", 4, 2, [][2]int{{0, 4}}, [][2]int{{0, 4}}, 1, []int{2, 3}},
		{"one head of a shard of two", 2, 4, [][2]int{{0, 4}}, [][2]int{{0, 4}}, 2, []int{1}},
		{"replicated heads come from the first that has them", 8, 1, [][2]int{{0, 4}}, [][2]int{{0, 4}}, 0, []int{0, 2, 4, 6}},
		{"a replica reads one shard", 1, 8, [][2]int{{0, 4}}, [][2]int{{0, 4}}, 7, []int{0}},
		{"second half of the layers", 2, 1, two, two, 1, []int{2, 3}},
		{"all layers", 1, 1, two, [][2]int{{0, 4}}, 0, []int{0, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := plain(grid(t, r, m, 32, c.tpFrom, c.ppFrom))
			to := plain(grid(t, r, m, 32, c.tpTo, c.ppTo))
			p, err := NewPlan(to[c.reader], from...)
			require.NoError(t, err)
			assert.Equal(t, c.want, p.Needs())
		})
	}
}

func TestMLAIsTheSameOnEveryRank(t *testing.T) {
	m := kvwire.ModelFacts{WeightsID: "w", DType: "bfloat16", RoPE: "base=1", Layers: 3, KVHeads: 1, HeadSize: 576, MLA: true}
	r := rows[5]
	from, to := grid(t, r, m, 32, 4, [][2]int{{0, 3}}), grid(t, rows[19], m, 32, 2, [][2]int{{0, 1}, {1, 3}})
	p, err := NewPlan(to[3].Descriptor, from[0].Descriptor, from[1].Descriptor, from[2].Descriptor, from[3].Descriptor)
	require.NoError(t, err)
	assert.Equal(t, []int{0}, p.Needs())
	src := randomBytes(3, from[0].Bytes())
	want := make([]byte, to[3].Bytes())
	reference(t, to[3], want, from[:1], [][]byte{src})
	got := make([]byte, p.Bytes())
	require.NoError(t, p.Run(got, src))
	assert.True(t, bytes.Equal(want, got))
}

func TestAPlanServesSeveralGoroutines(t *testing.T) {
	m := kvwire.ModelFacts{WeightsID: "w", DType: "bfloat16", RoPE: "base=1", Layers: 2, KVHeads: 2, HeadSize: 32}
	from, to := grid(t, rows[8], m, 32, 1, [][2]int{{0, 2}})[0], grid(t, rows[6], m, 32, 1, [][2]int{{0, 2}})[0]
	p, err := NewPlan(to.Descriptor, from.Descriptor)
	require.NoError(t, err)
	src := randomBytes(2, from.Bytes())
	want := translate(t, to.Descriptor, []Descriptor{from.Descriptor}, [][]byte{src})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			dst := make([]byte, p.Bytes())
			assert.NoError(t, p.Run(dst, src))
			assert.Equal(t, want, dst)
		})
	}
	wg.Wait()
}
