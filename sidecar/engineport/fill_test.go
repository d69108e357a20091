package engineport

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// fillFunc is a peer.
type fillFunc func(ctx context.Context, r FillRequest) (int, kvwire.Reason)

func (f fillFunc) Fill(ctx context.Context, r FillRequest) (int, kvwire.Reason) { return f(ctx, r) }

func TestMissingPagesComeFromPeers(t *testing.T) {
	t.Parallel()
	p := newPort(t, func(c *Config) {
		c.Fill = fillFunc(func(_ context.Context, r FillRequest) (int, kvwire.Reason) {
			for i, h := range r.Hashes[:2] {
				_, err := r.Space.Put(kvwire.Shard{Count: uint16(r.Shards)}, r.Form, h, bytesOf(i))
				if err != nil {
					return i, kvwire.ReasonPeer
				}
			}
			return 2, kvwire.ReasonAbsent
		})
	})
	c := attach(t, p.socket, registration("e"))
	prompt := tokens(64*4, 0)
	local := match(t, c, kvwire.Match{Tokens: prompt, Flags: kvwire.MatchLocal, DeadlineUS: 1e6})
	assert.Zero(t, local.Pages)
	store(t, c, local.Handle, 1)

	l := match(t, c, kvwire.Match{Tokens: prompt, DeadlineUS: 1e6})
	assert.EqualValues(t, 3, l.Pages)
	assert.EqualValues(t, 2, l.FromPeers)
	assert.Equal(t, kvwire.ReasonAbsent, l.Reason)
	n := p.Counts()
	assert.Equal(t, Served{Pages: 1, Tokens: 64, Bytes: object}, n.LeasedLocal)
	assert.Equal(t, Served{Pages: 2, Tokens: 128, Bytes: 2 * object}, n.LeasedPeer)
	assert.EqualValues(t, 4+1, n.MissedPages["absent"])
}

func TestMatchAnswersByItsDeadline(t *testing.T) {
	t.Parallel()
	p := newPort(t, func(c *Config) {
		c.Fill = fillFunc(func(ctx context.Context, _ FillRequest) (int, kvwire.Reason) {
			<-ctx.Done()
			return 0, kvwire.ReasonDeadline
		})
	})
	c := attach(t, p.socket, registration("e"))
	store(t, c, match(t, c, kvwire.Match{Tokens: tokens(64, 0)}).Handle, 1)
	for _, limit := range []time.Duration{5 * time.Millisecond, 60 * time.Millisecond} {
		took := time.Hour
		for range 5 { // the best of five: others use this machine, too
			began := time.Now()
			l := match(t, c, kvwire.Match{Tokens: tokens(128, 0), DeadlineUS: uint32(limit.Microseconds())})
			took = min(took, time.Since(began))
			assert.Greater(t, time.Since(began), limit/2)
			assert.EqualValues(t, 1, l.Pages)
			assert.Equal(t, kvwire.ReasonDeadline, l.Reason)
		}
		assert.Less(t, took, limit+50*time.Millisecond)
	}
	// What was read while it waited is not lost.
	require.NoError(t, c.Ping(within(t)))
}

// A deadline that is over before a peer is asked is why pages are missing; they
// are absent where no peer was to be asked.
func TestMatchThatIsLateBeforeItAsksSaysSo(t *testing.T) {
	t.Parallel()
	p := newPort(t, func(c *Config) {
		c.Fill = fillFunc(func(context.Context, FillRequest) (int, kvwire.Reason) { return 0, kvwire.ReasonCorrupt })
	})
	c := attach(t, p.socket, registration("e"))
	for us, want := range map[uint32]kvwire.Reason{0: kvwire.ReasonAbsent, 1: kvwire.ReasonDeadline, 10e6: kvwire.ReasonCorrupt} {
		assert.Equal(t, want, match(t, c, kvwire.Match{Tokens: tokens(128, 0), DeadlineUS: us}).Reason, "%d µs", us)
	}
}

// Invariant 7: an answer with fewer pages than were asked for says why, and
// counts it, also where a peer gives no reason.
func TestEveryMissHasAReason(t *testing.T) {
	t.Parallel()
	var peerSays atomic.Uint32
	p := newPort(t, func(c *Config) {
		c.Fill = fillFunc(func(context.Context, FillRequest) (int, kvwire.Reason) { return 0, kvwire.Reason(peerSays.Load()) })
	})
	c := attach(t, p.socket, registration("e"))
	missed := func(want kvwire.Reason, m kvwire.Match) {
		t.Helper()
		before := p.Counts().MissedPages[want.String()]
		l := match(t, c, m)
		assert.Less(t, l.Pages, l.ChainPages)
		assert.Equal(t, want, l.Reason)
		assert.Contains(t, kvwire.Reasons(), l.Reason)
		if m.Flags&kvwire.MatchPresence == 0 {
			assert.Equal(t, before+uint64(l.ChainPages-l.Pages), p.Counts().MissedPages[want.String()])
		}
	}
	prompt := kvwire.Match{Tokens: tokens(64*3, 0), DeadlineUS: 5e6}
	for says, want := range map[kvwire.Reason]kvwire.Reason{
		kvwire.ReasonNone: kvwire.ReasonAbsent, kvwire.ReasonAbsent: kvwire.ReasonAbsent,
		kvwire.ReasonPeer: kvwire.ReasonPeer, kvwire.ReasonDeadline: kvwire.ReasonDeadline,
		kvwire.ReasonCorrupt: kvwire.ReasonCorrupt,
	} {
		peerSays.Store(uint32(says))
		missed(want, prompt)
	}
	peerSays.Store(uint32(kvwire.ReasonPeer))
	missed(kvwire.ReasonAbsent, kvwire.Match{Tokens: prompt.Tokens, Flags: kvwire.MatchLocal})
	missed(kvwire.ReasonAbsent, kvwire.Match{Tokens: prompt.Tokens, Flags: kvwire.MatchPresence})
	store(t, c, match(t, c, prompt).Handle, 2)
	missed(kvwire.ReasonPeer, prompt)

	other := registration("other-layout")
	other.Descriptor.Layout = "other"
	c = attach(t, p.socket, other)
	missed(kvwire.ReasonLayout, kvwire.Match{Tokens: prompt.Tokens, Flags: kvwire.MatchLocal})
	ranks := attach(t, p.socket, rank("two-ranks", kvwire.RoleWorker, 0))
	store(t, ranks, match(t, ranks, prompt).Handle, 1)
	c = ranks
	missed(kvwire.ReasonIncomplete, kvwire.Match{Tokens: prompt.Tokens, Flags: kvwire.MatchLocal})
}

func TestFillEndsWithItsClient(t *testing.T) {
	t.Parallel()
	began, ended := make(chan struct{}), make(chan struct{})
	p := newPort(t, func(c *Config) {
		c.Fill = fillFunc(func(ctx context.Context, _ FillRequest) (int, kvwire.Reason) {
			close(began)
			<-ctx.Done()
			close(ended)
			return 0, kvwire.ReasonPeer
		})
	})
	c := newRaw(t, "unix", p.socket)
	_, err := c.Write(registerFrame(t, registration("e")))
	require.NoError(t, err)
	_, err = c.Write(frame(kvwire.TypeMatch, kvwire.AppendMatch(nil, kvwire.Match{Tokens: tokens(64, 0), DeadlineUS: 50e6})))
	require.NoError(t, err)
	<-began
	require.NoError(t, c.Close())
	select {
	case <-ended:
	case <-time.After(timeout): // well before the deadline of the match
		t.Fatal("the fill goes on without its client")
	}
	require.Eventually(t, func() bool { return p.Status().Connections == 0 }, timeout, tick)
}

func TestCloseEndsAFill(t *testing.T) {
	t.Parallel()
	began := make(chan struct{})
	p := newPort(t, func(c *Config) {
		c.Fill = fillFunc(func(ctx context.Context, _ FillRequest) (int, kvwire.Reason) {
			close(began)
			<-ctx.Done()
			return 0, kvwire.ReasonPeer
		})
	})
	c := newRaw(t, "unix", p.socket)
	_, err := c.Write(registerFrame(t, registration("e")))
	require.NoError(t, err)
	_, err = c.Write(frame(kvwire.TypeMatch, kvwire.AppendMatch(nil, kvwire.Match{Tokens: tokens(64, 0), DeadlineUS: 50e6})))
	require.NoError(t, err)
	<-began // newPort's cleanup closes the server and waits for it
}

func TestPaceKeepsLargeLeasesWithinTheirDeadline(t *testing.T) {
	t.Parallel()
	var p pace
	p.perSecond.Store(100 << 20)
	assert.Equal(t, 1, p.pages(-time.Second, 1<<20))
	assert.Equal(t, 1, p.pages(0, 1<<20))
	assert.Equal(t, 50, p.pages(time.Second, 1<<20))
}
