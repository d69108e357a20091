package cache

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func arena(t *testing.T, size int64) *Arena {
	t.Helper()
	a, err := newArena(size)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, a.close(true)) })
	return a
}

// Invariant 6: who gets the descriptor can neither write nor truncate.
func TestArenaReadersCannotWriteOrResize(t *testing.T) {
	a := arena(t, MinBudget)
	fd, err := unix.Dup(a.FD())
	require.NoError(t, err)
	defer unix.Close(fd)

	_, err = unix.Mmap(fd, 0, MinBudget, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	assert.ErrorIs(t, err, unix.EPERM)
	_, err = unix.Pwrite(fd, []byte{1}, 0)
	assert.ErrorIs(t, err, unix.EPERM)
	assert.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
	assert.ErrorIs(t, unix.Ftruncate(fd, 2*MinBudget), unix.EPERM)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	assert.ErrorIs(t, err, unix.EPERM)

	m, err := unix.Mmap(fd, 0, MinBudget, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	defer unix.Munmap(m)
	assert.ErrorIs(t, unix.Mprotect(m, unix.PROT_READ|unix.PROT_WRITE), unix.EACCES)
	a.Bytes(100, 1)[0] = 42
	assert.Equal(t, byte(42), m[100], "readers see what we write")

	flags, err := unix.FcntlInt(uintptr(a.FD()), unix.F_GETFD, 0)
	require.NoError(t, err)
	assert.NotZero(t, flags&unix.FD_CLOEXEC)
}

func TestArenaSize(t *testing.T) {
	assert.EqualValues(t, MinBudget+pageSize, arena(t, MinBudget+1).Size())
	_, err := newArena(MinBudget - 1)
	assert.ErrorContains(t, err, "size 1048575")
}

// Invariant 4: the arena's memory is all there, charged to us, before a store
// needs it.
func TestArenaIsFaultedIn(t *testing.T) {
	a := arena(t, 3*prefaultPiece+pageSize)
	require.Eventually(t, func() bool { return a.Prefaulted() == a.Size() }, settleTime, settleStep)
	require.NoError(t, a.PrefaultErr())
	in := make([]byte, a.Size()/pageSize)
	_, err := mincore(a.mem, in)
	require.NoError(t, err)
	for i, b := range in {
		require.NotZero(t, b&1, "page %d is not resident", i)
	}
}

func TestPrefaultFallsBackToTouching(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		done int64
	}{
		"unknown to the kernel": {unix.EINVAL, MinBudget},
		"no system call":        {unix.ENOSYS, MinBudget},
		"out of memory":         {unix.ENOMEM, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a := &Arena{mem: make([]byte, MinBudget)}
			a.ahead.stop = make(chan struct{})
			a.mem[0] = 9
			a.prefault(func([]byte) error { return tt.err })
			assert.Equal(t, tt.done, a.Prefaulted())
			assert.Equal(t, byte(9), a.mem[0])
			assert.Equal(t, tt.done == 0, errors.Is(a.PrefaultErr(), tt.err))
		})
	}
}

func TestPrefaultStops(t *testing.T) {
	a := &Arena{mem: make([]byte, MinBudget)}
	a.ahead.stop = make(chan struct{})
	close(a.ahead.stop)
	a.prefault(func([]byte) error { t.Error("faulted in after stop"); return nil })
	assert.Zero(t, a.Prefaulted())
}
