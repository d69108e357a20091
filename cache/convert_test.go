package cache

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// halves makes two shards of one: its first half and its second.
func halves(drop bool) *Recipe {
	return &Recipe{
		From: formA, Shards: 1, Needs: []int{0}, Bytes: []int64{1000},
		Make: func(dst, src [][]byte) error {
			copy(dst[0], src[0][:500])
			copy(dst[1], src[0][500:])
			return nil
		},
		Drop: func() bool { return drop },
	}
}

var halfSizes = []int64{500, 500}

func twoShards(hs []kvwire.Hash) LeaseRequest {
	return LeaseRequest{Form: formB, Shards: 2, Hashes: hs, Client: 1, TTL: time.Minute, Holders: 1}
}

func convert(s *Space, i int, r *Recipe) (Converted, kvwire.Reason) {
	return s.Convert(&Workbench{}, formB, halfSizes, hash(i), []*Recipe{r})
}

func TestConvertMakesAFurtherForm(t *testing.T) {
	c := open(t, Config{ClusterKey: []byte("key")})
	s := space(t, c, "a")
	put(t, s, 0, 1000)
	r := halves(false)
	got, why := convert(s, 0, r)
	require.Equal(t, kvwire.ReasonNone, why)
	assert.Equal(t, Converted{Recipe: r, Bytes: 1000}, got)

	st := c.Stats()
	assert.EqualValues(t, 1, st.Pages, "one unit of eviction")
	assert.EqualValues(t, 3, st.Objects)
	assert.EqualValues(t, 1024+2*512, st.ResidentBytes)
	assert.Equal(t, st.ResidentBytes, st.WindowBytes+st.PolicyBytes)
	for k := range 2 {
		v, why := s.View(kvwire.Shard{Index: uint16(k), Count: 2}, formB, hash(0), true)
		require.Equal(t, kvwire.ReasonNone, why)
		assert.Equal(t, content(0, 1000)[500*k:][:500], v.Bytes())
		key := kvwire.ObjectKey{PageKey: kvwire.PageKey{Tenant: "a", Namespace: kvwire.Namespace{7}, Hash: hash(0)}, Shard: kvwire.Shard{Index: uint16(k), Count: 2}, Form: formB}
		assert.True(t, kvwire.NewAuthenticator([]byte("key")).Verify(key, 500, v.Sum(), v.Auth()), "peers take it")
		v.Close()
	}
	got, why = convert(s, 0, r)
	assert.Equal(t, kvwire.ReasonNone, why)
	assert.Zero(t, got, "it is there already")
	_, why = convert(s, 9, r)
	assert.Equal(t, kvwire.ReasonAbsent, why)

	require.True(t, s.Remove(formB, hash(0)))
	assert.Zero(t, c.Stats().Objects)
	assert.Zero(t, c.Stats().ResidentBytes)
}

func TestConvertDropsASourceThatNobodyReads(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	var mu sync.Mutex
	forms := map[kvwire.Form]int{}
	defer c.Subscribe(func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		forms[e.Form] += map[Kind]int{Added: 1, Removed: -1}[e.Kind]
	})()
	for i := range 3 {
		put(t, s, i, 1000)
	}
	lease, _, _ := grantTo(t, s, 1, hashes(0, 1)) // in the form that is read
	for i := range 3 {
		got, why := convert(s, i, halves(true))
		require.Equal(t, kvwire.ReasonNone, why)
		assert.Equal(t, i > 0, got.Dropped, "page %d", i)
	}
	assert.True(t, s.Has(formA, hash(0)), "it is leased")
	assert.False(t, s.Has(formA, hash(1)))
	st := c.Stats()
	assert.EqualValues(t, 3, st.Pages)
	assert.EqualValues(t, 7, st.Objects)
	assert.EqualValues(t, 1024+3*1024, st.ResidentBytes)
	assert.Equal(t, st.ResidentBytes, st.WindowBytes+st.PolicyBytes)
	assert.Equal(t, c.cfg.Budget-st.ResidentBytes, c.cfg.Budget-c.alloc.used)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return forms[formA] == 1 && forms[formB] == 3
	}, settleTime, settleStep, "peers hear of it")

	res, err := c.Release(lease.ID, 0, true)
	require.NoError(t, err)
	assert.Equal(t, ReleaseLive, res.State)
	l, locs, why, err := s.Lease(twoShards(hashes(0, 3)), nil)
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonNone, why)
	assert.Equal(t, 3, l.Pages)
	for i, at := range locs {
		assert.Equal(t, content(i/2, 1000)[i%2*500:][:500], c.Arena().Bytes(at.Offset, at.Length))
	}
}

// Invariant 1: bytes that are not what was stored are not made into others.
func TestConvertRefusesWrongBytes(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 0, 1000)
	_, locs, _ := grantTo(t, s, 1, hashes(0, 1))
	c.EndClient(1)
	c.Arena().Bytes(locs[0].Offset, locs[0].Length)[700] ^= 1
	got, why := convert(s, 0, halves(false))
	assert.Equal(t, kvwire.ReasonCorrupt, why)
	assert.Zero(t, got)
	st := c.Stats()
	assert.EqualValues(t, 1, st.Corrupt)
	assert.Zero(t, st.Pages)
	assert.EqualValues(t, 1, st.Misses[kvwire.ReasonCorrupt])
}

func TestConvertChangesNothingWhereItFails(t *testing.T) {
	c := open(t, Config{Budget: 4 << 20, AllocWait: time.Millisecond})
	s := space(t, c, "a")
	put(t, s, 0, 1000)
	free := c.Stats().FreeBytes
	fails := func(want kvwire.Reason, sizes []int64, change func(*Recipe)) {
		t.Helper()
		r := halves(true)
		change(r)
		_, why := s.Convert(&Workbench{}, formB, sizes, hash(0), []*Recipe{r})
		assert.Equal(t, want, why)
		assert.False(t, s.Has(formB, hash(0)))
		assert.Equal(t, free, c.Stats().FreeBytes)
	}
	fails(kvwire.ReasonLayout, nil, func(*Recipe) {})
	fails(kvwire.ReasonLayout, halfSizes, func(r *Recipe) { r.From = kvwire.Form{9} })
	fails(kvwire.ReasonLayout, halfSizes, func(r *Recipe) { r.Shards = 2 })
	fails(kvwire.ReasonLayout, halfSizes, func(r *Recipe) { r.Bytes = []int64{999} })
	fails(kvwire.ReasonLayout, halfSizes, func(r *Recipe) { r.Make = func(_, _ [][]byte) error { return errors.New("no") } })
	fails(kvwire.ReasonPinned, []int64{500, 5 << 20}, func(*Recipe) {})
	assert.True(t, s.Has(formA, hash(0)))

	// A reset overtakes it.
	r := halves(false)
	r.Make = func(_, _ [][]byte) error { s.Reset(); return nil }
	_, why := convert(s, 0, r)
	assert.Equal(t, kvwire.ReasonAbsent, why)
	assert.Zero(t, c.Stats().Pages)
	assert.Zero(t, c.alloc.used)
}

func TestConvertCompletesWhatIsThereInPart(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 0, 1000)
	own := content(5, 500)
	_, err := s.Put(kvwire.Shard{Index: 1, Count: 2}, formB, hash(0), own)
	require.NoError(t, err)
	got, why := convert(s, 0, halves(false))
	require.Equal(t, kvwire.ReasonNone, why)
	assert.EqualValues(t, 500, got.Bytes)
	v, why := s.View(kvwire.Shard{Index: 1, Count: 2}, formB, hash(0), true)
	require.Equal(t, kvwire.ReasonNone, why)
	assert.Equal(t, own, v.Bytes(), "the first writer wins")
	v.Close()
	assert.EqualValues(t, 3, c.Stats().Objects)
}

// What was made since Hold began is not checked once more; everything else is.
func TestTrustedPagesAreNotCheckedAgain(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 4 {
		put(t, s, i, 1000)
	}
	_, why := convert(s, 0, halves(false))
	require.Equal(t, kvwire.ReasonNone, why)
	p, _, err := s.Hold(twoShards(hashes(0, 4)), nil)
	require.NoError(t, err)
	require.Equal(t, 1, p.Pages())
	for i := 1; i < 4; i++ {
		_, why := convert(s, i, halves(false))
		require.Equal(t, kvwire.ReasonNone, why)
		p.Extend(hashes(i, i+1))
		p.Trust(i, i+1)
	}
	p.Trust(3, 9) // beyond what is held: ignored
	assert.Equal(t, 3, p.Fresh())
	before := c.Stats().Verified
	l, _, why := p.Lease(4)
	assert.Equal(t, kvwire.ReasonNone, why)
	assert.Equal(t, 4, l.Pages)
	assert.EqualValues(t, 1000, p.Checked())
	assert.EqualValues(t, 2, c.Stats().Verified-before)
}

func TestElsewhereLooksAtTheTenantsOtherSpaces(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 0, 1000)
	other, err := c.Space("a", kvwire.Namespace{8})
	require.NoError(t, err)
	assert.True(t, other.Elsewhere(hash(0)))
	assert.False(t, other.Elsewhere(hash(1)))
	assert.False(t, s.Elsewhere(hash(0)))
	assert.False(t, space(t, c, "b").Elsewhere(hash(0)), "another tenant's")
	assert.Equal(t, []kvwire.Form{formA}, s.Forms(nil, hash(0)))
}

func TestConvertersAndReadersAtOnce(t *testing.T) {
	c := open(t, Config{Budget: 4 << 20})
	s := space(t, c, "a")
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			var w Workbench
			back := &Recipe{
				From: formB, Shards: 2, Needs: []int{0, 1}, Bytes: halfSizes,
				Make: func(dst, src [][]byte) error { copy(dst[0], src[0]); copy(dst[0][500:], src[1]); return nil },
				Drop: func() bool { return true },
			}
			for n := range 400 {
				i := (n*7 + g) % 50
				_, _ = s.Put(one, formA, hash(i), content(i, 1000))
				_, _ = s.Convert(&w, formB, halfSizes, hash(i), []*Recipe{halves(g%2 == 0)})
				l, locs, _, err := s.Lease(twoShards(hashes(i, i+1)), nil)
				assert.NoError(t, err)
				if l.ID != 0 {
					assert.Equal(t, content(i, 1000)[:500], c.Arena().Bytes(locs[0].Offset, 500))
				}
				_, _ = s.Convert(&w, formA, []int64{1000}, hash(i), []*Recipe{back})
				if l.ID != 0 {
					_, err := c.Release(l.ID, 0, false)
					assert.NoError(t, err)
				}
			}
		})
	}
	wg.Wait()
	st := c.Stats()
	assert.Zero(t, st.Corrupt)
	assert.Equal(t, st.ResidentBytes, st.WindowBytes+st.PolicyBytes)
	assert.Equal(t, st.ResidentBytes, c.alloc.used)
}

func TestConvertAllocations(t *testing.T) {
	if raceOn {
		t.Skip("the race detector allocates")
	}
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 1000 {
		put(t, s, i, 1000)
	}
	var w Workbench
	recipes := []*Recipe{halves(true)}
	i := 0
	made := testing.AllocsPerRun(900, func() {
		_, _ = s.Convert(&w, formB, halfSizes, hash(i), recipes)
		i++
	})
	i = 0
	stored := testing.AllocsPerRun(900, func() {
		for k := range 2 {
			_, _ = s.Put(kvwire.Shard{Index: uint16(k), Count: 2}, formB, hash(5000+i), w.dst[k])
		}
		i++
	})
	assert.LessOrEqual(t, made, stored, "as many as two stores make for entry and signature")
}
