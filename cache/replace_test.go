package cache

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/kvwire"
)

// set stores page i anew with the bytes of content j.
func set(t require.TestingT, s *Space, i, j, n int, cond Condition) PutResult {
	sl, res, err := s.ReserveAnew(formA, hash(i), int64(n))
	require.NoError(t, err)
	require.NotNil(t, sl, "%+v", res)
	copy(sl.Bytes(), content(j, n))
	return sl.Commit(cond)
}

func TestReplacedBytesStayForThoseWhoViewThem(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	require.True(t, set(t, s, 1, 10, 5000, Always).Stored)
	old, why := s.View(one, formA, hash(1), true)
	require.Equal(t, kvwire.ReasonNone, why)
	require.True(t, set(t, s, 1, 11, 9000, Always).Stored)
	v, why := s.View(one, formA, hash(1), true)
	require.Equal(t, kvwire.ReasonNone, why)
	assert.Equal(t, content(11, 9000), v.Bytes())
	assert.Equal(t, content(10, 5000), old.Bytes())
	v.Close()
	old.Close()
	st := c.Stats()
	assert.Equal(t, uint64(1), st.Evictions[kvwire.ReasonReplaced])
	assert.EqualValues(t, 1, st.Pages)
	assert.Equal(t, c.arena.Size(), st.FreeBytes+st.ResidentBytes, "no slot leaked")
}

func TestConditionsOfACommit(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	assert.Equal(t, kvwire.ReasonAbsent, set(t, s, 1, 1, 100, IfHeld).Reason)
	assert.True(t, set(t, s, 1, 1, 100, IfAbsent).Stored)
	assert.True(t, set(t, s, 1, 2, 100, IfAbsent).Exists)
	assert.True(t, set(t, s, 1, 3, 100, IfHeld).Stored)

	v, _ := s.View(one, formA, hash(1), true)
	over := func(j int) PutResult {
		sl, _, err := s.ReserveAnew(formA, hash(1), 100)
		require.NoError(t, err)
		copy(sl.Bytes(), content(j, 100))
		return sl.CommitOver(v)
	}
	assert.True(t, over(4).Stored)
	assert.True(t, over(5).Exists, "the object of the view is replaced already")
	v.Remove()
	assert.True(t, s.Has(formA, hash(1)), "the object of the view is another")
	assert.True(t, s.Remove(formA, hash(1)))
	assert.Equal(t, kvwire.ReasonAbsent, over(6).Reason)
	v.Close()
	assert.False(t, s.Remove(formA, hash(1)))

	// Shards are never replaced one by one.
	sl, _, err := s.Reserve(kvwire.Shard{Count: 2}, formA, hash(2), 10)
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonLayout, sl.Commit(Always).Reason)

	// An incomplete page can be removed, and was not held.
	sl, _, _ = s.Reserve(kvwire.Shard{Count: 2}, formA, hash(2), 10)
	require.True(t, sl.Commit(IfAbsent).Stored)
	assert.False(t, s.Remove(formA, hash(2)))
	st := c.Stats()
	assert.EqualValues(t, 2, st.Evictions[kvwire.ReasonDeleted])
	assert.EqualValues(t, 2, st.Evictions[kvwire.ReasonReplaced])
	assert.Equal(t, c.arena.Size(), st.FreeBytes)
	assert.Zero(t, st.Held)
}

// Invariant 3: a name that is stored again and again is never absent, and its
// bytes are always those of one store.
func TestReplacingLeavesNoGap(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	set(t, s, 1, 0, 4000, Always)
	var wg sync.WaitGroup
	done := make(chan struct{})
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				v, why := s.View(one, formA, hash(1), true)
				if !assert.Equal(t, kvwire.ReasonNone, why) {
					return
				}
				v.Close()
			}
		})
	}
	for i := range 2000 {
		require.True(t, set(t, s, 1, i, 4000+i, Always).Stored)
	}
	v, _ := s.View(one, formA, hash(1), true)
	assert.Equal(t, content(1999, 5999), v.Bytes(), "the last store is what is there")
	v.Close()
	close(done)
	wg.Wait()
}

func TestBorrowedBytesCountForTheCap(t *testing.T) {
	c := open(t, Config{Budget: 4 << 20})
	s := space(t, c, "a")
	for i := range 3 {
		put(t, s, i, 1<<20-4096)
	}
	var a, b, again View
	require.Equal(t, kvwire.ReasonNone, s.Borrow(&a, one, formA, hash(0), true))
	require.Equal(t, kvwire.ReasonNone, s.Borrow(&b, one, formA, hash(1), true))
	require.Equal(t, kvwire.ReasonNone, s.Borrow(&again, one, formA, hash(1), true), "a page counts once")
	var over View
	require.Equal(t, kvwire.ReasonPinned, s.Borrow(&over, one, formA, hash(2), true))
	require.EqualValues(t, 2<<20-8192, c.Stats().PinnedBytes)
	a.Close()
	require.Equal(t, kvwire.ReasonNone, s.Borrow(&over, one, formA, hash(2), true))
	b.Close()
	again.Close()
	over.Close()
	over.Close()
	assert.Zero(t, c.Stats().PinnedBytes)
	assert.Zero(t, c.Stats().Held)
}

func TestHeadHashesLen(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 600 {
		put(t, s, i, 300)
	}
	var b [16]byte
	n, length, why := s.Head(b[:], one, formA, hash(5))
	assert.Equal(t, []any{16, int64(300), kvwire.ReasonNone}, []any{n, length, why})
	assert.Equal(t, content(5, 300)[:16], b[:])
	_, _, why = s.Head(b[:], one, formA, hash(9999))
	assert.Equal(t, kvwire.ReasonAbsent, why)
	_, _, why = s.Head(b[:], kvwire.Shard{Count: 2}, formA, hash(5))
	assert.Equal(t, kvwire.ReasonLayout, why)
	assert.Equal(t, 600, s.Len())
	all, err := s.Hashes(nil, 600, func(*kvwire.Hash) bool { return true })
	require.NoError(t, err)
	assert.ElementsMatch(t, hashes(0, 600), all)
	_, err = s.Hashes(nil, 599, func(*kvwire.Hash) bool { return true })
	require.ErrorContains(t, err, "more than 599")
}

// A space behaves as a map whose values never mix, whatever is stored,
// replaced and removed, and no slot is lost.
func TestReplaceAndRemoveAsAMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c, err := New(Config{Budget: 8 << 20, AllocWait: settleTime})
		require.NoError(rt, err)
		defer func() { require.NoError(rt, c.Close()) }()
		s, err := c.Space("a", kvwire.Namespace{1})
		require.NoError(rt, err)
		type value struct{ seed, n int }
		model := make(map[int]value)
		views := make(map[*View]value)
		check := func() {
			require.Equal(rt, len(model), s.Len())
			for v, want := range views {
				require.Equal(rt, content(want.seed, want.n), v.Bytes())
			}
		}
		key := rapid.IntRange(0, 5)
		rt.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { check() },
			"commit": func(rt *rapid.T) {
				k := key.Draw(rt, "key")
				cond := rapid.SampledFrom([]Condition{IfAbsent, Always, IfHeld}).Draw(rt, "cond")
				val := value{rapid.Int().Draw(rt, "seed"), rapid.IntRange(1, 20000).Draw(rt, "n")}
				_, held := model[k]
				res := set(rt, s, k, val.seed, val.n, cond)
				switch stored := cond == Always || held == (cond == IfHeld); {
				case stored:
					require.True(rt, res.Stored)
					model[k] = val
				case held:
					require.True(rt, res.Exists)
				default:
					require.Equal(rt, kvwire.ReasonAbsent, res.Reason)
				}
			},
			"remove": func(rt *rapid.T) {
				k := key.Draw(rt, "key")
				_, held := model[k]
				require.Equal(rt, held, s.Remove(formA, hash(k)))
				delete(model, k)
			},
			"view": func(rt *rapid.T) {
				k := key.Draw(rt, "key")
				want, held := model[k]
				v := new(View)
				why := s.Borrow(v, one, formA, hash(k), true)
				require.Equal(rt, held, why == kvwire.ReasonNone)
				if held {
					views[v] = want
				}
			},
			"close": func(*rapid.T) {
				for v := range views {
					v.Close()
					delete(views, v)
					break
				}
			},
		})
		for v := range views {
			v.Close()
		}
		st := c.Stats()
		require.Zero(rt, st.Held)
		require.Zero(rt, st.PinnedBytes)
		require.Equal(rt, c.arena.Size(), st.FreeBytes+st.ResidentBytes)
	})
}
