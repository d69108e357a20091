package replay

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func prompts(lists ...[]uint64) *Trace {
	t := &Trace{Name: "t", BlockTokens: 16}
	for _, l := range lists {
		t.Requests = append(t.Requests, Request{Blocks: l, Input: 16 * len(l)})
	}
	return t
}

func hits(t require.TestingT, p policy, tr *Trace) (out []int) {
	for _, r := range tr.Requests {
		n, err := p.request(r.Blocks)
		require.NoError(t, err)
		out = append(out, n)
	}
	require.NoError(t, p.close())
	return out
}

func TestLRUDropsTheEndOfAPromptFirst(t *testing.T) {
	tr := prompts([]uint64{1, 2, 3}, []uint64{7}, []uint64{1, 2, 3})
	assert.Equal(t, []int{0, 0, 2}, hits(t, newLRU(3, false), tr))
	assert.Equal(t, []int{0, 0, 0}, hits(t, newLRU(3, true), tr))
}

func TestOptimumKeepsWhatComesNext(t *testing.T) {
	tr := prompts([]uint64{1, 2, 3}, []uint64{7}, []uint64{8}, []uint64{1, 2, 3}, []uint64{7})
	assert.Equal(t, []int{0, 0, 0, 3, 0}, hits(t, newOptimum(tr, 3), tr))
	assert.Equal(t, []int{0, 0, 0, 2, 0}, hits(t, newOptimum(tr, 2), prompts(
		[]uint64{1, 2, 3}, []uint64{7}, []uint64{8}, []uint64{1, 2, 3}, []uint64{7})), "of two, 1 and 2 are worth as much as 7")
}

// tree draws prompts of a small tree: block 10·b+d comes after block b.
func tree(t *rapid.T) *Trace {
	tr := prompts()
	n := rapid.IntRange(1, 30).Draw(t, "requests")
	for range n {
		var blocks []uint64
		at := uint64(0)
		for range rapid.IntRange(1, 5).Draw(t, "depth") {
			at = at*10 + uint64(rapid.IntRange(1, 2).Draw(t, "branch"))
			blocks = append(blocks, at)
		}
		tr.Requests = append(tr.Requests, Request{Blocks: blocks, Input: 16 * len(blocks)})
	}
	return tr
}

// No policy has more hits than the optimum, and what it holds is closed under
// prefixes.
func TestNobodyBeatsTheOptimum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := tree(t)
		capacity := rapid.IntRange(1, 12).Draw(t, "capacity")
		sum := func(list []int) (n int) {
			for _, v := range list {
				n += v
			}
			return n
		}
		best := newOptimum(tr, capacity)
		found := 0
		for _, r := range tr.Requests {
			n, _ := best.request(r.Blocks)
			found += n
			for b := range best.held {
				if parent := b / 10; parent != 0 && best.held[parent] == nil {
					t.Fatalf("%d is held without %d", b, parent)
				}
			}
		}
		for _, heads := range []bool{false, true} {
			if got := sum(hits(t, newLRU(capacity, heads), tr)); got > found {
				t.Fatalf("LRU has %d hits, the optimum %d", got, found)
			}
		}
	})
}

func TestGeneratorsRepeatThemselvesAndKeepTheirParameters(t *testing.T) {
	for _, w := range Workloads() {
		t.Run(w.Name, func(t *testing.T) {
			t.Parallel()
			a, err := w.Trace(3, 600)
			require.NoError(t, err)
			b, err := w.Trace(3, 600)
			require.NoError(t, err)
			assert.Equal(t, a.Requests, b.Requests)
			c, err := w.Trace(4, 600)
			require.NoError(t, err)
			assert.NotEqual(t, a.Requests, c.Requests)
			for i, r := range a.Requests {
				require.Len(t, r.Blocks, r.Input/w.BlockTokens, "request %d", i)
				require.LessOrEqual(t, r.Input, w.Parts[0].Limit)
				if i > 0 {
					require.LessOrEqual(t, a.Requests[i-1].At, r.At)
				}
			}
			assert.Contains(t, a.About, "seed 3")
			f := a.Facts()
			assert.Greater(t, f.Reusable, 0.1)
			assert.Less(t, f.Reusable, 0.99)
		})
	}
	_, err := Workload{Name: "x", BlockTokens: 1}.Trace(1, 1)
	require.ErrorContains(t, err, "Parts")
}

// Blocks are named by all that they end, wherever texts are cut.
func TestBlocksAreNamedByTheirPrefix(t *testing.T) {
	a := blocks([]text{{1, 10}, {2, 30}}, 16)
	b := blocks([]text{{1, 10}, {2, 25}, {3, 100}}, 16)
	require.Len(t, a, 2)
	require.Len(t, b, 8)
	assert.Equal(t, a, b[:2])
	c := blocks([]text{{1, 9}, {2, 31}}, 16)
	assert.NotEqual(t, a[0], c[0])
}

func TestReportSaysWhatWasPlayed(t *testing.T) {
	w := Workloads()[slices.IndexFunc(Workloads(), func(w Workload) bool { return w.Name == "chat" })]
	tr, err := w.Trace(1, 400)
	require.NoError(t, err)
	r, err := Run(t.Context(), []*Trace{tr}, Options{Fractions: []float64{0.1, 0.3}})
	require.NoError(t, err)
	require.Len(t, r.Traces[0].Cells, 10)
	require.NotNil(t, r.Target)
	for _, c := range r.Traces[0].Cells {
		assert.Zero(t, c.Refused)
		assert.LessOrEqual(t, c.HitRatio, r.Traces[0].Facts.Reusable+1e-9)
		best := r.Traces[0].ByFraction()[c.Fraction][Optimum]
		assert.LessOrEqual(t, c.HitRatio, best.HitRatio)
		assert.Positive(t, c.TTFTMean)
	}
	var text, markdown, object bytes.Buffer
	require.NoError(t, r.WriteText(&text))
	require.NoError(t, r.WriteMarkdown(&markdown))
	require.NoError(t, r.WriteJSON(&object))
	for _, want := range []string{"membrane", "think time 1m0s", "seed 1", "Target"} {
		assert.Contains(t, text.String(), want)
		assert.Contains(t, markdown.String(), want)
	}
	var back Report
	require.NoError(t, json.Unmarshal(object.Bytes(), &back))
	assert.Equal(t, r.Target.Mean, back.Target.Mean)
}

func TestWrongOptionsAreRefused(t *testing.T) {
	for _, o := range []Options{
		{Fractions: []float64{0}},
		{Fractions: []float64{1.1}},
		{PrefillRate: -1},
		{LoadRate: 1e13},
		{TokenBytes: -1},
		{Policies: []string{"mru"}},
	} {
		_, err := Run(t.Context(), nil, o)
		assert.Error(t, err, "%+v", o)
	}
}

// The cache keeps up with plain LRU and passes the library alone.
func TestMembraneIsAboveRistrettoAlone(t *testing.T) {
	w := Workloads()[0]
	tr, err := w.Trace(1, 3000)
	require.NoError(t, err)
	r, err := Run(t.Context(), []*Trace{tr}, Options{Fractions: []float64{0.1}, Policies: []string{Membrane, LRU, Ristretto}})
	require.NoError(t, err)
	by := r.Traces[0].ByFraction()[0.1]
	t.Logf("membrane %.4f, lru %.4f, ristretto %.4f", by[Membrane].HitRatio, by[LRU].HitRatio, by[Ristretto].HitRatio)
	assert.Greater(t, by[Membrane].HitRatio, by[Ristretto].HitRatio)
	assert.Greater(t, by[Membrane].HitRatio, 0.97*by[LRU].HitRatio)
}
