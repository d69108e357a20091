package mesh

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// A peer that was not asked, for want of room here, has done nothing wrong.
func TestPullWithoutRoomBlamesNobody(t *testing.T) {
	t.Parallel()
	a, b := pair(t, func(c *Config) { c.MaxFills = 1 })
	pages := testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	b.fills.room <- struct{}{} // as another pull would
	_, why := b.Fill(within(t, 50*time.Millisecond), b.request(pages, 1))
	require.Equal(t, kvwire.ReasonDeadline, why)
	eventually(t, func() bool { return b.Stats().Pulling == 0 }, "the pull goes on")
	require.Zero(t, b.Stats().Pulls)
	require.False(t, b.peerOf(t, "holder").blamed())
	<-b.fills.room
	got, why := b.Fill(within(t, 30*time.Second), b.request(pages, 1))
	require.Equal(t, kvwire.ReasonNone, why)
	require.Equal(t, 4, got)
}

// Nor has one that was asked when there was next to no time left.
func TestPullWithoutTimeBlamesNobody(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	hold(t, px, 0)
	p := b.detour(t, "holder", px.addr)
	for range 20 { // in some of which the deadline comes before the pull has begun
		_, why := b.Fill(within(t, time.Millisecond), b.request(pages, 1))
		require.Equal(t, kvwire.ReasonDeadline, why)
		eventually(t, func() bool { return b.Stats().Pulling == 0 }, "the pull goes on")
		require.False(t, p.blamed())
	}
}

// A peer that takes pulls and does not answer leaves room for the others'.
func TestSlowPeerLeavesRoom(t *testing.T) {
	t.Parallel()
	const most = 4
	a, b := pair(t, func(c *Config) { c.MaxFills = most })
	slow, good := testHashes("slow", 2*most), testHashes("p", 4)
	liar(t, b, slow, func(kvwire.BatchRead, uint32) []byte { return nil })
	put(t, a, good, 1, pageBytes)
	waitListed(t, b, "holder", good)
	ctx, cancel := context.WithCancel(within(t, 5*time.Minute))
	done := make(chan struct{})
	for i := range slow {
		go func() {
			_, _ = b.Fill(ctx, b.request(slow[i:i+1], 1))
			done <- struct{}{}
		}()
	}
	eventually(t, func() bool { return b.Stats().Pulling == len(slow) && b.Stats().Pulls >= most/2 }, "the slow peer is not asked")
	got, why := b.Fill(within(t, 10*time.Second), b.request(good, 1))
	cancel()
	for range slow {
		<-done
	}
	require.Equal(t, kvwire.ReasonNone, why)
	require.Equal(t, len(good), got)
}

// The holder ends an answer at the deadline that it was told, which may be that
// of a caller who has left; who joined him with more time asks again.
func TestFollowerOutlivesTheHoldersPatience(t *testing.T) {
	t.Parallel()
	const size = 8 << 20 // more than the sockets' buffers take
	a, b := pair(t, nil)
	pages := testHashes("p", 1)
	put(t, a, pages, 1, size)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	g := gated(t, px, 300)
	b.detour(t, "holder", px.addr)
	led := make(chan kvwire.Reason, 1)
	go func() {
		_, why := b.Fill(within(t, 5*time.Second), b.request(pages, 1)) // enough to be followed on a busy machine
		led <- why
	}()
	eventually(t, func() bool { return b.Stats().Pulls == 1 && a.cache.Stats().Held == 1 }, "no pull")
	type result struct {
		pages int
		why   kvwire.Reason
	}
	followed := make(chan result, 1)
	go func() {
		n, why := b.Fill(within(t, time.Minute), b.request(pages, 1))
		followed <- result{n, why}
	}()
	eventually(t, func() bool { return b.Stats().Joined == 1 }, "nobody follows")
	require.Equal(t, kvwire.ReasonDeadline, <-led)
	eventually(t, func() bool { return a.cache.Stats().Held == 0 }, "the holder goes on")
	g.open()
	require.Equal(t, result{1, kvwire.ReasonNone}, <-followed)
	requireHeld(t, b, pages, 1, size)
}
