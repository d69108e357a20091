package lm

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/VictoriaMetrics/metrics"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/cache"
)

func TestValuesComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	c := n.dial(t)
	edge := cache.PartSize - headerSize([]byte("k0"))
	for i, size := range []int{0, 1, 100, edge - 1, edge, edge + 1, cache.PartSize, 2*cache.PartSize - 128, 3<<20 + 7} {
		key := fmt.Sprintf("k%d", i)
		f := format{layout: int32(i), dtype: int32(8 - i%9), shape: [4]int32{int32(size), 0, -1, 1 << 30}}
		c.lacks(key)
		assert.False(t, c.exists(key))
		c.put(key, content(uint64(i), size), f)
		c.has(key, content(uint64(i), size), f)
		assert.True(t, c.exists(key))
	}
	assert.EqualValues(t, 9, n.counter("hits_total"))
	assert.EqualValues(t, 9, n.counter("stored_total"))
	assert.EqualValues(t, 9, n.counter(`missed_total{reason="absent"}`))
	assert.EqualValues(t, 18, n.counter(`requests_total{command="get"}`))
	assert.EqualValues(t, 18, n.counter(`requests_total{command="exist"}`))
	assert.Equal(t, n.counter("received_bytes_total"), n.counter("sent_bytes_total"))
}

func TestKeys(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	longest := strings.Repeat("k", MaxKey)
	for _, key := range []string{longest, longest[1:], chunk, chunk + "@3", "k y", "ключ"} {
		c.put(key, key, bf16)
	}
	for _, key := range []string{longest, longest[1:], chunk, chunk + "@3", "k y", "ключ"} {
		c.has(key, key, bf16)
	}
	c.lacks(longest[2:])
	c.lacks("ky")
}

func TestFirstValueStays(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	for _, size := range []int{100, 1 << 20} {
		key := fmt.Sprintf("%s%d", chunk, size)
		c.put(key, content(1, size), bf16)
		c.put(key, content(1, size), bf16)
		assert.False(t, n.counter("conflicts_total") > 0)
		c.has(key, content(1, size), bf16)
	}
	c.put(chunk+"100", content(2, 100), bf16)
	c.put(chunk+"100", content(1, 100), format{dtype: 4})
	c.put(chunk+"1048576", content(2, 1<<20-5), bf16)
	c.has(chunk+"100", content(1, 100), bf16)
	c.has(chunk+"1048576", content(1, 1<<20), bf16)
	assert.EqualValues(t, 2, n.counter("stored_total"))
	assert.EqualValues(t, 5, n.counter("existing_total"))
	assert.EqualValues(t, 3, n.counter("conflicts_total"))
}

func TestHealthAndList(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	c.send(encode(5, "", 0, format{}))
	got, _ := c.reply()
	assert.Equal(t, [9]int32{200, 0, 1, 2}, got)
	c.send(encode(4, "", 0, format{}))
	got, _ = c.reply()
	assert.Equal(t, missing, got)
	n.Drain()
	c.send(encode(5, "", 0, format{}))
	got, _ = c.reply()
	assert.Equal(t, missing, got)
}

func TestDrainingHasNothing(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	c.put("a", "1", bf16)
	c.has("a", "1", bf16)
	n.Drain()
	c.lacks("a")
	assert.False(t, c.exists("a"))
	c.put("b", content(1, 1000), bf16)
	c.lacks("b")
	assert.EqualValues(t, 1, n.counter(`refused_stores_total{reason="draining"}`))
	assert.EqualValues(t, 2, n.counter(`missed_total{reason="draining"}`))
	require.Eventually(t, func() bool { return n.InFlight() == 0 }, timeout, tick)
}

// Invariant 1: a value with wrong bytes is never sent whole.
func TestWrongBytesAreNotServed(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	w := n.dial(t)
	for i, size := range []int{1000, 3 << 20} {
		for _, fromEnd := range []int{1, size, size + 33} { // value, its first byte, the key
			key := fmt.Sprintf("k%d-%d", i, fromEnd)
			w.put(key, content(1, size), bf16)
			w.has(key, content(1, size), bf16)
			n.flip(t, key, fromEnd)
			c := n.dial(t)
			if size < cache.PartSize {
				c.lacks(key)
			} else {
				c.send(encode(2, key, 0, format{}))
				got, _ := io.ReadAll(io.LimitReader(c, int64(36+size)))
				require.Less(t, len(got), 36+size)
			}
			w.lacks(key)
			w.put(key, content(1, size), bf16)
			w.has(key, content(1, size), bf16)
		}
	}
	assert.EqualValues(t, 6, n.counter(`missed_total{reason="corrupt"}`))
}

func TestTenantsAreApart(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	s, err := New(Config{Cache: n.cache, Tenant: "other", Metrics: metrics.NewSet(), Log: n.cfg.Log})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	c := n.dial(t)
	c.put("a", "1", bf16)
	c.has("a", "1", bf16)
	assert.False(t, s.space.Has(form, hashKey([]byte("a"))))
	assert.True(t, n.space.Has(form, hashKey([]byte("a"))))
}

func TestBadConfig(t *testing.T) {
	t.Parallel()
	_, err := New(Config{})
	require.ErrorContains(t, err, "Cache and Metrics")
}

// Whatever order clients store and ask in, a value is the first one of its key
// or not there.
func TestAgainstAModel(t *testing.T) {
	n := start(t, 64<<20)
	c := n.dial(t)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		model := map[string]int{}
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			key := fmt.Sprintf("%d-%d", run, rapid.IntRange(0, 4).Draw(rt, "key"))
			switch rapid.IntRange(0, 2).Draw(rt, "do") {
			case 0:
				size := rapid.SampledFrom([]int{0, 5, 70_000, 300_000}).Draw(rt, "size")
				c.put(key, content(uint64(size), size), bf16)
				if _, ok := model[key]; !ok {
					model[key] = size
				}
			case 1:
				_, want := model[key]
				if c.exists(key) != want {
					rt.Fatalf("exists %s: not %v", key, want)
				}
			case 2:
				if size, ok := model[key]; ok {
					c.has(key, content(uint64(size), size), bf16)
				} else {
					c.lacks(key)
				}
			}
		}
	})
}
