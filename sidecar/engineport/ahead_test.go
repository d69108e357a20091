package engineport

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// The pages of a long match are looked up and checked while its tokens come;
// the answer is that of a lease of the same pages, which does it afterwards.
func TestLongMatchIsAnsweredAsIfAllTokensHadBeenThere(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	m := kvwire.Match{DeadlineUS: 5e6, LeaseMS: 10_000, Flags: kvwire.MatchLocal, Tokens: tokens(64*625+9, 1)}
	c := attach(t, p.tcp, registration("a"))
	named := match(t, c, kvwire.Match{Flags: kvwire.MatchPresence, Tokens: m.Tokens})
	for i := range 625 {
		got, err := c.Write(within(t), kvwire.PageRef{Handle: named.Handle, Page: uint32(i)}, bytesOf(i))
		require.NoError(t, err)
		require.Equal(t, kvwire.StoreStored, got.Status)
	}
	check := func(held uint32, pages int, why kvwire.Reason) {
		t.Helper()
		m.Held = held
		l := match(t, c, m)
		require.EqualValues(t, held/64, l.First)
		require.EqualValues(t, pages, l.Pages)
		require.Equal(t, why, l.Reason)
		for i, at := range l.Locations {
			require.Equal(t, kvwire.Sum(bytesOf(int(l.First)+i)), at.Sum)
		}
		outcome, err := c.Release(within(t), kvwire.Release{Lease: l.Lease})
		require.NoError(t, err)
		require.Equal(t, kvwire.ReleaseLive, outcome)
		require.NoError(t, c.Drop(within(t), l.Handle))
		later, err := c.Lease(within(t), kvwire.LeaseRequest{Handle: named.Handle, First: held / 64, Pages: 625 - held/64, DeadlineUS: 5e6, LeaseMS: 10_000, Flags: kvwire.MatchLocal}, nil)
		require.NoError(t, err)
		require.Equal(t, l.Pages, later.Pages)
		require.Equal(t, l.Locations, later.Locations)
		_, err = c.Release(within(t), kvwire.Release{Lease: later.Lease})
		require.NoError(t, err)
		require.Zero(t, p.cache.Stats().PinnedBytes)
	}
	check(0, 625, kvwire.ReasonNone)
	check(200, 622, kvwire.ReasonNone)

	before := p.cache.Stats()
	l := match(t, c, m)
	after := p.cache.Stats()
	require.EqualValues(t, 622, after.Lookups-before.Lookups)
	require.EqualValues(t, 622, after.Hits-before.Hits)
	at := l.Locations[400-3]
	_, err := c.Release(within(t), kvwire.Release{Lease: l.Lease})
	require.NoError(t, err)
	p.cache.Arena().Bytes(int64(at.Offset), int64(at.Length))[7] ^= 1
	m.Held = 0
	l = match(t, c, m)
	require.EqualValues(t, 400, l.Pages)
	require.Equal(t, kvwire.ReasonCorrupt, l.Reason)
	_, err = c.Release(within(t), kvwire.Release{Lease: l.Lease})
	require.NoError(t, err)
	check(0, 400, kvwire.ReasonAbsent)
	require.EqualValues(t, 1, p.cache.Stats().Corrupt)
}

// What was looked up for a match that never becomes whole is let go.
func TestPagesOfABrokenMatchAreLetGo(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	all := tokens(64*625, 1)
	c := attach(t, p.tcp, registration("a"))
	named := match(t, c, kvwire.Match{Flags: kvwire.MatchPresence, Tokens: all})
	for i := range 300 {
		_, err := c.Write(within(t), kvwire.PageRef{Handle: named.Handle, Page: uint32(i)}, bytesOf(i))
		require.NoError(t, err)
	}
	r := rawEngine(t, p, "b")
	b := frame(kvwire.TypeMatch, kvwire.AppendMatch(nil, kvwire.Match{DeadlineUS: 5e6, Tokens: all}))
	_, err := r.Write(b[:len(b)-8])
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.cache.Stats().PinnedBytes > 0 }, 5*time.Second, time.Millisecond, "pages are held")
	require.NoError(t, r.Close())
	require.Eventually(t, func() bool { return p.cache.Stats().PinnedBytes == 0 }, 5*time.Second, time.Millisecond)
}
