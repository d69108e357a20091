package engineport

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// hashing returns the registration of a rank of an engine that hashes pages of
// its 16-token block itself.
func hashing(engine string, tp int) kvwire.Register {
	r := rank(engine, kvwire.RoleWorker, tp)
	r.PageTokens, r.Descriptor.BlockBytes = 16, object
	return r
}

func chainOf(t *testing.T, pageTokens, pages int) []kvwire.Hash {
	t.Helper()
	c, err := kvwire.NewChain(pageTokens, kvwire.Scope{})
	require.NoError(t, err)
	require.NoError(t, c.AppendWire(tokens(pages*pageTokens, 0)))
	return c.Hashes()
}

func matchHashes(t *testing.T, c *kvwire.Client, m kvwire.MatchHashes) kvwire.Leased {
	t.Helper()
	l, err := c.MatchHashes(within(t), m, nil)
	require.NoError(t, err)
	return l
}

// Each rank asks for itself and has a lease of its own: one release ends it, and
// no other rank can.
func TestPagesNamedByHashes(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	ranks := []*kvwire.Client{dial(t, p.socket, kvwire.ClientOptions{}), dial(t, p.socket, kvwire.ClientOptions{})}
	for i, c := range ranks {
		got, err := c.Register(within(t), hashing("e", i))
		require.NoError(t, err)
		assert.Equal(t, 16, got.PageTokens)
		assert.Equal(t, hashing("e", i).Model.Namespace(16).String(), got.Namespace)
		assert.EqualValues(t, object, got.ObjectBytes)
	}
	pages := chainOf(t, 16, 3)
	for _, c := range ranks {
		l := matchHashes(t, c, kvwire.MatchHashes{Flags: kvwire.MatchPresence, Hashes: pages})
		assert.Zero(t, l.Lease)
		assert.Zero(t, l.Pages, "a page is there when all its shards are")
		assert.EqualValues(t, 3, l.ChainPages)
		store(t, c, l.Handle, 3)
		_, err := c.Extend(within(t), l.Handle, tokens(16, 0))
		wantError(t, err, kvwire.CodeBadField, "handle")
		require.NoError(t, c.Drop(within(t), l.Handle))
	}
	var leases []uint64
	for i, c := range ranks {
		l := matchHashes(t, c, kvwire.MatchHashes{DeadlineUS: 1e6, Hashes: append(pages[1:3:3], kvwire.Hash{1})})
		require.EqualValues(t, 2, l.Pages, "from the middle of a chain")
		assert.Zero(t, l.First)
		assert.EqualValues(t, 2, l.Shards)
		assert.Equal(t, kvwire.ReasonAbsent, l.Reason)
		for k := range 2 {
			at := l.Locations[2*k+i]
			assert.Equal(t, bytesOf(k+1), c.Arena()[at.Offset:at.Offset+at.Length])
		}
		again, err := c.Lease(within(t), kvwire.LeaseRequest{Handle: l.Handle, First: 1, Pages: 5}, nil)
		require.NoError(t, err)
		assert.EqualValues(t, 1, again.Pages)
		assert.Equal(t, kvwire.ReleaseLive, release(t, c, again.Lease, true))
		leases = append(leases, l.Lease)
	}
	_, err := ranks[0].Release(within(t), kvwire.Release{Lease: leases[1]})
	wantError(t, err, kvwire.CodeUnknownLease, "lease")
	for i, c := range ranks {
		assert.Equal(t, kvwire.ReleaseLive, release(t, c, leases[i], true))
		_, err := c.Release(within(t), kvwire.Release{Lease: leases[i]})
		wantError(t, err, kvwire.CodeDoubleRelease, "lease")
	}
	assert.Zero(t, p.cache.Stats().PinnedBytes)

	l := matchHashes(t, ranks[0], kvwire.MatchHashes{Hashes: pages})
	require.NoError(t, ranks[1].Close()) // another rank's end leaves it alone
	require.Eventually(t, func() bool { return p.connected.Load() == 1 }, timeout, tick)
	assert.Equal(t, kvwire.ReleaseLive, release(t, ranks[0], l.Lease, false))
}

// Tokens and hashes name the same pages.
func TestHashesAndTokensNameTheSamePages(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	writer := attach(t, p.tcp, registration("w"))
	m := match(t, writer, kvwire.Match{Tokens: tokens(64*4, 0)})
	store(t, writer, m.Handle, 4)
	l := matchHashes(t, attach(t, p.tcp, registration("r")), kvwire.MatchHashes{Flags: kvwire.MatchPresence, Hashes: chainOf(t, 64, 4)})
	assert.EqualValues(t, 4, l.Pages)
	empty := matchHashes(t, writer, kvwire.MatchHashes{})
	assert.Zero(t, empty.Pages)
	assert.NotZero(t, empty.Handle)
}

func TestPageTokensOfARegistration(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	for _, n := range []int{-16, 8, 24, kvwire.MaxPageTokens + 16} {
		reg := registration("e")
		reg.PageTokens = n
		_, err := dial(t, p.tcp, kvwire.ClientOptions{Inline: true}).Register(within(t), reg)
		wantError(t, err, kvwire.CodeBadField, "page_tokens")
	}
	reg := registration("e")
	reg.PageTokens = kvwire.MaxPageTokens
	got, err := dial(t, p.tcp, kvwire.ClientOptions{Inline: true}).Register(within(t), reg)
	require.NoError(t, err)
	assert.Equal(t, kvwire.MaxPageTokens, got.PageTokens)
}

// What a refused match by hashes took is given back.
func TestRefusedMatchHashes(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	r := rawEngine(t, p, "e")
	good := kvwire.AppendMatchHashes(nil, kvwire.MatchHashes{Hashes: make([]kvwire.Hash, 2)})
	for at, want := range map[int]struct {
		code  kvwire.Code
		field string
	}{8: {kvwire.CodeBadField, "flags"}, 10: {kvwire.CodeBadFrame, "match_hashes"}, 12: {kvwire.CodeBadFrame, "hashes"}, 15: {kvwire.CodeTooLarge, "hashes"}} {
		b := append([]byte(nil), good...)
		b[at] = 0xFF
		wantError(t, r.ask(t, frame(kvwire.TypeMatchHashes, b)), want.code, want.field)
	}
	assert.Zero(t, p.memory.used.Load())

	c := attach(t, p.tcp, registration("many"))
	for range MaxHandles {
		_, err := c.MatchHashes(within(t), kvwire.MatchHashes{Flags: kvwire.MatchPresence}, nil)
		require.NoError(t, err)
	}
	kept := p.memory.used.Load()
	_, err := c.MatchHashes(within(t), kvwire.MatchHashes{Hashes: make([]kvwire.Hash, 9)}, nil)
	wantError(t, err, kvwire.CodeBusy, "handle")
	assert.Equal(t, kept, p.memory.used.Load())

	p.Drain()
	_, err = c.MatchHashes(within(t), kvwire.MatchHashes{}, nil)
	wantError(t, err, kvwire.CodeDraining, "")
}
