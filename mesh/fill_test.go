package mesh

import (
	"bufio"
	"bytes"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

const pageBytes = 96 << 10

// flipInArena changes a byte of the only copy of the payload in n's arena.
func flipInArena(t testing.TB, n *node, want []byte) {
	t.Helper()
	a := n.cache.Arena()
	all := a.Bytes(0, a.Size())
	at := bytes.Index(all, want)
	require.GreaterOrEqual(t, at, 0)
	all[at+len(want)/2] ^= 0x10
}

func TestFillBringsThePrefix(t *testing.T) {
	t.Parallel()
	const shards = 2
	a, b := pair(t, nil)
	pages := testHashes("p", 70)
	put(t, a, pages[:64], shards, pageBytes)
	waitListed(t, b, "holder", pages[:64])
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, shards))
	require.Equal(t, 64, got)
	require.Equal(t, kvwire.ReasonAbsent, why, "nobody has the last six")
	requireHeld(t, b, pages[:64], shards, pageBytes)
	s, h := b.Stats(), a.Stats()
	require.Equal(t, uint64(64), s.Fetched)
	require.Equal(t, uint64(64*shards*pageBytes), s.FetchBytes)
	require.Equal(t, uint64(1), s.Pulls, "one batch read")
	require.Equal(t, uint64(64), h.Served)
	require.Equal(t, uint64(64*shards*pageBytes), h.ServedBytes)
	require.Zero(t, s.Pulling)
	require.Equal(t, 64, s.OwnPages, "what was fetched is offered to others")

	got, why = b.Fill(within(t, 10*time.Second), b.request(pages[:64], shards))
	require.Equal(t, 64, got)
	require.Equal(t, kvwire.ReasonNone, why)
	require.Equal(t, uint64(1), b.Stats().Pulls, "nothing is missing, nobody is asked")
	require.Zero(t, a.cache.Stats().Held, "no view is left")
	require.Zero(t, b.cache.Stats().Held, "no slot is left")
}

// A miss that nobody holds costs no message.
func TestMissThatNobodyHoldsAsksNobody(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	put(t, a, testHashes("p", 50), 1, 1000)
	waitListed(t, b, "holder", testHashes("p", 50))
	for i := range 20 {
		got, why := b.Fill(within(t, 10*time.Second), b.request(testHashes(string(rune('A'+i)), 1000), 1))
		require.Zero(t, got)
		require.Equal(t, kvwire.ReasonAbsent, why)
	}
	s := b.Stats()
	require.Zero(t, s.Pulls)
	require.Equal(t, uint64(20), s.Probes, "one probe each")
	asked := a.Stats().NotServed
	require.Zero(t, asked.Total())
	require.Equal(t, uint64(20), s.Failures[kvwire.ReasonAbsent])
}

func TestFillOfOtherFormAsksNobody(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 2)
	put(t, a, pages, 1, 1000)
	waitListed(t, b, "holder", pages)
	req := b.request(pages, 1)
	req.Form = kvwire.Form{9}
	got, why := b.Fill(within(t, 10*time.Second), req)
	require.Zero(t, got)
	require.Equal(t, kvwire.ReasonAbsent, why)
	require.Zero(t, b.Stats().Pulls)
}

// Another number of shards than the caller's is refused, not stored.
func TestFillOfOtherShardsIsRefused(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 2)
	put(t, a, pages, 2, 1000)
	waitListed(t, b, "holder", pages)
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Zero(t, got)
	require.Equal(t, kvwire.ReasonPeer, why)
	require.Zero(t, b.Stats().Fetched)
	got, why = b.Fill(within(t, 10*time.Second), b.request(pages, 0))
	require.Zero(t, got)
	require.Equal(t, kvwire.ReasonLayout, why)
}

func TestFlippedByteInTheHoldersArena(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 8)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	flipInArena(t, a, payload(pages[5], 0, pageBytes))
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Equal(t, 5, got)
	require.Equal(t, kvwire.ReasonCorrupt, why)
	requireHeld(t, b, pages[:5], 1, pageBytes)
	require.False(t, b.space.Has(testForm, pages[5]))
	require.Equal(t, uint64(1), b.Stats().Corrupt)
	require.Equal(t, uint64(1), b.Stats().Failures[kvwire.ReasonCorrupt])
	eventually(t, func() bool { return a.cache.Stats().Corrupt == 1 }, "the holder does not hear of it")
	require.False(t, a.space.Has(testForm, pages[5]), "the holder has quarantined it")
	eventually(t, func() bool { return a.Stats().NotServed[kvwire.ReasonCorrupt] == 1 }, "it is not counted")
	require.True(t, a.space.Has(testForm, pages[4]))
	b.peerOf(t, "holder").idleConn(t)
}

func TestFlippedByteOnTheWire(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 8)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	target := int64(3*pageBytes + pageBytes/2) // in page 3, whatever the frames add
	px.bytes(func(n int64, buf []byte) {
		if at := target - n; at >= 0 && at < int64(len(buf)) {
			buf[at] ^= 0x40
		}
	})
	b.detour(t, "holder", px.addr)
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Equal(t, 3, got)
	require.Equal(t, kvwire.ReasonCorrupt, why)
	require.Equal(t, uint64(1), b.Stats().Corrupt)
	require.False(t, b.space.Has(testForm, pages[3]))
	requireHeld(t, b, pages[:3], 1, pageBytes)
	eventually(t, func() bool { return b.Stats().Pulling == 0 }, "the pull does not end")
	requireHeld(t, a, pages, 1, pageBytes) // the holder has checked it in vain
	require.Zero(t, a.cache.Stats().Corrupt)
	// Those behind it were under way. A second try brings the rest.
	px.bytes(nil)
	got, why = b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Equal(t, 8, got)
	require.Equal(t, kvwire.ReasonNone, why)
	requireHeld(t, b, pages, 1, pageBytes)
}

// A corrupt page is taken from another that holds it.
func TestCorruptPageComesFromAnother(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	c := startNode(t, "second", func(cfg *Config) { cfg.Join = []string{a.GossipAddr()} })
	waitPeers(t, b, 2)
	pages := testHashes("p", 8)
	put(t, a, pages, 1, pageBytes)
	put(t, c, pages[:6], 1, pageBytes) // shorter, so the holder is asked first
	waitListed(t, b, "holder", pages)
	waitListed(t, b, "second", pages[:6])
	flipInArena(t, a, payload(pages[5], 0, pageBytes))
	got, _ := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.GreaterOrEqual(t, got, 6)
	requireHeld(t, b, pages[:6], 1, pageBytes)
	eventually(t, func() bool { return c.Stats().Served == 1 }, "not counted") // after the bytes were written
}

// A fill does not wait for what follows its last page, nor does its end cut
// that short: the connection is used again.
func TestFillEndsWithItsLastPage(t *testing.T) {
	t.Parallel()
	n := startNode(t, "reader", nil)
	pages := testHashes("endless", 3)
	liar(t, n, pages, func(req kvwire.BatchRead, id uint32) (out []byte) {
		for i := range req.Hashes {
			p, b := honest(req, i)
			out = append(out, pageFrame(id, p, b)...)
		}
		return out // and no end of the answer
	})
	got, why := n.Fill(within(t, time.Minute), n.request(pages, 1))
	require.Equal(t, 3, got, why.String())
	eventually(t, func() bool { return n.Stats().Pulling == 0 }, "the pull waits for ever")

	a, b := pair(t, nil)
	pages = testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	var first *dataConn
	for range 50 {
		got, _ := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
		require.Equal(t, 4, got)
		c := b.peerOf(t, "holder").idleConn(t)
		if first == nil {
			first = c
		}
		require.Same(t, first, c)
		b.space.Reset()
		eventually(t, func() bool { return b.Stats().Pulling == 0 }, "the pull does not end")
	}
}

// hold blocks the peer's bytes after some of them until the test ends.
func hold(t testing.TB, px *proxy, after int64) {
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	px.bytes(func(n int64, b []byte) {
		if n+int64(len(b)) > after {
			<-release
		}
	})
}

// Not in parallel with others: it measures time.
func TestStoppedPeerEndsAtTheDeadline(t *testing.T) {
	a, b := pair(t, nil)
	const deadline = 400 * time.Millisecond
	for name, after := range map[string]int64{"before the challenge": 0, "before the first page": 300, "in a page": 3*pageBytes + 40000} {
		pages := testHashes(name, 8)
		put(t, a, pages, 1, pageBytes)
		waitListed(t, b, "holder", pages)
		px := newProxy(t, a.DataAddr())
		hold(t, px, after)
		p := b.detour(t, "holder", px.addr)
		var took time.Duration
		var got int
		var why kvwire.Reason
		tries := 0
		for ; tries == 0 || tries < 3 && took >= deadline+slack; tries++ { // the machine may be busy
			p.markUp()
			begin := time.Now()
			got, why = b.Fill(within(t, deadline), b.request(pages, 1))
			took = time.Since(begin)
		}
		require.Less(t, took, deadline+slack, name)
		require.GreaterOrEqual(t, took, deadline-10*time.Millisecond, name)
		require.Equal(t, kvwire.ReasonDeadline, why, name)
		require.LessOrEqual(t, got, 3*tries, "%s: what one try has brought stays", name)
		requireHeld(t, b, pages[:got], 1, pageBytes)
		eventually(t, func() bool { return b.Stats().Pulling == 0 && b.cache.Stats().Held == 0 }, "something is left behind")
		require.Equal(t, after <= 300, p.blamed(), name)
		p.markUp()
	}
}

// Invariant 2: whoever reads from a peer ends with its context, of whose end
// nobody else tells the connection.
func TestReadFromAPeerEndsWithItsContext(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]func() (context.Context, context.CancelFunc){
		"deadline": func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(t.Context(), 20*time.Millisecond)
		},
		"cancelled": func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(20*time.Millisecond, cancel)
			return ctx, cancel
		},
	} {
		here, there := net.Pipe()
		d := &dataConn{c: here, r: bufio.NewReader(here)}
		ctx, cancel := begin()
		stop := d.watch(ctx)
		ended := make(chan error, 1)
		go func() { ended <- d.read(ctx, make([]byte, 100), 0) }()
		select {
		case err := <-ended:
			require.Error(t, err, name)
		case <-time.After(2 * time.Second):
			t.Errorf("%s: the read goes on", name)
			_ = here.Close()
			<-ended
		}
		stop()
		cancel()
		d.close()
		_ = there.Close()
	}
}

// While another holds the pages, a stopped peer costs half of the time.
func TestStoppedPeerIsReplaced(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	c := startNode(t, "second", func(cfg *Config) { cfg.Join = []string{a.GossipAddr()} })
	waitPeers(t, b, 2)
	pages := testHashes("p", 8)
	put(t, a, pages, 1, pageBytes)
	put(t, c, pages[:7], 1, pageBytes)
	waitListed(t, b, "holder", pages)
	waitListed(t, b, "second", pages[:7])
	px := newProxy(t, a.DataAddr())
	hold(t, px, 2*pageBytes)
	b.detour(t, "holder", px.addr)
	got, _ := b.Fill(within(t, 5*time.Second), b.request(pages, 1))
	require.Equal(t, 7, got)
	requireHeld(t, b, pages[:7], 1, pageBytes)
}

func TestPeerKilledInMidFill(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 32)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	px.bytes(func(n int64, buf []byte) {
		if n > 5*pageBytes {
			px.cut()
		}
	})
	p := b.detour(t, "holder", px.addr)
	begin := time.Now()
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Less(t, time.Since(begin), 5*time.Second, "a lost connection is not waited for")
	require.Equal(t, kvwire.ReasonPeer, why)
	require.GreaterOrEqual(t, got, 3)
	require.Less(t, got, 32)
	requireHeld(t, b, pages[:got], 1, pageBytes)
	require.True(t, p.blamed(), "it is no candidate for a while")
	require.Zero(t, b.cache.Stats().Held)
	px.bytes(nil)
	eventually(t, func() bool { return !p.isDown() }, "it is never tried again")
	eventually(t, func() bool {
		got, _ := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
		return got == 32
	}, "it does not recover")
	requireHeld(t, b, pages, 1, pageBytes)
}

// A member that gossip declares gone ends the pulls from it.
func TestPeerThatIsGoneEndsItsPulls(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	hold(t, px, 300)
	b.detour(t, "holder", px.addr)
	done := make(chan kvwire.Reason, 1)
	begin := time.Now()
	go func() {
		_, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
		done <- why
	}()
	eventually(t, func() bool { return b.Stats().Pulls == 1 }, "no pull")
	b.peers.lost("holder")
	require.Equal(t, kvwire.ReasonPeer, <-done)
	require.Less(t, time.Since(begin), 5*time.Second)
}

// Connections to a peer that is gone are closed.
func TestConnectionsEndWithThePeer(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 1)
	put(t, a, pages, 1, 1000)
	waitListed(t, b, "holder", pages)
	got, _ := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Equal(t, 1, got)
	p := b.peerOf(t, "holder")
	c := p.idleConn(t)
	b.peers.lost("holder")
	_, err := c.c.Write([]byte{0})
	require.ErrorIs(t, err, net.ErrClosed)
	eventually(t, func() bool { return a.Stats().DataConns == 0 }, "the holder's side stays")
}

// gate lets the peer's bytes through only when it is opened.
type gate struct {
	once sync.Once
	ch   chan struct{}
}

func (g *gate) open() { g.once.Do(func() { close(g.ch) }) }

func gated(t testing.TB, px *proxy, after int64) *gate {
	g := &gate{ch: make(chan struct{})}
	t.Cleanup(g.open)
	px.bytes(func(n int64, b []byte) {
		if n+int64(len(b)) > after {
			<-g.ch
		}
	})
	return g
}

func TestTwoFillsOfOnePageAreOnePull(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 8)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	g := gated(t, px, 300)
	b.detour(t, "holder", px.addr)
	var wg sync.WaitGroup
	var full atomic.Int32
	fill := func(n int) {
		wg.Go(func() {
			if got, _ := b.Fill(within(t, 10*time.Second), b.request(pages[:n], 1)); got == n {
				full.Add(1)
			}
		})
	}
	fill(8)
	eventually(t, func() bool { return b.Stats().Pulls == 1 }, "no pull")
	for i := range 10 {
		fill(8 - i%3)
	}
	eventually(t, func() bool { return b.Stats().Joined >= 60 }, "the others do not wait for the same pages")
	g.open()
	wg.Wait()
	require.Equal(t, int32(11), full.Load())
	require.Equal(t, uint64(1), b.Stats().Pulls)
	require.Equal(t, uint64(8), a.Stats().Served)
	requireHeld(t, b, pages, 1, pageBytes)
}

// A longer prefix asks only for what is not under way.
func TestFillAsksOnlyForWhatIsNotUnderWay(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 12)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	g := gated(t, px, 300)
	b.detour(t, "holder", px.addr)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = b.Fill(within(t, 10*time.Second), b.request(pages[:8], 1)) })
	eventually(t, func() bool { return b.Stats().Pulls == 1 }, "no pull")
	var got int
	var why kvwire.Reason
	wg.Go(func() { got, why = b.Fill(within(t, 10*time.Second), b.request(pages, 1)) })
	eventually(t, func() bool { return b.Stats().Pulling == 2 }, "no second pull")
	g.open()
	wg.Wait()
	require.Equal(t, 12, got, why)
	require.Equal(t, uint64(12), a.Stats().Served)
}

// The call that began a pull may give up; those that wait with it get the pages.
func TestCancelledLeaderDoesNotFailFollowers(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	g := gated(t, px, 300)
	b.detour(t, "holder", px.addr)
	leader, cancel := context.WithCancel(within(t, 10*time.Second))
	led := make(chan kvwire.Reason, 1)
	go func() {
		_, why := b.Fill(leader, b.request(pages, 1))
		led <- why
	}()
	eventually(t, func() bool { return b.Stats().Pulls == 1 }, "no pull")
	followed := make(chan int, 1)
	go func() {
		n, _ := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
		followed <- n
	}()
	eventually(t, func() bool { return b.Stats().Joined == 4 }, "nobody follows")
	cancel()
	require.Equal(t, kvwire.ReasonDeadline, <-led)
	g.open()
	require.Equal(t, 4, <-followed)
	require.Equal(t, uint64(1), b.Stats().Pulls)
}

// A follower with more time than the leader gets its pages by asking again.
func TestFollowerOutlivesTheLeadersDeadline(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	g := gated(t, px, 300)
	b.detour(t, "holder", px.addr)
	led := make(chan kvwire.Reason, 1)
	go func() {
		_, why := b.Fill(within(t, 2*time.Second), b.request(pages, 1))
		led <- why
	}()
	eventually(t, func() bool { return b.Stats().Pulls == 1 }, "no pull")
	followed := make(chan int, 1)
	go func() {
		n, _ := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
		followed <- n
	}()
	require.Equal(t, kvwire.ReasonDeadline, <-led)
	require.Equal(t, 1, b.Stats().Pulling, "the pull goes on for the follower")
	g.open()
	require.Equal(t, 4, <-followed)
}

// When nobody waits any more, the transfer ends.
func TestAbandonedPullEnds(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	hold(t, px, pageBytes)
	p := b.detour(t, "holder", px.addr)
	ctx, cancel := context.WithCancel(within(t, 30*time.Second))
	done := make(chan kvwire.Reason, 1)
	go func() {
		_, why := b.Fill(ctx, b.request(pages, 1))
		done <- why
	}()
	eventually(t, func() bool { return b.cache.Stats().Held == 1 }, "no page under way")
	cancel()
	require.Equal(t, kvwire.ReasonDeadline, <-done)
	eventually(t, func() bool { return b.Stats().Pulling == 0 && b.cache.Stats().Held == 0 }, "the pull goes on")
	require.False(t, p.isDown(), "that was no fault of the peer's")
}

// The holder honours the deadline of the request: reasons instead of bytes.
func TestHolderStopsAtTheDeadline(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 3)
	put(t, a, pages, 1, pageBytes)
	p := b.peerOf(t, "holder")
	c, err := p.take(within(t, 10*time.Second), true)
	require.NoError(t, err)
	defer c.close()
	req := kvwire.BatchRead{DeadlineUS: 0, Form: testForm, Namespace: testNS, Tenant: testTenant, Hashes: pages}
	require.NoError(t, c.send(kvwire.TypeBatchRead, kvwire.AppendBatchRead(nil, req)))
	for range pages {
		require.Equal(t, kvwire.ReasonDeadline, readMissed(t, c).Reason)
	}
	require.NoError(t, endOfAnswer(c))
	require.Equal(t, uint64(3), a.Stats().NotServed[kvwire.ReasonDeadline])
	req.DeadlineUS, req.Tenant = 1e6, "nobody"
	require.NoError(t, c.send(kvwire.TypeBatchRead, kvwire.AppendBatchRead(nil, req)))
	for range pages {
		require.Equal(t, kvwire.ReasonNamespace, readMissed(t, c).Reason)
	}
	require.NoError(t, endOfAnswer(c))
	require.Nil(t, a.cache.Lookup("nobody", testNS), "a question makes no space")
}

func TestFullCacheEndsTheFill(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("big", 3)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	// Everything in the reader's arena is in use.
	var keep []interface{ Abort() }
	for _, h := range testHashes("filler", 1<<12) {
		sl, _, err := b.space.Reserve(kvwire.Shard{Count: 1}, testForm, h, pageBytes)
		require.NoError(t, err)
		if sl == nil {
			break
		}
		keep = append(keep, sl)
	}
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	for _, k := range keep {
		k.Abort()
	}
	require.Zero(t, got)
	require.Equal(t, kvwire.ReasonOverBudget, why)
	require.False(t, b.peerOf(t, "holder").isDown())
}

func TestCloseEndsFills(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("p", 4)
	put(t, a, pages, 1, pageBytes)
	waitListed(t, b, "holder", pages)
	px := newProxy(t, a.DataAddr())
	hold(t, px, 300)
	b.detour(t, "holder", px.addr)
	done := make(chan kvwire.Reason, 1)
	go func() {
		_, why := b.Fill(within(t, 30*time.Second), b.request(pages, 1))
		done <- why
	}()
	eventually(t, func() bool { return b.Stats().Pulls == 1 }, "no pull")
	b.stop()
	require.Equal(t, kvwire.ReasonDraining, <-done)
}

// Who holds what is read from directories alone.
func TestHoldersAskNobody(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	pages := testHashes("h", 10)
	put(t, a, pages[:7], 1, pageBytes)
	waitListed(t, b, "holder", pages[:7])
	r := b.request(pages, 1)
	require.Equal(t, []Holding{{a.Name(), 7}}, b.Holders(r.Space, r.Form, r.Hashes))
	require.Empty(t, b.Holders(r.Space, r.Form, r.Hashes[8:]))
	require.Zero(t, b.Stats().Pulls)
	require.Zero(t, a.Stats().Served)
}
