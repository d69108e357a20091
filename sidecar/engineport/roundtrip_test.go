package engineport

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
	"membrane/sidecar/auth"
)

func TestStoreAndLoadThroughSharedMemory(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.socket, kvwire.ClientOptions{})
	got, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	assert.Equal(t, kvwire.Registered{
		Namespace: registration("e").Model.Namespace(64).String(), Form: registration("e").Descriptor.Form().String(),
		PageTokens: 64, ObjectBytes: object, Tenant: "public", SharedMemory: true, ArenaBytes: 32 << 20,
		InboxBytes: 8 * object, InboxSlots: 8, SlotBytes: object, MaxLeaseMS: 60000,
	}, got)

	prompt := tokens(64*3+10, 0)
	cold := match(t, c, kvwire.Match{Tokens: prompt, DeadlineUS: 1e6})
	assert.Equal(t, kvwire.ReasonAbsent, cold.Reason)
	assert.Zero(t, cold.Lease)
	assert.EqualValues(t, 3, cold.ChainPages)
	store(t, c, cold.Handle, 3)

	again, err := c.Reserve(within(t), []kvwire.PageRef{{Handle: cold.Handle, Page: 1}}, nil)
	require.NoError(t, err)
	assert.Equal(t, []kvwire.Reservation{{Status: kvwire.StoreExists}}, again)

	warm := match(t, c, kvwire.Match{Tokens: prompt, Held: 70, DeadlineUS: 1e6, LeaseMS: 5000})
	assert.EqualValues(t, 1, warm.First)
	assert.EqualValues(t, 2, warm.Pages)
	assert.Equal(t, kvwire.ReasonNone, warm.Reason)
	assert.InDelta(t, 5000, warm.LeaseMS, 1000)
	require.Len(t, warm.Locations, 2)
	for i, at := range warm.Locations {
		assert.Equal(t, bytesOf(i+1), c.Arena()[at.Offset:at.Offset+at.Length])
		assert.Equal(t, kvwire.Sum(bytesOf(i+1)), at.Sum)
	}
	assert.Equal(t, kvwire.ReleaseLive, release(t, c, warm.Lease, true))

	presence := match(t, c, kvwire.Match{Tokens: prompt, Flags: kvwire.MatchPresence})
	assert.Zero(t, presence.Lease)
	assert.EqualValues(t, 3, presence.Pages)

	n := p.Counts()
	assert.Equal(t, Served{Pages: 2, Tokens: 128, Bytes: 2 * object}, n.LeasedLocal)
	assert.Zero(t, n.LeasedPeer)
	assert.EqualValues(t, 3, n.StoredPages)
	assert.EqualValues(t, 3*object, n.StoredBytes)
	assert.EqualValues(t, 1, n.ExistingPages)
	assert.Equal(t, map[string]uint64{"absent": 3}, n.MissedPages)
	assert.Equal(t, map[string]uint64{"absent": 192}, n.MissedTokens)
	assert.Empty(t, n.Errors)

	raw, err := c.Stats(within(t))
	require.NoError(t, err)
	var stats struct {
		Port Counts `json:"engine_port"`
	}
	require.NoError(t, json.Unmarshal(raw, &stats))
	assert.EqualValues(t, 3, stats.Port.StoredPages)
}

func TestStoreAndLoadInline(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.tcp, kvwire.ClientOptions{Inline: true})
	got, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	assert.False(t, got.SharedMemory)
	assert.Zero(t, got.InboxSlots)

	prompt := tokens(64*3, 0)
	cold := match(t, c, kvwire.Match{Tokens: prompt})
	store(t, c, cold.Handle, 3)
	warm := match(t, c, kvwire.Match{Tokens: prompt})
	require.EqualValues(t, 3, warm.Pages)
	into := make([][]byte, 2)
	require.NoError(t, c.Read(within(t), kvwire.Read{Lease: warm.Lease, First: 1, Pages: 2}, func(i int, n int64) []byte {
		into[i] = make([]byte, n)
		return into[i]
	}))
	assert.Equal(t, [][]byte{bytesOf(1), bytesOf(2)}, into)
	assert.Equal(t, kvwire.ReleaseLive, release(t, c, warm.Lease, false))

	err = c.Read(within(t), kvwire.Read{Lease: warm.Lease, Pages: 1}, nil)
	wantError(t, err, kvwire.CodeUnknownLease, "lease")
	require.NoError(t, c.Ping(within(t)))
}

func TestClientMovesFromThePortToTheSocket(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.tcp, kvwire.ClientOptions{})
	assert.Equal(t, kvwire.HelloAnswer{Node: "n1", Server: "membrane test", Socket: p.socket}, c.Server())
	got, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	assert.True(t, got.SharedMemory)
}

func TestKeysOnThePort(t *testing.T) {
	t.Parallel()
	key, line, err := auth.Generate("acme", auth.ScopeEngine)
	require.NoError(t, err)
	weak, weakLine, err := auth.Generate("reader", auth.ScopeAdmin)
	require.NoError(t, err)
	keys, err := auth.ParseKeyfile([]byte(line + "\n" + weakLine))
	require.NoError(t, err)
	p := newPort(t, func(c *Config) { c.Keys = keys })

	for _, bad := range []string{"", "mbr_wrong", weak} {
		_, err := kvwire.Dial(within(t), p.tcp, kvwire.ClientOptions{Inline: true, Key: bad})
		wantError(t, err, kvwire.CodeUnauthorized, "key")
	}
	for _, addr := range []string{p.tcp, p.socket} {
		c := dial(t, addr, kvwire.ClientOptions{Inline: true, Key: key})
		got, err := c.Register(within(t), registration("e"))
		require.NoError(t, err)
		assert.Equal(t, "acme", got.Tenant)
		require.NoError(t, c.Close())
		require.Eventually(t, func() bool { return len(p.Status().Engines) == 0 }, timeout, tick)
	}
	// The user id is credential enough on the socket, for the default tenant.
	c := dial(t, p.socket, kvwire.ClientOptions{})
	got, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	assert.Equal(t, "public", got.Tenant)
}

func TestTwoTenantsDoNotShare(t *testing.T) {
	t.Parallel()
	key, line, err := auth.Generate("acme", auth.ScopeEngine)
	require.NoError(t, err)
	keys, err := auth.ParseKeyfile([]byte(line))
	require.NoError(t, err)
	p := newPort(t, func(c *Config) { c.Keys = keys })
	a := dial(t, p.socket, kvwire.ClientOptions{})
	b := dial(t, p.socket, kvwire.ClientOptions{Key: key})
	for _, c := range []*kvwire.Client{a, b} { // the same engine id, twice: another tenant's is another engine
		_, err := c.Register(within(t), registration("e"))
		require.NoError(t, err)
	}
	prompt := tokens(64*2, 0)
	cold := match(t, a, kvwire.Match{Tokens: prompt})
	store(t, a, cold.Handle, 2)
	assert.Equal(t, kvwire.ReasonAbsent, match(t, b, kvwire.Match{Tokens: prompt}).Reason)
	warm := match(t, a, kvwire.Match{Tokens: prompt})
	require.EqualValues(t, 2, warm.Pages)

	_, err = b.Release(within(t), kvwire.Release{Lease: warm.Lease})
	wantError(t, err, kvwire.CodeUnknownLease, "lease")
	_, err = b.Extend(within(t), warm.Handle, tokens(1, 0))
	wantError(t, err, kvwire.CodeUnknownHandle, "handle")
	assert.Equal(t, kvwire.ReleaseLive, release(t, a, warm.Lease, false))
}

func TestScopeSeparatesPrompts(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := attach(t, p.socket, registration("e"))
	salt := "s"
	m := kvwire.Match{Tokens: tokens(64, 0), Scope: kvwire.Scope{CacheSalt: &salt}}
	store(t, c, match(t, c, m).Handle, 1)
	assert.EqualValues(t, 1, match(t, c, m).Pages)
	assert.EqualValues(t, 0, match(t, c, kvwire.Match{Tokens: m.Tokens}).Pages)
}

func TestExtendLeaseAndDrop(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := attach(t, p.socket, registration("e"))
	m := match(t, c, kvwire.Match{Tokens: tokens(100, 0)})
	n, err := c.Extend(within(t), m.Handle, tokens(28, 100))
	require.NoError(t, err)
	assert.Equal(t, 2, n)
	store(t, c, m.Handle, 2)
	l, err := c.Lease(within(t), kvwire.LeaseRequest{Handle: m.Handle, First: 1, Pages: 5}, nil)
	require.NoError(t, err)
	assert.EqualValues(t, 1, l.Pages)
	assert.Equal(t, kvwire.ReleaseLive, release(t, c, l.Lease, false))
	require.NoError(t, c.Drop(within(t), m.Handle))
	_, err = c.Lease(within(t), kvwire.LeaseRequest{Handle: m.Handle, Pages: 1}, nil)
	wantError(t, err, kvwire.CodeUnknownHandle, "handle")
}

func TestLeaseIsHeldUntilEveryRankReleases(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	sched := attach(t, p.socket, rank("e", kvwire.RoleScheduler, 0))
	workers := []*kvwire.Client{attach(t, p.socket, rank("e", kvwire.RoleWorker, 0)), attach(t, p.socket, rank("e", kvwire.RoleWorker, 1))}
	prompt := tokens(128, 0)
	cold := match(t, sched, kvwire.Match{Tokens: prompt})
	store(t, workers[0], cold.Handle, 2)
	assert.Equal(t, kvwire.ReasonIncomplete, match(t, sched, kvwire.Match{Tokens: prompt}).Reason)
	store(t, workers[1], cold.Handle, 2)

	warm := match(t, sched, kvwire.Match{Tokens: prompt})
	assert.EqualValues(t, 2, warm.Pages)
	assert.Len(t, warm.Locations, 4)
	assert.Equal(t, kvwire.ReleaseLive, release(t, workers[1], warm.Lease, false))
	_, err := workers[1].Release(within(t), kvwire.Release{Lease: warm.Lease})
	wantError(t, err, kvwire.CodeDoubleRelease, "lease")
	assert.EqualValues(t, 1, p.cache.Stats().Leases)
	assert.Equal(t, kvwire.ReleaseLive, release(t, workers[0], warm.Lease, false))
	assert.EqualValues(t, 0, p.cache.Stats().Leases)

	// The scheduler's release ends it for all.
	warm = match(t, sched, kvwire.Match{Tokens: prompt})
	assert.Equal(t, kvwire.ReleaseLive, release(t, sched, warm.Lease, false))
	assert.Equal(t, kvwire.ReleaseExpired, release(t, workers[0], warm.Lease, false))
	_, err = sched.Release(within(t), kvwire.Release{Lease: warm.Lease})
	wantError(t, err, kvwire.CodeDoubleRelease, "lease")

	// A worker that is gone counts as one that has released.
	warm = match(t, sched, kvwire.Match{Tokens: prompt})
	require.NoError(t, workers[1].Close())
	require.Eventually(t, func() bool { return len(p.Status().Engines[0].Connections) == 2 }, timeout, tick)
	assert.Equal(t, kvwire.ReleaseLive, release(t, workers[0], warm.Lease, false))
	assert.EqualValues(t, 0, p.cache.Stats().Leases)
}

func TestSlotsOfChainsThatTheSchedulerDroppedAreUsedAgain(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	reg := registration("e")
	reg.Role = kvwire.RoleScheduler
	scheduler := attach(t, p.socket, reg)
	reg.Role = kvwire.RoleWorker
	worker := attach(t, p.socket, reg)
	reserveAll := func(seed uint32) (uint64, []kvwire.Reservation) {
		l := match(t, scheduler, kvwire.Match{Tokens: tokens(8*64, seed), Flags: kvwire.MatchPresence})
		var pages []kvwire.PageRef
		for i := range 8 {
			pages = append(pages, kvwire.PageRef{Handle: l.Handle, Page: uint32(i)})
		}
		slots, err := worker.Reserve(within(t), pages, nil)
		require.NoError(t, err)
		return l.Handle, slots
	}
	handle, _ := reserveAll(1) // every slot of the inbox
	_, refused := reserveAll(1000)
	require.Equal(t, kvwire.Reservation{Status: kvwire.StoreRefused, Reason: kvwire.ReasonOverBudget}, refused[0])
	require.NoError(t, scheduler.Drop(within(t), handle))
	_, slots := reserveAll(2000)
	for _, s := range slots {
		require.Equal(t, kvwire.StoreSlot, s.Status)
	}
}

func TestHandlesDoNotComeBackWithARestart(t *testing.T) {
	t.Parallel()
	var handles []uint64
	for range 2 {
		c := attach(t, newPort(t).socket, registration("e"))
		handles = append(handles, match(t, c, kvwire.Match{Tokens: tokens(64, 1)}).Handle)
	}
	require.NotEqual(t, handles[0], handles[1])
}

func TestAnExpiredLeaseIsNoLiveOne(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := attach(t, p.socket, registration("e"))
	l := match(t, c, kvwire.Match{Tokens: tokens(64, 1)})
	store(t, c, l.Handle, 1)
	l = match(t, c, kvwire.Match{Tokens: tokens(64, 1), LeaseMS: 1})
	require.NotZero(t, l.Lease)
	require.Eventually(t, func() bool { return p.Status().Engines[0].Leases == 0 }, 10*time.Second, time.Millisecond)
}
