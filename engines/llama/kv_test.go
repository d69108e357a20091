package llama

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestChunksGiveEqualBytes splits one prompt in every way, with one or several
// threads, and wants the same bits as from one call.
func TestChunksGiveEqualBytes(t *testing.T) {
	t.Parallel()
	m := generated(t, WithLayers(2), WithHidden(64))
	ids := prompt(110)
	whole := m.NewKV(64)
	logits := prefill(t, m, whole, ids)
	want := whole.Window(0, len(ids))
	rapid.Check(t, func(r *rapid.T) {
		threaded, err := m.WithThreads(rapid.IntRange(1, 5).Draw(r, "threads"))
		require.NoError(r, err)
		kv := m.NewKV(rapid.IntRange(1, 130).Draw(r, "page"))
		var got []float32
		for kv.Len() < len(ids) {
			n := rapid.IntRange(1, len(ids)-kv.Len()).Draw(r, "chunk")
			got, err = threaded.Prefill(t.Context(), kv, ids[kv.Len():][:n])
			require.NoError(r, err)
		}
		require.Equal(r, logits, got)
		require.Equal(r, want, kv.Window(0, len(ids)))
	})
}

// TestChunksOfOneGiveEqualBytes also covers head counts and sizes that no tile
// divides.
func TestChunksOfOneGiveEqualBytes(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"testdata/small-f32", "testdata/small-bf16"} {
		m, err := Load(dir)
		require.NoError(t, err)
		ids := make([]uint32, 67)
		for i := range ids {
			ids[i] = uint32(i*37) % 256
		}
		whole, single := m.NewKV(16), m.NewKV(16)
		logits := prefill(t, m, whole, ids)
		var got []float32
		for _, id := range ids {
			got = prefill(t, m, single, []uint32{id})
		}
		assert.Equal(t, logits, got)
		assert.Equal(t, whole.Window(0, len(ids)), single.Window(0, len(ids)))
	}
}

// TestLoadedPagesGiveTheTokensOfRecomputing moves a prompt's pages to a second
// process's model and decodes there.
func TestLoadedPagesGiveTheTokensOfRecomputing(t *testing.T) {
	t.Parallel()
	const p = 64
	a, b := generated(t), generated(t)
	ids := prompt(3*p + 20)
	cold := a.NewKV(p)
	want := greedy(t, a, cold, prefill(t, a, cold, ids), 24)

	t.Run("pages and the rest computed", func(t *testing.T) {
		kv := b.NewKV(p)
		for i := range 3 {
			require.NoError(t, kv.LoadPage(i, cold.Page(i)))
			require.Equal(t, (i+1)*p, kv.Len())
		}
		assert.Equal(t, want, greedy(t, b, kv, prefill(t, b, kv, ids[3*p:]), 24))
	})
	t.Run("pages to the end, last token computed again", func(t *testing.T) {
		kv := b.NewKV(p)
		for i := range 3 {
			require.NoError(t, kv.LoadPage(i, cold.Page(i)))
		}
		require.NoError(t, kv.LoadPageTokens(3, cold.Page(3), 20))
		require.NoError(t, kv.Truncate(len(ids)-1))
		assert.Equal(t, want, greedy(t, b, kv, prefill(t, b, kv, ids[len(ids)-1:]), 24))
	})
	t.Run("windows with a short last one", func(t *testing.T) {
		kv := b.NewKV(p)
		for start := 0; start < len(ids); start += 128 {
			n := min(128, len(ids)-start)
			require.NoError(t, kv.LoadWindow(start, n, cold.Window(start, n)))
		}
		require.NoError(t, kv.Truncate(len(ids)-1))
		assert.Equal(t, want, greedy(t, b, kv, prefill(t, b, kv, ids[len(ids)-1:]), 24))
	})
}

// TestOneFlippedByteChangesTokens flips the highest exponent bit of one key or
// value in a loaded page, each time of another.
func TestOneFlippedByteChangesTokens(t *testing.T) {
	t.Parallel()
	const p = 64
	m := generated(t)
	ids := prompt(2*p + 10)
	cold := m.NewKV(p)
	want := greedy(t, m, cold, prefill(t, m, cold, ids), 16)
	random := rand.New(rand.NewPCG(1, 2))
	for range 12 {
		page := cold.Page(1)
		at := random.IntN(len(page)/4)*4 + 3
		page[at] ^= 0x40
		kv := m.NewKV(p)
		require.NoError(t, kv.LoadPage(0, cold.Page(0)))
		require.NoError(t, kv.LoadPage(1, page))
		got := greedy(t, m, kv, prefill(t, m, kv, ids[2*p:]), 16)
		assert.NotEqual(t, want, got, "byte %d", at)
	}
}

func TestPageLayoutIsCanonical(t *testing.T) {
	t.Parallel()
	const p = 8
	m := generated(t, WithLayers(2))
	c := m.Config()
	kv := m.NewKV(p)
	prefill(t, m, kv, prompt(2*p+3))
	assert.Equal(t, p*c.Layers*2*c.KVHeads*c.HeadDim*4, m.PageBytes(p))
	for i, rows := range []int{p, p, 3} {
		page := kv.Page(i)
		require.Len(t, page, m.PageBytes(p))
		at := 0
		for layer := range c.Layers {
			for side := range 2 {
				for head := range c.KVHeads {
					for token := range p {
						for d := range c.HeadDim {
							lanes := [][][]float32{kv.k, kv.v}[side]
							var want float32
							if token < rows {
								want = lanes[layer*c.KVHeads+head][(i*p+token)*c.HeadDim+d]
							}
							require.Equal(t, want, math.Float32frombits(binary.LittleEndian.Uint32(page[at:])))
							at += 4
						}
					}
				}
			}
		}
	}
	assert.Equal(t, kv.Page(1), kv.Window(p, p))
	dst := make([]byte, m.PageBytes(p))
	require.NoError(t, kv.ReadPage(dst, 1))
	assert.Equal(t, kv.Page(1), dst)
	dst = make([]byte, m.PageBytes(3))
	require.NoError(t, kv.ReadWindow(dst, 2*p, 3))
	assert.Equal(t, kv.Window(2*p, 3), dst)
}

func TestKVRefusesWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	const p = 8
	m := generated(t, WithLayers(1))
	full := m.NewKV(p)
	prefill(t, m, full, prompt(2*p+1))
	page := full.Page(0)

	assert.Nil(t, full.Page(-1))
	assert.Nil(t, full.Page(3))
	assert.Nil(t, full.Page(math.MaxInt))
	assert.Nil(t, full.Window(-1, 1))
	assert.Nil(t, full.Window(0, 0))
	assert.Nil(t, full.Window(2*p, 2))
	assert.Nil(t, full.Window(math.MaxInt, math.MaxInt))
	assert.NotNil(t, full.Window(2*p, 1))
	assert.ErrorContains(t, full.ReadPage(page, 2), "2 full pages are computed")
	assert.ErrorContains(t, full.ReadWindow(page, 0, 3), "must have")
	assert.ErrorContains(t, full.ReadWindow(page, 2*p, 2), "17 tokens are computed")
	assert.ErrorContains(t, full.LoadPage(2, page), "holds 17 tokens")
	assert.ErrorContains(t, full.Truncate(-1), "cannot truncate to -1")
	assert.ErrorContains(t, full.Truncate(18), "cannot truncate to 18")

	kv := m.NewKV(p)
	assert.ErrorContains(t, kv.LoadPage(1, page), "cannot load page 1")
	assert.ErrorContains(t, kv.LoadPage(-1, page), "cannot load page -1")
	assert.ErrorContains(t, kv.LoadPage(0, page[1:]), "must have")
	assert.ErrorContains(t, kv.LoadPage(0, append(page, 0)), "must have")
	assert.ErrorContains(t, kv.LoadPageTokens(0, page, 0), "tokens is 0")
	assert.ErrorContains(t, kv.LoadPageTokens(0, page, p+1), "tokens is 9")
	assert.ErrorContains(t, kv.LoadWindow(1, p, page), "holds 0 tokens")
	assert.ErrorContains(t, kv.LoadWindow(0, 0, nil), "tokens is 0")
	assert.ErrorContains(t, kv.LoadWindow(0, -1, nil), "tokens is -1")
	assert.ErrorContains(t, kv.LoadWindow(0, p-1, page), "must have")
	assert.ErrorContains(t, kv.LoadWindow(0, math.MaxInt, page), "positions")
	assert.Equal(t, 0, kv.Len(), "a refused load changes nothing")

	assert.Panics(t, func() { m.NewKV(0) })
	assert.Panics(t, func() { m.NewKV(MaxPageTokens + 1) })
	assert.NotPanics(t, func() { m.NewKV(MaxPageTokens) })
}

// TestTruncateForgets goes back and takes another way; the first way's rows
// must not show.
func TestTruncateForgets(t *testing.T) {
	t.Parallel()
	m := generated(t, WithLayers(2))
	ids := prompt(100)
	kv, straight := m.NewKV(64), m.NewKV(64)
	prefill(t, m, kv, ids)
	require.NoError(t, kv.Truncate(10))
	assert.Equal(t, 10, kv.Len())
	other := append(append([]uint32{}, ids[:10]...), 5, 6, 7)
	got := prefill(t, m, kv, other[10:])
	assert.Equal(t, prefill(t, m, straight, other), got)
	assert.Equal(t, straight.Page(0), kv.Page(0))
}
