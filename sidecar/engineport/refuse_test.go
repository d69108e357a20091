package engineport

import (
	"bufio"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"membrane/cache"
	"membrane/kvwire"
)

const (
	timeout = 10 * time.Second
	tick    = 2 * time.Millisecond
)

// raw is a connection that sends what a correct client would not.
type raw struct {
	net.Conn
	r *bufio.Reader
}

func newRaw(t *testing.T, network, addr string) *raw {
	t.Helper()
	c, err := net.Dial(network, addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	return &raw{c, bufio.NewReader(c)}
}

// ask sends bytes and returns the error frame that answers them.
func (r *raw) ask(t *testing.T, b []byte) error {
	t.Helper()
	_, err := r.Write(b)
	require.NoError(t, err)
	h, body, err := kvwire.ReadFrame(r.r, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.TypeError|kvwire.AnswerBit, h.Type, "%q", body)
	e, err := kvwire.ParseError(body)
	require.NoError(t, err)
	return e
}

func frame(t kvwire.Type, body []byte) []byte {
	b, at := kvwire.BeginFrame(nil, t, 7)
	return kvwire.EndFrame(append(b, body...), at)
}

func registerFrame(t *testing.T, reg any) []byte {
	b, err := json.Marshal(reg)
	require.NoError(t, err)
	return frame(kvwire.TypeRegister, b)
}

func TestMalformedFramesEndTheConnection(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	f := func(b []byte, code kvwire.Code, field string) {
		t.Helper()
		before := p.count.errors[code].Get()
		for network, addr := range map[string]string{"unix": p.socket, "tcp": p.tcp} {
			c := newRaw(t, network, addr)
			wantError(t, c.ask(t, b), code, field)
			_, err := c.r.ReadByte()
			require.Error(t, err, "the connection stays open")
		}
		assert.Equal(t, before+2, p.count.errors[code].Get())
	}
	good := frame(kvwire.TypePing, nil)
	patch := func(at int, v byte) []byte {
		b := append([]byte(nil), good...)
		b[at] = v
		return b
	}
	f(patch(0, 'X'), kvwire.CodeBadFrame, "magic")
	f(patch(4, 9), kvwire.CodeVersion, "version")
	f(patch(6, 1), kvwire.CodeBadFrame, "flags")
	f(patch(15, 0xFF), kvwire.CodeTooLarge, "length")
	f(patch(5, byte(kvwire.TypePing|kvwire.AnswerBit)), kvwire.CodeBadFrame, "type")
	f(patch(5, byte(kvwire.TypePage)), kvwire.CodeBadFrame, "type")
	f(kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypeHello, Length: kvwire.MaxJSON + 1}), kvwire.CodeTooLarge, "length")
	f(kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypeMatch, Length: kvwire.MaxControl + 1}), kvwire.CodeTooLarge, "length")
	f(kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypeWrite, Length: kvwire.MaxObject + kvwire.PageHeaderSize + 1}), kvwire.CodeTooLarge, "length")
	f(kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypeWrite, Length: kvwire.WriteHeaderSize - 1}), kvwire.CodeBadFrame, "length")
}

func TestPortWantsHelloFirst(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := newRaw(t, "tcp", p.tcp)
	wantError(t, c.ask(t, frame(kvwire.TypePing, nil)), kvwire.CodeUnauthorized, "key")
	wantError(t, c.ask(t, registerFrame(t, registration("e"))), kvwire.CodeUnauthorized, "key")
	wantError(t, c.ask(t, frame(kvwire.TypeWrite, make([]byte, 100))), kvwire.CodeUnauthorized, "key")
	assert.Empty(t, p.Status().Engines)
	// Nobody is made to read megabytes from a stranger.
	big := kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypeMatch, Length: 1 << 20})
	wantError(t, c.ask(t, big), kvwire.CodeUnauthorized, "key")
	_, err := c.r.ReadByte()
	require.Error(t, err)
}

func TestUnregisteredUse(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := newRaw(t, "unix", p.socket)
	for _, ty := range []kvwire.Type{
		kvwire.TypeMatch, kvwire.TypeExtend, kvwire.TypeLease, kvwire.TypeRelease, kvwire.TypeReserve,
		kvwire.TypeCommit, kvwire.TypeDrop, kvwire.TypeReset, kvwire.TypeRead,
	} {
		wantError(t, c.ask(t, frame(ty, nil)), kvwire.CodeNotRegistered, "")
	}
	wantError(t, c.ask(t, frame(kvwire.TypeWrite, make([]byte, 5000))), kvwire.CodeNotRegistered, "")
	wantError(t, c.ask(t, frame(kvwire.TypeBatchRead, make([]byte, 10))), kvwire.CodeBadField, "type")
	assert.EqualValues(t, 10, p.count.errors[kvwire.CodeNotRegistered].Get())
}

func TestBadRegistrations(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	f := func(change func(*kvwire.Register), code kvwire.Code, field string) {
		t.Helper()
		reg := registration("e")
		change(&reg)
		before := p.count.errors[code].Get()
		c := newRaw(t, "unix", p.socket)
		wantError(t, c.ask(t, registerFrame(t, reg)), code, field)
		assert.Equal(t, before+1, p.count.errors[code].Get())
		assert.Empty(t, p.Status().Engines)
		assert.EqualValues(t, 1<<20, p.Status().InboxFree)
	}
	f(func(r *kvwire.Register) { r.Engine = "" }, kvwire.CodeBadField, "engine")
	f(func(r *kvwire.Register) { r.Engine = string(make([]byte, 200)) }, kvwire.CodeBadField, "engine")
	f(func(r *kvwire.Register) { r.Role = "boss" }, kvwire.CodeBadField, "role")
	f(func(r *kvwire.Register) { r.Model.WeightsID = "" }, kvwire.CodeBadField, "model.weights_id")
	f(func(r *kvwire.Register) { r.Descriptor.BlockTokens = 48 }, kvwire.CodeBadField, "block_tokens")
	f(func(r *kvwire.Register) { r.Descriptor.BlockBytes = kvwire.MaxObject / 2 }, kvwire.CodeTooLarge, "descriptor.block_bytes")
	f(func(r *kvwire.Register) { r.Descriptor.TPRank = 1 }, kvwire.CodeBadField, "descriptor.tp_rank")
	f(func(r *kvwire.Register) { r.InboxSlots = -1 }, kvwire.CodeBadField, "inbox_slots")
	f(func(r *kvwire.Register) { r.InboxSlots = kvwire.MaxBatch + 1 }, kvwire.CodeBadField, "inbox_slots")
	f(func(r *kvwire.Register) { *r = rank("e", kvwire.RoleBoth, 0) }, kvwire.CodeBadField, "role")

	c := newRaw(t, "unix", p.socket)
	wantError(t, c.ask(t, registerFrame(t, map[string]any{"engine": "e", "extra": 1})), kvwire.CodeBadField, "body")
	wantError(t, c.ask(t, registerFrame(t, map[string]any{"inbox_slots": "many"})), kvwire.CodeBadField, "inbox_slots")
	wantError(t, c.ask(t, frame(kvwire.TypeRegister, []byte(`{} {}`))), kvwire.CodeBadField, "body")
	wantError(t, c.ask(t, frame(kvwire.TypeRegister, nil)), kvwire.CodeBadField, "body")
	assert.EqualValues(t, 1<<16, kvwire.MaxBatch)
}

func TestRanksOfOneEngineAgree(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	first := attach(t, p.socket, rank("e", kvwire.RoleWorker, 0))
	f := func(reg kvwire.Register, code kvwire.Code, field string) {
		t.Helper()
		c := dial(t, p.socket, kvwire.ClientOptions{Inline: true})
		_, err := c.Register(within(t), reg)
		wantError(t, err, code, field)
		assert.Len(t, p.Status().Engines[0].Connections, 1)
		assert.EqualValues(t, 1, p.cache.Stats().Spaces, "a refused registration opened a space")
	}
	change := func(change func(*kvwire.Register)) kvwire.Register {
		r := rank("e", kvwire.RoleWorker, 1)
		change(&r)
		return r
	}
	f(rank("e", kvwire.RoleWorker, 0), kvwire.CodeRankTaken, "engine")
	f(change(func(r *kvwire.Register) { r.Model.WeightsID = "other" }), kvwire.CodeBadField, "model")
	f(change(func(r *kvwire.Register) { r.Descriptor.Layout = "other" }), kvwire.CodeBadField, "descriptor")
	f(change(func(r *kvwire.Register) { r.Descriptor.TPSize = 4 }), kvwire.CodeBadField, "descriptor.tp_size")
	f(registration("e"), kvwire.CodeBadField, "descriptor.tp_size")

	_, err := first.Register(within(t), rank("e", kvwire.RoleWorker, 1))
	wantError(t, err, kvwire.CodeBadField, "engine")
	require.NoError(t, first.Close())
	require.Eventually(t, func() bool { return len(p.Status().Engines) == 0 }, timeout, tick)
	attach(t, p.socket, rank("e", kvwire.RoleWorker, 0))
}

func TestBadRequestsChangeNothing(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.socket, kvwire.ClientOptions{})
	_, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	m := match(t, c, kvwire.Match{Tokens: tokens(128, 0)})
	store(t, c, m.Handle, 1)
	l := match(t, c, kvwire.Match{Tokens: tokens(128, 0)})
	slots, err := c.Reserve(within(t), []kvwire.PageRef{{Handle: m.Handle, Page: 1}}, nil)
	require.NoError(t, err)
	slot := slots[0].Slot
	require.Equal(t, kvwire.ReleaseLive, release(t, c, l.Lease, false))

	f := func(code kvwire.Code, field string, do func() error) {
		t.Helper()
		status, stats, errors := p.Status(), p.cache.Stats(), p.count.errors[code].Get()
		wantError(t, do(), code, field)
		assert.Equal(t, errors+1, p.count.errors[code].Get())
		assert.Equal(t, status, p.Status())
		now := p.cache.Stats()
		assert.Equal(t, [...]any{stats.Pages, stats.Leases, stats.FreeBytes, stats.Held}, [...]any{now.Pages, now.Leases, now.FreeBytes, now.Held})
		assert.EqualValues(t, 1, p.slots.Load())
	}
	ctx := within(t)
	ref := func(handle uint64, page uint32) kvwire.PageRef { return kvwire.PageRef{Handle: handle, Page: page} }

	f(kvwire.CodeBadField, "held", func() error { _, err := c.Match(ctx, kvwire.Match{Held: 2, Tokens: tokens(1, 0)}, nil); return err })
	f(kvwire.CodeBadField, "flags", func() error { _, err := c.Match(ctx, kvwire.Match{Flags: 4}, nil); return err })
	f(kvwire.CodeTooLarge, "tokens", func() error {
		_, err := c.Match(ctx, kvwire.Match{Tokens: tokens(kvwire.MaxTokens+1, 0)}, nil)
		return err
	})
	f(kvwire.CodeUnknownHandle, "handle", func() error { _, err := c.Extend(ctx, 999, tokens(1, 0)); return err })
	f(kvwire.CodeTooLarge, "tokens", func() error { _, err := c.Extend(ctx, m.Handle, tokens(kvwire.MaxTokens, 0)); return err })
	f(kvwire.CodeUnknownHandle, "handle", func() error { _, err := c.Lease(ctx, kvwire.LeaseRequest{Handle: 999}, nil); return err })
	f(kvwire.CodeBadField, "first", func() error { _, err := c.Lease(ctx, kvwire.LeaseRequest{Handle: m.Handle, First: 3}, nil); return err })
	f(kvwire.CodeTooLarge, "pages", func() error {
		_, err := c.Lease(ctx, kvwire.LeaseRequest{Handle: m.Handle, Pages: kvwire.MaxBatch + 1}, nil)
		return err
	})
	f(kvwire.CodeUnknownHandle, "handle", func() error { return c.Drop(ctx, 999) })
	f(kvwire.CodeUnknownLease, "lease", func() error { _, err := c.Release(ctx, kvwire.Release{Lease: 1 << 60}); return err })
	f(kvwire.CodeDoubleRelease, "lease", func() error { _, err := c.Release(ctx, kvwire.Release{Lease: l.Lease}); return err })
	f(kvwire.CodeUnknownHandle, "pages[1].handle", func() error {
		_, err := c.Reserve(ctx, []kvwire.PageRef{ref(m.Handle, 0), ref(999, 0)}, nil)
		return err
	})
	f(kvwire.CodeBadField, "pages[0].page", func() error { _, err := c.Reserve(ctx, []kvwire.PageRef{ref(m.Handle, 2)}, nil); return err })
	commit := func(cs ...kvwire.Commit) func() error {
		return func() error { _, err := c.Commit(ctx, cs, nil); return err }
	}
	good := kvwire.Commit{PageRef: ref(m.Handle, 1), Slot: slot}
	f(kvwire.CodeNotReserved, "commits[1].slot", commit(good, good))
	f(kvwire.CodeNotReserved, "commits[0].slot", commit(kvwire.Commit{PageRef: ref(m.Handle, 0), Slot: slot}))
	f(kvwire.CodeNotReserved, "commits[0].slot", commit(kvwire.Commit{PageRef: ref(m.Handle, 1), Slot: slot + 1}))
	f(kvwire.CodeNotReserved, "commits[0].slot", commit(kvwire.Commit{PageRef: ref(m.Handle, 1), Slot: 1 << 31}))
	f(kvwire.CodeUnknownHandle, "commits[0].handle", commit(kvwire.Commit{PageRef: ref(999, 1), Slot: slot}))
	f(kvwire.CodeUnknownHandle, "pages[0].handle", func() error { _, err := c.Write(ctx, ref(999, 0), bytesOf(0)); return err })
	f(kvwire.CodeBadField, "length", func() error { _, err := c.Write(ctx, ref(m.Handle, 1), make([]byte, object+1)); return err })
	f(kvwire.CodeBadField, "length", func() error { _, err := c.Write(ctx, ref(m.Handle, 1), nil); return err })

	other := attach(t, p.socket, registration("other"))
	f(kvwire.CodeUnknownHandle, "handle", func() error { _, err := other.Extend(ctx, m.Handle, nil); return err })
	f(kvwire.CodeUnknownLease, "lease", func() error { _, err := other.Release(ctx, kvwire.Release{Lease: l.Lease}); return err })

	sched := attach(t, p.socket, rank("many", kvwire.RoleScheduler, 0))
	f(kvwire.CodeBadField, "role", func() error { _, err := sched.Reserve(ctx, nil, nil); return err })
	f(kvwire.CodeBadField, "role", func() error { _, err := sched.Commit(ctx, nil, nil); return err })
	f(kvwire.CodeBadField, "role", func() error { _, err := sched.Write(ctx, ref(1, 0), nil); return err })

	done, err := c.Commit(ctx, []kvwire.Commit{good}, nil) // after all that, the reservation still stands
	require.NoError(t, err)
	assert.Equal(t, kvwire.StoreStored, done[0].Status)
}

func TestHandlesAreCapped(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := attach(t, p.socket, registration("e"))
	first := match(t, c, kvwire.Match{})
	for range MaxHandles - 1 {
		match(t, c, kvwire.Match{Flags: kvwire.MatchPresence})
	}
	_, err := c.Match(within(t), kvwire.Match{}, nil)
	wantError(t, err, kvwire.CodeBusy, "handle")
	require.NoError(t, c.Drop(within(t), first.Handle))
	match(t, c, kvwire.Match{})
}

// files registers by hand and returns the descriptors of arena and inbox.
func files(t *testing.T, socket string) (c *net.UnixConn, arena, in int) {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	c = conn.(*net.UnixConn)
	_, err = c.Write(registerFrame(t, registration("e")))
	require.NoError(t, err)
	b, oob := make([]byte, 1<<16), make([]byte, unix.CmsgSpace(8))
	_, n, _, _, err := c.ReadMsgUnix(b, oob)
	require.NoError(t, err)
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	require.NoError(t, err)
	fds, err := unix.ParseUnixRights(&msgs[0])
	require.NoError(t, err)
	require.Len(t, fds, 2)
	t.Cleanup(func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	})
	return c, fds[0], fds[1]
}

func TestEngineCannotResizeSharedMemoryNorWriteTheArena(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	_, arena, in := files(t, p.socket)
	for _, fd := range []int{arena, in} {
		require.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
		require.ErrorIs(t, unix.Ftruncate(fd, 1<<30), unix.EPERM)
		_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
		require.ErrorIs(t, err, unix.EPERM)
	}
	_, err := unix.Mmap(arena, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.ErrorIs(t, err, unix.EPERM)
	_, err = unix.Pwrite(arena, []byte{1}, 0)
	require.ErrorIs(t, err, unix.EPERM)
	require.ErrorIs(t, unix.Fallocate(arena, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096), unix.EPERM)

	b, err := unix.Mmap(in, 0, 8*object, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	b[0] = 1
	require.NoError(t, unix.Munmap(b))
}

// A client that changes the inbox after the commit changes nothing that is
// stored: what was checked was our copy.
func TestInboxIsCopiedBeforeItIsChecked(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.socket, kvwire.ClientOptions{})
	_, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	m := match(t, c, kvwire.Match{Tokens: tokens(64, 0)})
	store(t, c, m.Handle, 1)
	clear(c.Slot(0))
	l := match(t, c, kvwire.Match{Tokens: tokens(64, 0)})
	require.EqualValues(t, 1, l.Pages)
	assert.Equal(t, bytesOf(0), c.Arena()[l.Locations[0].Offset:][:object])
}

func TestLostConnectionFreesEverything(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.socket, kvwire.ClientOptions{})
	_, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	m := match(t, c, kvwire.Match{Tokens: tokens(256, 0)})
	store(t, c, m.Handle, 2)
	match(t, c, kvwire.Match{Tokens: tokens(256, 0)})
	_, err = c.Reserve(within(t), []kvwire.PageRef{{Handle: m.Handle, Page: 2}, {Handle: m.Handle, Page: 3}}, nil)
	require.NoError(t, err)
	assert.EqualValues(t, 1, p.cache.Stats().Leases)
	p.underWay(t, 3)
	assert.EqualValues(t, 1<<20-8*object, p.Status().InboxFree)

	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return p.Status().Connections == 0 }, timeout, tick)
	assert.Equal(t, Status{Engines: []EngineStatus{}, InboxFree: 1 << 20}, p.Status())
	p.underWay(t, 0)
	assert.Zero(t, p.cache.Stats().PinnedBytes)
}

func TestInboxIsBounded(t *testing.T) {
	t.Parallel()
	p := newPort(t, func(c *Config) { c.InboxBytes = 3 * object })
	reg := func(name string, want int) *kvwire.Client {
		t.Helper()
		c := dial(t, p.socket, kvwire.ClientOptions{})
		got, err := c.Register(within(t), registration(name))
		require.NoError(t, err)
		assert.Equal(t, want, got.InboxSlots)
		return c
	}
	a := reg("a", 3)
	m := match(t, a, kvwire.Match{Tokens: tokens(64*5, 0)})
	var refs []kvwire.PageRef
	for i := range 5 {
		refs = append(refs, kvwire.PageRef{Handle: m.Handle, Page: uint32(i)})
	}
	got, err := a.Reserve(within(t), refs, nil)
	require.NoError(t, err)
	for i, r := range got {
		if i < 3 {
			assert.Equal(t, kvwire.StoreSlot, r.Status)
			continue
		}
		assert.Equal(t, kvwire.Reservation{Status: kvwire.StoreRefused, Reason: kvwire.ReasonOverBudget}, r)
	}
	assert.EqualValues(t, 2, p.Counts().RefusedStores["over_budget"])
	twice, err := a.Reserve(within(t), refs[:1], nil) // the same page has its slot already
	require.NoError(t, err)
	assert.Equal(t, got[:1], twice)
	require.NoError(t, a.Drop(within(t), m.Handle))
	assert.Zero(t, p.slots.Load())

	b := reg("b", 0) // nothing left: it stores inline
	store(t, attach(t, p.socket, registration("c")), match(t, b, kvwire.Match{}).Handle, 0)
}

func TestResetRefusesWhatWasReservedBefore(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.socket, kvwire.ClientOptions{})
	_, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	m := match(t, c, kvwire.Match{Tokens: tokens(128, 0)})
	store(t, c, m.Handle, 1)
	slots, err := c.Reserve(within(t), []kvwire.PageRef{{Handle: m.Handle, Page: 1}}, nil)
	require.NoError(t, err)
	n, err := c.Reset(within(t))
	require.NoError(t, err)
	assert.Equal(t, 1, n)
	done, err := c.Commit(within(t), []kvwire.Commit{{PageRef: kvwire.PageRef{Handle: m.Handle, Page: 1}, Slot: slots[0].Slot}}, nil)
	require.NoError(t, err)
	assert.Equal(t, kvwire.Committed{Status: kvwire.StoreRefused, Reason: kvwire.ReasonReset}, done[0])
	assert.EqualValues(t, 1, p.Counts().RefusedStores["reset"])
	assert.Equal(t, kvwire.ReasonAbsent, match(t, c, kvwire.Match{Tokens: tokens(128, 0)}).Reason)
}

func TestFlippedByteIsAMissAndACorruptRelease(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := attach(t, p.socket, registration("e"))
	prompt := tokens(64*3, 0)
	store(t, c, match(t, c, kvwire.Match{Tokens: prompt}).Handle, 3)
	l := match(t, c, kvwire.Match{Tokens: prompt})
	require.EqualValues(t, 3, l.Pages)
	p.cache.Arena().Bytes(int64(l.Locations[1].Offset), 1)[0] ^= 1

	l2 := match(t, c, kvwire.Match{Tokens: prompt})
	assert.EqualValues(t, 1, l2.Pages)
	assert.Equal(t, kvwire.ReasonCorrupt, l2.Reason)
	assert.Equal(t, kvwire.ReleaseCorrupt, release(t, c, l.Lease, true))
	assert.EqualValues(t, 2, p.Counts().MissedPages["corrupt"]-1)
}

func TestDrainFinishesWhatHasBegun(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := dial(t, p.socket, kvwire.ClientOptions{})
	_, err := c.Register(within(t), registration("e"))
	require.NoError(t, err)
	m := match(t, c, kvwire.Match{Tokens: tokens(128, 0)})
	store(t, c, m.Handle, 1)
	l := match(t, c, kvwire.Match{Tokens: tokens(128, 0)})
	ref := kvwire.PageRef{Handle: m.Handle, Page: 1}
	slots, err := c.Reserve(within(t), []kvwire.PageRef{ref}, nil)
	require.NoError(t, err)
	p.Drain()
	_, err = c.Match(within(t), kvwire.Match{}, nil)
	wantError(t, err, kvwire.CodeDraining, "")
	_, err = c.Reserve(within(t), []kvwire.PageRef{ref}, nil)
	wantError(t, err, kvwire.CodeDraining, "")
	_, err = c.Write(within(t), ref, bytesOf(1))
	wantError(t, err, kvwire.CodeDraining, "")
	p.underWay(t, 2)
	done, err := c.Commit(within(t), []kvwire.Commit{{PageRef: ref, Slot: slots[0].Slot}}, nil)
	require.NoError(t, err)
	assert.Equal(t, kvwire.StoreStored, done[0].Status)
	assert.Equal(t, kvwire.ReleaseLive, release(t, c, l.Lease, false))
	p.underWay(t, 0)
}

func TestSlowReaderIsDisconnected(t *testing.T) {
	t.Parallel()
	p := newPort(t, func(c *Config) { c.WriteTimeout = 50 * time.Millisecond })
	reg := registration("e")
	reg.Descriptor.BlockBytes = 1 << 20 // more than the socket's buffers hold
	c := newRaw(t, "unix", p.socket)
	_, err := c.Write(registerFrame(t, reg))
	require.NoError(t, err)
	_, _, err = kvwire.ReadFrame(c.r, nil)
	require.NoError(t, err)
	_, err = c.Write(frame(kvwire.TypeMatch, kvwire.AppendMatch(nil, kvwire.Match{Tokens: tokens(64, 0)})))
	require.NoError(t, err)
	_, body, err := kvwire.ReadFrame(c.r, nil)
	require.NoError(t, err)
	m, err := kvwire.ParseLeased(body, nil)
	require.NoError(t, err)
	_, err = c.Write(frame(kvwire.TypeWrite, append(kvwire.AppendWriteHeader(nil, kvwire.PageRef{Handle: m.Handle}), make([]byte, 4<<20)...)))
	require.NoError(t, err)
	_, _, err = kvwire.ReadFrame(c.r, nil)
	require.NoError(t, err)
	_, err = c.Write(frame(kvwire.TypeLease, kvwire.AppendLeaseRequest(nil, kvwire.LeaseRequest{Handle: m.Handle, Pages: 1})))
	require.NoError(t, err)
	_, body, err = kvwire.ReadFrame(c.r, nil)
	require.NoError(t, err)
	l, err := kvwire.ParseLeased(body, nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, l.Pages)
	_, err = c.Write(frame(kvwire.TypeRead, kvwire.AppendRead(nil, kvwire.Read{Lease: l.Lease, Pages: 1})))
	require.NoError(t, err)
	// It asks and never reads.
	require.Eventually(t, func() bool { return p.Status().Connections == 0 }, timeout, tick)
	assert.Zero(t, p.cache.Stats().Held)
	assert.Zero(t, p.cache.Stats().Leases)
}

func TestListenSocketLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "a", "s")
	l, err := ListenSocket(path)
	require.NoError(t, err)
	st, err := os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o660), st.Mode().Perm())
	st, err = os.Stat(filepath.Dir(path))
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o750), st.Mode().Perm())
	_, err = ListenSocket(path)
	require.ErrorContains(t, err, "another process does")
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	l, err = ListenSocket(path) // stale
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	_, err = ListenSocket(path)
	require.ErrorContains(t, err, "not a socket")
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "x", string(b))
}

func TestWhoMayUseTheSocket(t *testing.T) {
	t.Parallel()
	p := newPort(t, func(c *Config) { c.UIDs = []uint32{1234} })
	assert.True(t, p.mayConnect(0))
	assert.True(t, p.mayConnect(uint32(os.Geteuid())))
	assert.True(t, p.mayConnect(1234))
	assert.False(t, p.mayConnect(1235))
	c, err := net.Dial("unix", p.socket)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	uid, err := peerUID(c.(*net.UnixConn))
	require.NoError(t, err)
	assert.EqualValues(t, os.Geteuid(), uid)
}

// dialVariable makes the test binary a client of the socket that it names.
const dialVariable = "ENGINEPORT_DIAL"

// Exit statuses of dialAsSomebody.
const (
	answered = iota + 10
	disconnected
	unreachable
)

func dialAsSomebody(path string) int {
	c, err := net.Dial("unix", path)
	if err != nil {
		return unreachable
	}
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	_, _ = c.Write(frame(kvwire.TypePing, nil))
	if _, err := kvwire.ReadHeader(c); err != nil {
		return disconnected
	}
	return answered
}

func TestOtherUsersAreDisconnected(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can be somebody else")
	}
	p := newPort(t, func(c *Config) { c.UIDs = []uint32{1234} })
	// As if the modes had been lost: the credential alone must do.
	dir := filepath.Dir(p.socket)
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755))
	require.NoError(t, os.Chmod(dir, 0o755))
	require.NoError(t, os.Chmod(p.socket, 0o666))
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	exe := filepath.Join(filepath.Dir(dir), "client")
	require.NoError(t, os.WriteFile(exe, self, 0o755))
	as := func(uid uint32) int {
		cmd := exec.Command(exe)
		cmd.Env = []string{dialVariable + "=" + p.socket}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		_ = cmd.Run()
		return cmd.ProcessState.ExitCode()
	}
	assert.Equal(t, answered, as(1234))
	assert.Equal(t, disconnected, as(1235))
	assert.EqualValues(t, 1, p.count.refusedID.Get())
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	_, err := New(Config{})
	require.ErrorContains(t, err, "Cache is nil")
	_, err = New(Config{Cache: &cache.Cache{}})
	require.ErrorContains(t, err, "Metrics is nil")
}

func FuzzConnection(f *testing.F) {
	reg, _ := json.Marshal(registration("e"))
	hello := frame(kvwire.TypeHello, []byte(`{}`))
	f.Add(append(append(append([]byte(nil), hello...), frame(kvwire.TypeRegister, reg)...), frame(kvwire.TypeMatch, kvwire.AppendMatch(nil, kvwire.Match{Tokens: tokens(70, 0)}))...))
	f.Add(append(append([]byte(nil), hello...), frame(kvwire.TypeReserve, kvwire.AppendReserve(nil, []kvwire.PageRef{{Handle: 1}}))...))
	f.Add(append(append(append([]byte(nil), hello...), frame(kvwire.TypeRegister, reg)...), frame(kvwire.TypeWrite, make([]byte, 20))...))
	f.Add([]byte("MBRN\x01\x04\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p := newPort(t)
		here, there := net.Pipe()
		p.admit(there)
		done := make(chan struct{})
		go func() {
			defer close(done)
			b := make([]byte, 1<<16)
			for {
				if _, err := here.Read(b); err != nil {
					return
				}
			}
		}()
		_ = here.SetWriteDeadline(time.Now().Add(5 * time.Second))
		_, _ = here.Write(data)
		_ = here.Close()
		<-done
		require.Eventually(t, func() bool { return p.Status().Connections == 0 }, timeout, tick)
		require.Zero(t, p.count.panics.Get())
	})
}
