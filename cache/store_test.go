package cache

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"membrane/kvwire"
)

func TestConfigIsChecked(t *testing.T) {
	for name, cfg := range map[string]Config{
		"Budget":             {Budget: MinBudget - 1},
		"WindowFraction":     {Budget: MinBudget, WindowFraction: 1},
		"ReserveFraction":    {Budget: MinBudget, WindowFraction: 0.5, ReserveFraction: 0.5},
		"PinFraction":        {Budget: MinBudget, PinFraction: -0.1},
		"ClientPinFraction":  {Budget: MinBudget, ClientPinFraction: 2},
		"QuarantineFraction": {Budget: MinBudget, QuarantineFraction: -1},
		"AllocWait":          {Budget: MinBudget, AllocWait: -1},
		"ExpectedPages":      {Budget: MinBudget, ExpectedPages: -1},
	} {
		_, err := New(cfg)
		assert.ErrorContains(t, err, name)
	}
}

func TestSpacesAreInternedAndBounded(t *testing.T) {
	c := open(t, Config{})
	a := space(t, c, "a")
	assert.Same(t, a, space(t, c, "a"))
	assert.NotSame(t, a, space(t, c, "b"))
	assert.Equal(t, "a", a.Tenant())
	assert.Equal(t, kvwire.Namespace{7}, a.Namespace())

	_, err := c.Space(strings.Repeat("x", kvwire.MaxTenant), kvwire.Namespace{})
	assert.NoError(t, err)
	_, err = c.Space(strings.Repeat("x", kvwire.MaxTenant+1), kvwire.Namespace{})
	assert.ErrorContains(t, err, "129 bytes")

	for i := len(c.spaces); i < MaxSpaces; i++ {
		_, err := c.Space(fmt.Sprint("t", i/MaxTenantSpaces), kvwire.Namespace{1, byte(i), byte(i >> 8), byte(i >> 16)})
		require.NoError(t, err)
	}
	_, err = c.Space("late", kvwire.Namespace{})
	assert.ErrorContains(t, err, "65536 spaces")
	assert.Same(t, a, space(t, c, "a"), "known ones still open")
}

func TestSpacesOfOneTenantAreBounded(t *testing.T) {
	c := open(t, Config{})
	for i := range MaxTenantSpaces {
		_, err := c.Space("t", kvwire.Namespace{byte(i), byte(i >> 8)})
		require.NoError(t, err)
	}
	_, err := c.Space("t", kvwire.Namespace{1, 2, 3})
	assert.ErrorContains(t, err, "8192")
	_, err = c.Space("t", kvwire.Namespace{})
	assert.NoError(t, err, "known ones still open")
	_, err = c.Space("u", kvwire.Namespace{1, 2, 3})
	assert.NoError(t, err, "another tenant is not concerned")
}

func TestPutThenReadBack(t *testing.T) {
	c := open(t, Config{ClusterKey: []byte("k")})
	s := space(t, c, "a")
	want := content(1, 5000)
	res, err := s.Put(one, formA, hash(1), want)
	require.NoError(t, err)
	assert.Equal(t, PutResult{Stored: true, Sum: kvwire.Sum(want)}, res)

	v, why := s.View(one, formA, hash(1), true)
	require.Equal(t, kvwire.ReasonNone, why)
	assert.Equal(t, want, v.Bytes())
	assert.Equal(t, kvwire.Sum(want), v.Sum())
	key := kvwire.ObjectKey{PageKey: kvwire.PageKey{Tenant: "a", Namespace: kvwire.Namespace{7}, Hash: hash(1)}, Shard: one, Form: formA}
	assert.True(t, kvwire.NewAuthenticator([]byte("k")).Verify(key, 5000, v.Sum(), v.Auth()))
	v.Close()
	v.Close()
	assert.Zero(t, c.Stats().Held)

	_, why = space(t, c, "b").View(one, formA, hash(1), false)
	assert.Equal(t, kvwire.ReasonAbsent, why, "another tenant has nothing")
}

// Invariants 1 and 6: the checksum is that of our copy, whatever the client
// writes into its memory meanwhile.
func TestChecksumIsOfOurOwnCopy(t *testing.T) {
	const n = 1 << 20
	c := open(t, Config{Budget: 64 << 20})
	s := space(t, c, "a")
	// Not Go memory: the race detector must not see what a client does.
	src, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(src)) }()
	var stop atomic.Bool
	var client sync.WaitGroup
	defer client.Wait()
	defer stop.Store(true)
	client.Go(func() {
		for i := 0; !stop.Load(); i++ {
			src[i*4096%n]++
		}
	})
	began := time.Now()
	for i := 0; i < 16 || time.Since(began) < 200*time.Millisecond; i++ {
		res, err := s.Put(one, formA, hash(i), src)
		require.NoError(t, err)
		require.True(t, res.Stored)
		v, why := s.View(one, formA, hash(i), true)
		require.Equal(t, kvwire.ReasonNone, why, "store %d", i)
		v.Close()
	}
}

// The first writer wins; the second store moves nothing and is counted.
func TestFirstWriterWins(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 1, 1000)
	free := c.Stats().FreeBytes
	res, err := s.Put(one, formA, hash(1), content(2, 1000))
	require.NoError(t, err)
	assert.Equal(t, PutResult{Exists: true, Sum: kvwire.Sum(content(1, 1000))}, res)

	sl, res, err := s.Reserve(one, formA, hash(1), 1000)
	require.NoError(t, err)
	assert.Nil(t, sl)
	assert.True(t, res.Exists)
	assert.EqualValues(t, 2, c.Stats().Exists)
	assert.Equal(t, free, c.Stats().FreeBytes)

	// Both reserved before either published.
	a, _, err := s.Reserve(one, formA, hash(2), 8)
	require.NoError(t, err)
	b, _, err := s.Reserve(one, formA, hash(2), 8)
	require.NoError(t, err)
	sum := kvwire.Sum(content(2, 8))
	copy(a.Bytes(), content(2, 8))
	copy(b.Bytes(), content(2, 8))
	auth := c.auth.Sign(a.Key(), 8, sum)
	assert.True(t, b.Publish(sum, auth).Stored)
	assert.Equal(t, PutResult{Exists: true, Sum: sum}, a.Publish(sum, auth))
	assert.Zero(t, c.Stats().Held)
}

// A page is offered in a form only when all shards of that form are here.
func TestPagesAreOfferedWhole(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put3 := func(i int, form kvwire.Form) {
		t.Helper()
		res, err := s.Put(kvwire.Shard{Index: uint16(i), Count: 3}, form, hash(1), content(i, 300))
		require.NoError(t, err)
		require.True(t, res.Stored)
	}
	match := func(form kvwire.Form) kvwire.Reason {
		n, why := s.Match(form, hashes(1, 2))
		assert.Equal(t, why == kvwire.ReasonNone, n == 1)
		assert.Equal(t, why == kvwire.ReasonNone, s.Has(form, hash(1)))
		return why
	}
	assert.Equal(t, kvwire.ReasonAbsent, match(formA))
	put3(2, formA)
	put3(0, formA)
	assert.Equal(t, kvwire.ReasonIncomplete, match(formA))
	assert.Equal(t, kvwire.ReasonLayout, match(formB))
	_, why := s.View(kvwire.Shard{Index: 0, Count: 3}, formA, hash(1), false)
	assert.Equal(t, kvwire.ReasonIncomplete, why)
	put3(1, formA)
	assert.Equal(t, kvwire.ReasonNone, match(formA))
	put3(1, formB)
	assert.Equal(t, kvwire.ReasonNone, match(formA))
	assert.Equal(t, kvwire.ReasonIncomplete, match(formB))

	for i := range 3 {
		v, why := s.View(kvwire.Shard{Index: uint16(i), Count: 3}, formA, hash(1), true)
		require.Equal(t, kvwire.ReasonNone, why)
		assert.Equal(t, content(i, 300), v.Bytes())
		v.Close()
	}
	_, why = s.View(kvwire.Shard{Index: 0, Count: 2}, formA, hash(1), false)
	assert.Equal(t, kvwire.ReasonLayout, why)
	res, err := s.Put(kvwire.Shard{Index: 0, Count: 2}, formA, hash(1), content(1, 8))
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonLayout, res.Reason)

	st := c.Stats()
	assert.EqualValues(t, 1, st.Pages)
	assert.EqualValues(t, 4, st.Objects)
	assert.EqualValues(t, 4*512, st.ResidentBytes)
}

func TestMatchSaysHowFarAndWhy(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	for i := range 700 {
		put(t, s, i, 100)
	}
	for _, n := range []int{0, 1, 255, 256, 257, 700} {
		got, why := s.Match(formA, append(hashes(0, n), hashes(1000, 1600)...))
		assert.Equal(t, n, got)
		assert.Equal(t, kvwire.ReasonAbsent, why)
	}
	n, why := s.Match(formA, hashes(0, 700))
	assert.Equal(t, 700, n)
	assert.Equal(t, kvwire.ReasonNone, why)
	assert.EqualValues(t, 6, c.Stats().Misses[kvwire.ReasonAbsent])
}

func TestStoresOutsideTheLimitsAreRefused(t *testing.T) {
	c := open(t, Config{Budget: 1 << 20})
	s := space(t, c, "a")
	for _, sh := range []kvwire.Shard{{Index: 0, Count: 0}, {Index: 1, Count: 1}, {Index: 0, Count: kvwire.MaxShards + 1}} {
		_, err := s.Put(sh, formA, hash(1), content(1, 8))
		assert.ErrorContains(t, err, "shard "+sh.String())
	}
	_, err := s.Put(one, formA, hash(1), nil)
	assert.ErrorContains(t, err, "length 0")
	_, _, err = s.Reserve(one, formA, hash(1), -1)
	assert.ErrorContains(t, err, "length -1")

	for n, want := range map[int64]kvwire.Reason{1<<20 + 1: kvwire.ReasonTooLarge, kvwire.MaxObject + 1: kvwire.ReasonTooLarge, 1 << 20: kvwire.ReasonNone} {
		sl, res, err := s.Reserve(one, formA, hash(1), n)
		require.NoError(t, err)
		assert.Equal(t, want, res.Reason, n)
		if sl != nil {
			sl.Abort()
		}
	}
	last := kvwire.Shard{Index: kvwire.MaxShards - 1, Count: kvwire.MaxShards}
	res, err := s.Put(last, formA, hash(1), content(1, 8))
	require.NoError(t, err)
	assert.True(t, res.Stored)
	assert.EqualValues(t, 2, c.Stats().Refused[kvwire.ReasonTooLarge])
}

// Invariant 1: what arrives from a peer is published only if it is what the
// peer's checksum and authenticator say.
func TestPublishRefusesWrongBytes(t *testing.T) {
	c := open(t, Config{ClusterKey: []byte("k")})
	s := space(t, c, "a")
	b := content(1, 9000)
	sum := kvwire.Sum(b)
	reserve := func() *Slot {
		sl, res, err := s.Reserve(one, formA, hash(1), 9000)
		require.NoError(t, err)
		require.NotNil(t, sl, res)
		copy(sl.Bytes(), b)
		return sl
	}
	sl := reserve()
	auth := c.auth.Sign(sl.Key(), 9000, sum)
	other := sl.Key()
	other.Hash = hash(2)

	sl.Bytes()[8999] ^= 1
	assert.Equal(t, kvwire.ReasonCorrupt, sl.Publish(sum, auth).Reason, "flipped byte")
	assert.Equal(t, kvwire.ReasonCorrupt, reserve().Publish(sum+1, auth).Reason, "other checksum")
	assert.Equal(t, kvwire.ReasonCorrupt, reserve().Publish(sum, c.auth.Sign(other, 9000, sum)).Reason, "other name")
	assert.Equal(t, kvwire.ReasonCorrupt, reserve().Publish(sum, kvwire.Auth{}).Reason, "no authenticator")
	assert.False(t, s.Has(formA, hash(1)))
	assert.EqualValues(t, 4, c.Stats().Refused[kvwire.ReasonCorrupt])
	assert.Equal(t, c.arena.Size(), c.Stats().FreeBytes, "nothing is left of them")

	assert.Equal(t, PutResult{Stored: true, Sum: sum}, reserve().Publish(sum, auth))
	assert.True(t, s.Has(formA, hash(1)))
}

func TestAbortGivesRoomBack(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	sl, _, err := s.Reserve(one, formA, hash(1), 1<<20)
	require.NoError(t, err)
	assert.Less(t, c.Stats().FreeBytes, c.arena.Size())
	sl.Abort()
	sl.Abort()
	assert.Equal(t, c.arena.Size(), c.Stats().FreeBytes)
}

// Invariant 3: a store that a reset overtakes is refused, not published.
func TestResetRefusesStoresThatBeganBefore(t *testing.T) {
	c := open(t, Config{})
	s, other := space(t, c, "a"), space(t, c, "b")
	put(t, s, 1, 1000)
	put(t, s, 2, 1000)
	put(t, other, 1, 1000)
	sl, _, err := s.Reserve(one, formA, hash(3), 8)
	require.NoError(t, err)
	copy(sl.Bytes(), content(3, 8))

	assert.Equal(t, 2, s.Reset())
	sum := kvwire.Sum(content(3, 8))
	assert.Equal(t, kvwire.ReasonReset, sl.Publish(sum, c.auth.Sign(sl.Key(), 8, sum)).Reason)
	assert.False(t, s.Has(formA, hash(1)))
	assert.False(t, s.Has(formA, hash(3)))
	assert.True(t, other.Has(formA, hash(1)))
	assert.EqualValues(t, 2, c.Stats().Evictions[kvwire.ReasonDropped])
	assert.EqualValues(t, 1, c.Stats().Refused[kvwire.ReasonReset])

	put(t, s, 3, 8)
	assert.True(t, s.Has(formA, hash(3)))
}

// A view holds its bytes through a reset; the slot comes back when it closes.
func TestViewOutlivesReset(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	put(t, s, 1, 100000)
	v, why := s.View(one, formA, hash(1), false)
	require.Equal(t, kvwire.ReasonNone, why)
	s.Reset()
	for i := range 300 {
		put(t, s, 10+i, 100000)
	}
	assert.Equal(t, content(1, 100000), v.Bytes())
	s.Reset()
	assert.Less(t, c.Stats().FreeBytes, c.arena.Size())
	v.Close()
	assert.Equal(t, c.arena.Size(), c.Stats().FreeBytes)
}

// Invariant 1: a resident object that rots is a counted miss, its slot is kept
// for inspection, and its name can be stored again.
func TestCorruptObjectsAreQuarantined(t *testing.T) {
	c := open(t, Config{Budget: 8 << 20, QuarantineFraction: 0.01})
	s := space(t, c, "a")
	const n = 32 << 10 // two fit into 1 % of 8 MiB
	rot := func(i int) {
		put(t, s, i, n)
		v, _ := s.View(one, formA, hash(i), false)
		v.Bytes()[n-1] ^= 1
		v.Close()
		v, why := s.View(one, formA, hash(i), true)
		assert.Nil(t, v)
		assert.Equal(t, kvwire.ReasonCorrupt, why)
		_, why = s.View(one, formA, hash(i), true)
		assert.Equal(t, kvwire.ReasonAbsent, why)
	}
	rot(1)
	assert.EqualValues(t, 32<<10, c.Stats().QuarantineBytes)
	put(t, s, 1, n)
	v, why := s.View(one, formA, hash(1), true)
	require.Equal(t, kvwire.ReasonNone, why)
	v.Close()
	s.Reset()

	rot(2)
	rot(3)
	rot(4)
	assert.EqualValues(t, 64<<10, c.Stats().QuarantineBytes)
	assert.EqualValues(t, 4, c.Stats().Corrupt)
	assert.EqualValues(t, 4, c.Stats().Evictions[kvwire.ReasonCorrupt])
	assert.Equal(t, c.arena.Size(), c.Stats().FreeBytes+64<<10)

	put(t, s, 5, 100<<10) // above the limit alone: freed at once
	v, _ = s.View(one, formA, hash(5), false)
	v.Bytes()[0] ^= 1
	v.Close()
	_, why = s.View(one, formA, hash(5), true)
	assert.Equal(t, kvwire.ReasonCorrupt, why)
	assert.Equal(t, c.arena.Size(), c.Stats().FreeBytes+64<<10)
}

// An object is kept whatever part of the budget it takes beside the reserve.
func TestOneObjectMayTakeTheBudget(t *testing.T) {
	const budget = 16 << 20
	for _, part := range []float64{0.5, 0.9, 0.95, 0.98, 0.989} {
		c := open(t, Config{Budget: budget})
		s := space(t, c, "a")
		put(t, s, 1, 32<<10)
		put(t, s, 2, int(part*budget))
		for range 3 {
			c.kick <- struct{}{} // until the owner has looked
		}
		assert.True(t, s.Has(formA, hash(2)), "%v of the budget", part)
		put(t, s, 3, 32<<10)
		for range 3 {
			c.kick <- struct{}{} // until the owner has looked
		}
		assert.True(t, s.Has(formA, hash(3)), "after %v of the budget", part)
		balanced(t, c)
	}
}

// What is in quarantine does not stand in the way of another size.
func TestQuarantineMakesRoomForAnotherSize(t *testing.T) {
	const budget, n = 32 << 20, 4 << 10
	c := open(t, Config{Budget: budget, AllocWait: 50 * time.Millisecond})
	s := space(t, c, "a")
	for i := range budget / n {
		put(t, s, i, n)
	}
	settled(t, c)
	for i := 0; c.Stats().Corrupt < budget/n/150; i += 120 {
		if v, _ := s.View(one, formA, hash(i), false); v != nil {
			v.Check(v.Sum() + 1)
			v.Close()
		}
	}
	require.NotZero(t, c.Stats().QuarantineBytes)
	c.cfg.AllocWait = settleTime
	put(t, s, budget, 8<<20)
	balanced(t, c)
	s.Reset()
	assert.Equal(t, c.arena.Size(), c.Stats().FreeBytes+c.Stats().QuarantineBytes)
}

func TestStoreWaitsForRoomThenIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := New(Config{Budget: 1 << 20, AllocWait: 7 * time.Millisecond})
		require.NoError(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		s := space(t, c, "a")
		all, _, err := s.Reserve(one, formA, hash(1), 1<<20)
		require.NoError(t, err)

		began := time.Now()
		res, err := s.Put(one, formA, hash(2), content(2, 4096))
		require.NoError(t, err)
		assert.Equal(t, kvwire.ReasonOverBudget, res.Reason)
		assert.Equal(t, 7*time.Millisecond, time.Since(began))

		time.AfterFunc(3*time.Millisecond, all.Abort)
		began = time.Now()
		put(t, s, 2, 4096)
		assert.Equal(t, 3*time.Millisecond, time.Since(began))
		assert.EqualValues(t, 2, c.Stats().Waits)
	})
}

func TestCloseWithHeldBytes(t *testing.T) {
	c, err := New(Config{Budget: 1 << 20})
	require.NoError(t, err)
	s := space(t, c, "a")
	put(t, s, 1, 4096)
	v, _ := s.View(one, formA, hash(1), false)
	assert.ErrorContains(t, c.Close(), "1 views and slots")
	assert.Equal(t, content(1, 4096), v.Bytes(), "still readable")
	v.Close()
	assert.ErrorIs(t, c.Close(), ErrClosed)

	res, err := s.Put(one, formA, hash(2), content(2, 8))
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonDraining, res.Reason)
	_, why := s.View(one, formA, hash(1), false)
	assert.Equal(t, kvwire.ReasonDraining, why)
	_, _, why, err = s.Lease(LeaseRequest{Form: formA, Shards: 1, Hashes: hashes(1, 2), TTL: time.Second, Holders: 1}, nil)
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonDraining, why)
	_, why, err = s.Pin(formA, hashes(1, 2), time.Second)
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReasonDraining, why)
	assert.Zero(t, s.Reset())
}
