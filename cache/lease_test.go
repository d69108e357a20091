package cache

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func grantTo(t testing.TB, s *Space, client ClientID, hs []kvwire.Hash) (Lease, []Location, kvwire.Reason) {
	t.Helper()
	l, locs, why, err := s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hs, Client: client, TTL: time.Minute, Holders: 1}, nil)
	require.NoError(t, err)
	require.Len(t, locs, l.Pages)
	return l, locs, why
}

func TestLeaseGrantsTheHeldPrefix(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 5 {
		put(t, s, i, 1000)
	}
	before := []Location{{Offset: -1}}
	l, locs, why, err := s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hashes(0, 9), TTL: time.Minute, Holders: 1}, before)
	require.NoError(t, err)
	assert.Equal(t, 5, l.Pages)
	assert.NotZero(t, l.ID)
	assert.Equal(t, kvwire.ReasonAbsent, why)
	require.Len(t, locs, 6)
	for i, at := range locs[1:] {
		assert.Equal(t, content(i, 1000), c.Arena().Bytes(at.Offset, at.Length))
		assert.Equal(t, kvwire.Sum(content(i, 1000)), at.Sum)
	}
	st := c.Stats()
	assert.EqualValues(t, 1, st.Leases)
	assert.EqualValues(t, 5*1024, st.PinnedBytes)

	none, locs, why := grantTo(t, s, 1, hashes(7, 9))
	assert.Zero(t, none)
	assert.Empty(t, locs)
	assert.Equal(t, kvwire.ReasonAbsent, why)
	_, _, why, err = s.Lease(LeaseRequest{Form: formA, Shards: 2, Hashes: hashes(0, 1), TTL: time.Minute, Holders: 1}, nil)
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonLayout, why)

	res, err := c.Release(l.ID, 0, true)
	require.NoError(t, err)
	assert.Equal(t, ReleaseResult{State: ReleaseLive, BadPage: -1}, res)
	assert.Zero(t, c.Stats().PinnedBytes)
	assert.Zero(t, c.Stats().Leases)
}

func TestLeaseOrdersShardsWithinPages(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for _, k := range []int{1, 0} {
		for i := range 3 {
			_, err := s.Put(kvwire.Shard{Index: uint16(k), Count: 2}, formA, hash(i), content(10*i+k, 500))
			require.NoError(t, err)
		}
	}
	l, locs, why, err := s.Lease(LeaseRequest{Form: formA, Shards: 2, Hashes: hashes(0, 3), TTL: time.Minute, Holders: 2}, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.ReasonNone, why)
	require.Len(t, locs, 6)
	for i := range 3 {
		for k := range 2 {
			at := locs[i*2+k]
			assert.Equal(t, content(10*i+k, 500), c.Arena().Bytes(at.Offset, at.Length))
		}
	}
	require.NoError(t, c.Cancel(l.ID))
}

func TestLeaseRequestsAreChecked(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 1, 8)
	ok := LeaseRequest{Form: formA, Shards: 1, Hashes: hashes(1, 2), TTL: time.Second, Holders: 1}
	for name, change := range map[string]func(*LeaseRequest){
		"Shards 0":     func(r *LeaseRequest) { r.Shards = 0 },
		"Shards 513":   func(r *LeaseRequest) { r.Shards = kvwire.MaxShards + 1 },
		"65537 Hashes": func(r *LeaseRequest) { r.Hashes = make([]kvwire.Hash, kvwire.MaxBatch+1) },
		"TTL 0s":       func(r *LeaseRequest) { r.TTL = 0 },
		"TTL 1h0m":     func(r *LeaseRequest) { r.TTL = MaxTTL + 1 },
		"Holders 0":    func(r *LeaseRequest) { r.Holders = 0 },
		"Holders 513":  func(r *LeaseRequest) { r.Holders = kvwire.MaxShards + 1 },
	} {
		req := ok
		change(&req)
		_, _, _, err := s.Lease(req, nil)
		assert.ErrorContains(t, err, name)
	}
	req := ok
	req.Holders, req.TTL, req.Hashes = kvwire.MaxShards, MaxTTL, append(hashes(1, 2), make([]kvwire.Hash, kvwire.MaxBatch-1)...)
	l, _, _, err := s.Lease(req, nil)
	require.NoError(t, err)
	assert.Equal(t, 1, l.Pages)
	for h := range kvwire.MaxShards {
		_, err := c.Release(l.ID, h, false)
		require.NoError(t, err)
	}
	assert.Zero(t, c.Stats().Leases)
}

func TestReleaseByEachHolderOnce(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 1, 8)
	l, _, _, err := s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hashes(1, 2), Client: 5, TTL: time.Minute, Holders: 2}, nil)
	require.NoError(t, err)
	who, ok := c.LeaseClient(l.ID)
	assert.True(t, ok)
	assert.EqualValues(t, 5, who)

	_, err = c.Release(l.ID, 2, false)
	assert.ErrorContains(t, err, "holder 2")
	_, err = c.Release(l.ID, -1, false)
	assert.ErrorContains(t, err, "holder -1")
	_, err = c.Release(l.ID, 0, false)
	require.NoError(t, err)
	_, err = c.Release(l.ID, 0, false)
	var double *DoubleReleaseError
	require.ErrorAs(t, err, &double)
	assert.Equal(t, DoubleReleaseError{ID: l.ID, Holder: 0}, *double)
	assert.EqualValues(t, 256, c.Stats().PinnedBytes, "the other holder has it still")

	_, err = c.Release(l.ID, 1, false)
	require.NoError(t, err)
	assert.Zero(t, c.Stats().PinnedBytes)
	_, err = c.Release(l.ID, 1, false)
	assert.ErrorAs(t, err, &double)
	_, ok = c.LeaseClient(l.ID)
	assert.False(t, ok)

	for _, id := range []uint64{0, l.ID - 1, l.ID + 1} {
		_, err = c.Release(id, 0, false)
		assert.ErrorIs(t, err, ErrUnknownLease)
		assert.ErrorIs(t, c.Cancel(id), ErrUnknownLease)
	}
	assert.NoError(t, c.Cancel(l.ID), "ended already")
}

// An expired lease is unpinned without anybody asking, and says so later.
func TestLeaseExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := New(Config{Budget: 1 << 20})
		require.NoError(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		s := space(t, c, "a")
		put(t, s, 1, 8)
		put(t, s, 2, 8)
		grant := func(h int, ttl time.Duration) Lease {
			l, _, _, err := s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hashes(h, h+1), TTL: ttl, Holders: 1}, nil)
			require.NoError(t, err)
			return l
		}
		long, short := grant(1, time.Minute), grant(2, time.Second)
		pass(time.Second - 1)
		assert.EqualValues(t, 2, c.Stats().Leases)
		pass(1)
		assert.EqualValues(t, 1, c.Stats().Leases)
		assert.EqualValues(t, 256, c.Stats().PinnedBytes)
		res, err := c.Release(short.ID, 0, true)
		require.NoError(t, err)
		assert.Equal(t, ReleaseResult{State: ReleaseExpired, BadPage: -1}, res)
		res, err = c.Release(long.ID, 0, true)
		require.NoError(t, err)
		assert.Equal(t, ReleaseLive, res.State)
		assert.EqualValues(t, 1, c.Stats().Expired)
	})
}

func TestFatesAreBounded(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 1, 8)
	first, _, _ := grantTo(t, s, 1, hashes(1, 2))
	_, err := c.Release(first.ID, 0, false)
	require.NoError(t, err)
	for range fates {
		l, _, _ := grantTo(t, s, 1, hashes(1, 2))
		require.NotEqual(t, first.ID, l.ID)
		require.NoError(t, c.Cancel(l.ID))
	}
	res, err := c.Release(first.ID, 0, false)
	require.NoError(t, err)
	assert.Equal(t, ReleaseExpired, res.State, "how it ended is forgotten, that it did is not")
}

func TestEndClientEndsItsLeasesOnly(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 6 {
		put(t, s, i, 8)
	}
	var gone []Lease
	for i := range 3 {
		l, _, _ := grantTo(t, s, 1, hashes(i, i+1))
		gone = append(gone, l)
	}
	kept, _, _ := grantTo(t, s, 2, hashes(4, 5))
	require.NoError(t, c.Cancel(gone[1].ID))
	assert.Equal(t, 2, c.EndClient(1))
	assert.Zero(t, c.EndClient(1))
	for _, l := range gone {
		res, err := c.Release(l.ID, 0, false)
		require.NoError(t, err)
		assert.Equal(t, ReleaseExpired, res.State)
	}
	res, err := c.Release(kept.ID, 0, false)
	require.NoError(t, err)
	assert.Equal(t, ReleaseLive, res.State)
	assert.Empty(t, c.leases.clients)
}

// Invariant 4: leases and pins together hold at most half the budget, the
// leases of one client a quarter; beyond that the answer is a miss.
func TestPinsAreCapped(t *testing.T) {
	c := open(t, Config{Budget: 8 << 20})
	s := space(t, c, "a")
	const n = 64 << 10 // 128 in the budget
	for i := range 90 {
		put(t, s, i, n)
	}
	l1, _, why := grantTo(t, s, 1, hashes(0, 40))
	assert.Equal(t, 32, l1.Pages)
	assert.Equal(t, kvwire.ReasonPinned, why)
	none, _, why := grantTo(t, s, 1, hashes(50, 60))
	assert.Zero(t, none)
	assert.Equal(t, kvwire.ReasonPinned, why)

	same, _, why := grantTo(t, s, 2, hashes(0, 32))
	assert.Equal(t, 32, same.Pages, "held already: costs the budget nothing")
	assert.Equal(t, kvwire.ReasonNone, why)
	p, why, err := s.Pin(formA, hashes(30, 52), time.Minute)
	require.NoError(t, err)
	assert.Equal(t, 22, p.Pages, "2 held already and 20 more")
	assert.Equal(t, kvwire.ReasonNone, why)
	l3, _, why := grantTo(t, s, 3, hashes(52, 72))
	assert.Equal(t, 12, l3.Pages)
	assert.Equal(t, kvwire.ReasonPinned, why)
	assert.EqualValues(t, 64*n, c.Stats().PinnedBytes)
	_, why, err = s.Pin(formA, hashes(80, 81), time.Minute)
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonPinned, why)

	assert.ErrorIs(t, c.Unpin(l1.ID), ErrUnknownLease, "not a pin")
	_, err = c.Release(p.ID, 0, false)
	assert.ErrorIs(t, err, ErrUnknownLease, "not a lease")
	require.NoError(t, c.Unpin(p.ID))
	c.EndClient(1)
	assert.EqualValues(t, 44*n, c.Stats().PinnedBytes)
	c.EndClient(2)
	c.EndClient(3)
	assert.Zero(t, c.Stats().PinnedBytes)
	again, _, why := grantTo(t, s, 1, hashes(0, 32))
	assert.Equal(t, 32, again.Pages)
	assert.Equal(t, kvwire.ReasonNone, why)
}

// Invariant 1: a lease is granted only for bytes that have their checksum.
func TestLeaseStopsAtCorruptPage(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 6 {
		put(t, s, i, 1000)
	}
	_, locs, _ := grantTo(t, s, 1, hashes(0, 6))
	c.EndClient(1)
	flip := func(i int) { c.Arena().Bytes(locs[i].Offset, locs[i].Length)[500] ^= 0x10 }

	flip(3)
	l, got, why := grantTo(t, s, 1, hashes(0, 6))
	assert.Equal(t, 3, l.Pages)
	assert.Len(t, got, 3)
	assert.Equal(t, kvwire.ReasonCorrupt, why)
	assert.EqualValues(t, 3*1024, c.Stats().PinnedBytes)
	assert.EqualValues(t, 1024, c.Stats().QuarantineBytes)
	assert.False(t, s.Has(formA, hash(3)))

	flip(1)
	res, err := c.Release(l.ID, 0, true)
	require.NoError(t, err)
	assert.Equal(t, ReleaseResult{State: ReleaseCorrupt, BadPage: 1}, res)

	flip(0)
	none, got, why := grantTo(t, s, 1, hashes(0, 3))
	assert.Zero(t, none)
	assert.Empty(t, got)
	assert.Equal(t, kvwire.ReasonCorrupt, why)
	st := c.Stats()
	assert.EqualValues(t, 3, st.Corrupt)
	assert.Zero(t, st.Leases)
	assert.Zero(t, st.PinnedBytes)
	assert.EqualValues(t, 2, st.Misses[kvwire.ReasonCorrupt])

	put(t, s, 0, 1000)
	assert.True(t, s.Has(formA, hash(0)), "it may be stored again")
}

// Invariant 5: pinned pages stay through any number of stores, then go.
func TestPinsAreNotSubjectToAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := New(Config{Budget: 4 << 20})
		require.NoError(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		s := space(t, c, "a")
		const n = 64 << 10
		for i := range 8 {
			put(t, s, i, n)
		}
		p, why, err := s.Pin(formA, hashes(0, 8), time.Minute)
		require.NoError(t, err)
		require.Equal(t, kvwire.ReasonNone, why)
		require.Equal(t, 8, p.Pages)
		for i := range 1000 {
			put(t, s, 100+i, n)
		}
		for i := range 8 {
			v, why := s.View(one, formA, hash(i), true)
			require.Equal(t, kvwire.ReasonNone, why)
			assert.Equal(t, content(i, n), v.Bytes())
			v.Close()
		}
		pass(time.Minute)
		assert.Zero(t, c.Stats().Pins)
		for i := range 1000 {
			put(t, s, 10000+i, n)
		}
		held := 0
		for i := range 8 {
			if s.Has(formA, hash(i)) {
				held++
			}
		}
		assert.Less(t, held, 8, "they can leave now")
		require.NoError(t, c.Unpin(p.ID), "timed out before")
	})
}

func TestPinRequestsAreChecked(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for _, ttl := range []time.Duration{0, -1, MaxTTL + 1} {
		_, _, err := s.Pin(formA, hashes(0, 1), ttl)
		assert.ErrorContains(t, err, "ttl")
	}
	_, _, err := s.Pin(formA, make([]kvwire.Hash, kvwire.MaxBatch+1), time.Second)
	assert.ErrorContains(t, err, "65537 hashes")
	p, why, err := s.Pin(formA, make([]kvwire.Hash, kvwire.MaxBatch), MaxTTL)
	require.NoError(t, err)
	assert.Zero(t, p)
	assert.Equal(t, kvwire.ReasonAbsent, why)
	assert.ErrorIs(t, c.Unpin(7), ErrUnknownLease)
}

// endWhileBusy runs check and ends the client's leases while check computes
// checksums without the lock. It reports whether it came in time.
func endWhileBusy(c *Cache, check func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		check()
	}()
	for {
		select {
		case <-done:
			return false
		default:
		}
		c.mu.Lock()
		for _, l := range c.leases.live {
			if l.busy > 0 {
				c.mu.Unlock()
				n := c.EndClient(1)
				<-done
				return n == 1
			}
		}
		c.mu.Unlock()
		runtime.Gosched()
	}
}

// A client that is lost while its lease is being verified, at the grant or at
// the release, leaves no pin behind, and the answer is that it expired.
func TestClientLostDuringVerification(t *testing.T) {
	c := open(t, Config{Budget: 64 << 20})
	s := space(t, c, "a")
	for i := range 8 {
		put(t, s, i, 1<<20)
	}
	require.Eventually(t, func() bool {
		var l Lease
		var locs []Location
		var why kvwire.Reason
		hit := endWhileBusy(c, func() { l, locs, why = grantTo(t, s, 1, hashes(0, 8)) })
		if hit && l.ID == 0 {
			assert.Equal(t, kvwire.ReasonExpired, why)
			assert.Empty(t, locs)
		}
		c.EndClient(1)
		assert.Zero(t, c.Stats().PinnedBytes)
		return hit && l.ID == 0
	}, settleTime, settleStep)
	require.Eventually(t, func() bool {
		l, _, _ := grantTo(t, s, 1, hashes(0, 8))
		var res ReleaseResult
		hit := endWhileBusy(c, func() {
			var err error
			res, err = c.Release(l.ID, 0, true)
			assert.NoError(t, err)
		})
		if hit {
			assert.Equal(t, ReleaseResult{State: ReleaseExpired, BadPage: -1}, res)
		}
		assert.Zero(t, c.Stats().PinnedBytes)
		return hit
	}, settleTime, settleStep)
	s.Reset()
	assert.Equal(t, c.arena.Size(), c.Stats().FreeBytes)
}
