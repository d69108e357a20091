package mesh

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/cache"
	"membrane/kvwire"
)

// follower is a peer's side without a connection.
type follower struct {
	epoch, version uint64
	filter         *filter
	full           int
}

func (f *follower) pull(t require.TestingT, ix *index) kvwire.DirectoryAnswer {
	a, err := kvwire.ParseDirectoryAnswer(kvwire.AppendDirectoryAnswer(nil, ix.answer(f.epoch, f.version)))
	require.NoError(t, err)
	if a.Full {
		f.filter = receiveFilter(a.Filter)
		f.full++
	} else {
		require.Equal(t, f.epoch, a.Epoch)
	}
	f.filter = f.filter.apply(a.Added, a.Removed)
	f.epoch, f.version = a.Epoch, a.Version
	return a
}

// Whatever changes and whenever a peer asks, its picture is that of a filter
// made anew.
func TestFollowersSeeEveryChange(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		ix := newIndex()
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		followers := []*follower{{}, {}, {}}
		var have []uint64
		for range rapid.IntRange(1, 15).Draw(rt, "rounds") {
			ix.mu.Lock()
			for range r.IntN(1500) {
				if r.IntN(5) < 2 && len(have) > 0 {
					i := r.IntN(len(have))
					ix.remove(have[i])
					have[i] = have[len(have)-1]
					have = have[:len(have)-1]
					continue
				}
				d := r.Uint64()
				have = append(have, d)
				ix.add(d)
				ix.add(d) // known already
				ix.remove(^d)
			}
			ix.mu.Unlock()
			f := followers[r.IntN(len(followers))]
			f.pull(rt, ix)
			require.Equal(rt, len(have), f.filter.len())
			for _, d := range have {
				require.True(rt, f.filter.has(d))
			}
			require.Equal(rt, newWith(f.filter.Buckets, have), f.filter)
		}
	})
}

// A filter that was made of few pages, and the many that came since, would be
// asked for again at once, and without end.
func TestFullFilterIsNotCrowded(t *testing.T) {
	t.Parallel()
	for _, first := range []int{1, 300, 511} {
		for _, more := range []int{1025 - first, 1024} {
			ix := newIndex()
			r := rand.New(rand.NewPCG(uint64(first), uint64(more)))
			grow := func(n int) {
				ix.mu.Lock()
				defer ix.mu.Unlock()
				for range n {
					ix.add(r.Uint64())
				}
			}
			grow(first)
			new(follower).pull(t, ix)
			grow(more)
			late := &follower{}
			late.pull(t, ix)
			require.Equal(t, first+more, late.filter.len())
			require.False(t, late.filter.crowded(), "%d pages and %d more", first, more)
		}
	}
}

// One page more of a million costs a reader some 20 ms: it asks less often.
func TestLargeDirectoriesAreAskedForLessOften(t *testing.T) {
	t.Parallel()
	m := &Mesh{}
	m.peers = newPeerTable(m)
	require.Equal(t, 20*time.Millisecond, m.directoryPause(0))
	require.Equal(t, 20*time.Millisecond, m.directoryPause(200*time.Microsecond), "8,192 pages")
	require.Equal(t, 440*time.Millisecond, m.directoryPause(22*time.Millisecond))
	require.Equal(t, time.Second, m.directoryPause(time.Minute))
}

func newWith(buckets uint8, digests []uint64) *filter {
	values := make([]uint64, len(digests))
	for i, d := range digests {
		values[i] = d >> (64 - buckets - fingerprintBits)
	}
	slices.Sort(values)
	return packFilter(buckets, values)
}

func TestSmallChangesTravelAlone(t *testing.T) {
	t.Parallel()
	ix := newIndex()
	change := func(fn func(uint64), ds ...uint64) {
		ix.mu.Lock()
		defer ix.mu.Unlock()
		for _, d := range ds {
			fn(d)
		}
	}
	all := randomDigests(rand.New(rand.NewPCG(1, 1)), 10000)
	change(ix.add, all...)
	f := &follower{}
	require.True(t, f.pull(t, ix).Full)
	change(ix.remove, all[0])
	change(ix.add, 1, 2)
	change(ix.remove, 2)
	change(ix.remove, all[1])
	change(ix.add, all[1])
	a := f.pull(t, ix)
	require.False(t, a.Full)
	require.Equal(t, []uint64{1}, a.Added)
	require.Equal(t, []uint64{all[0]}, a.Removed)
	a = f.pull(t, ix)
	require.Empty(t, append(a.Added, a.Removed...))
	f.epoch++ // another life of the node
	require.True(t, f.pull(t, ix).Full)
	f.version += 5 // a version from the future
	require.True(t, f.pull(t, ix).Full)
}

func TestIndexHasALimit(t *testing.T) {
	t.Parallel()
	ix := newIndex()
	require.Equal(t, kvwire.MaxDirectoryPages, ix.limit)
	ix.limit = 1000
	all := randomDigests(rand.New(rand.NewPCG(2, 2)), 1005)
	ix.mu.Lock()
	for _, d := range all {
		ix.add(d)
	}
	ix.remove(all[1001]) // never listed
	ix.mu.Unlock()
	listed, unlisted := ix.pages()
	require.Equal(t, 1000, listed)
	require.Equal(t, uint64(5), unlisted)
	f := &follower{}
	f.pull(t, ix)
	require.Equal(t, 1000, f.filter.len())
}

// fakeStore is a cache whose feed the test drives.
type fakeStore struct {
	Store
	pages map[kvwire.PageKey]struct{}
	feed  func(cache.Event)
	ask   func() // while the pages are listed; nil: nothing
}

func (s *fakeStore) Subscribe(fn func(cache.Event)) func() {
	s.feed = fn
	return func() { s.feed = nil }
}

func (s *fakeStore) Range(fn func(kvwire.PageKey, kvwire.Form) bool) {
	for k := range maps.Keys(s.pages) {
		fn(k, testForm)
	}
	if s.ask != nil {
		s.ask()
	}
}

func TestLostEventsAreMadeUpFor(t *testing.T) {
	t.Parallel()
	page := func(i byte) kvwire.PageKey { return kvwire.PageKey{Tenant: "t", Hash: kvwire.Hash{i}} }
	s := &fakeStore{pages: map[kvwire.PageKey]struct{}{page(1): {}, page(2): {}}}
	ix := newIndex()
	cancel := ix.follow(s)
	defer cancel()
	s.feed(cache.Event{Kind: cache.Added, Key: page(3), Form: testForm})
	s.feed(cache.Event{Kind: cache.Removed, Key: page(1), Form: testForm})
	s.pages = map[kvwire.PageKey]struct{}{page(2): {}, page(4): {}}
	f := &follower{}
	f.pull(t, ix)
	s.feed(cache.Event{Kind: cache.Lost})
	a := f.pull(t, ix)
	require.False(t, a.Full, "the difference alone")
	listed, _ := ix.pages()
	require.Equal(t, 2, listed)
	for i, want := range map[byte]bool{1: false, 2: true, 3: false, 4: true} {
		require.Equal(t, want, f.filter.has(kvwire.DirectoryDigest(page(i), testForm)), "page %d", i)
	}
}

// Peers are answered while the pages are listed anew, which takes seconds where
// there are a million.
func TestPeersDoNotWaitForAList(t *testing.T) {
	t.Parallel()
	s := &fakeStore{pages: map[kvwire.PageKey]struct{}{{Tenant: "t"}: {}}}
	ix := newIndex()
	defer ix.follow(s)()
	asked := false
	s.ask = func() {
		if ix.mu.TryLock() {
			asked = true
			ix.mu.Unlock()
		}
	}
	s.feed(cache.Event{Kind: cache.Lost})
	require.True(t, asked)
}

// What is evicted leaves the directory of peers, and news does not wait for
// the slow poll.
func TestPeersHearOfEvictionAtOnce(t *testing.T) {
	t.Parallel()
	a, b := pair(t, func(c *Config) { c.DirectoryWait = 10 * time.Second })
	pages := testHashes("p", 20)
	asked := func() {
		eventually(t, func() bool {
			a.index.mu.Lock()
			defer a.index.mu.Unlock()
			return a.index.changed != nil
		}, "the peer's request does not wait for news")
	}
	asked()
	began := time.Now()
	put(t, a, pages, 1, 100)
	waitListed(t, b, "holder", pages)
	asked()
	require.Equal(t, 20, a.space.Reset())
	eventually(t, func() bool { return b.Stats().DirectoryPages == 0 }, "still listed")
	require.Less(t, time.Since(began), 3*time.Second)
}
