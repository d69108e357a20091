package bench

import (
	"context"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// family is a shell that starts a child which starts another, says so and
// waits. The innermost ignores SIGTERM.
const family = `sh -c 'trap "" TERM; sh -c "echo ready; while :; do sleep 60; done" & wait' & wait`

// members returns the processes of a group that have not ended.
func members(t *testing.T, pgid int) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	var found []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		_, rest, ok := strings.Cut(string(stat), ") ")
		if f := strings.Fields(rest); err == nil && ok && len(f) > 2 && f[0] != "Z" && f[2] == strconv.Itoa(pgid) {
			found = append(found, pid)
		}
	}
	return found
}

func startFamily(t *testing.T) *group {
	t.Helper()
	g, err := startGroup(realBinary(t), t.TempDir(), "family", os.Environ(), []string{"sh", "-c", family})
	require.NoError(t, err)
	t.Cleanup(g.close)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, g.waitUntil(ctx, func() bool { return strings.Contains(g.tail(), "ready") }))
	require.GreaterOrEqual(t, len(members(t, g.pgid)), 3)
	return g
}

func TestAGroupEndsWithAllItsProcesses(t *testing.T) {
	g := startFamily(t)
	require.NoError(t, g.signal(syscall.SIGSTOP)) // also when it is stopped
	g.close()
	assert.Empty(t, members(t, g.pgid))
	assert.False(t, g.running())
}

func TestAGroupEndsWithWhoeverStartedIt(t *testing.T) {
	g := startFamily(t)
	// The end of the process that started the guard looks like this to it.
	require.NoError(t, g.stdin.Close())
	require.Eventually(t, func() bool { return len(members(t, g.pgid)) == 0 }, 10*time.Second, 20*time.Millisecond)
}

func TestAGroupSurvivesTheTerminalsInterrupt(t *testing.T) {
	g := startFamily(t)
	require.NoError(t, g.guard.Process.Signal(syscall.SIGINT))
	require.NoError(t, g.guard.Process.Signal(syscall.SIGTERM))
	assert.True(t, g.running())
	assert.GreaterOrEqual(t, len(members(t, g.pgid)), 3)
}

func TestAGroupThatDoesNotStartSaysWhy(t *testing.T) {
	_, err := startGroup(realBinary(t), t.TempDir(), "nothing", os.Environ(), []string{"/does/not/exist"})
	require.ErrorContains(t, err, "cannot start nothing")
	assert.ErrorContains(t, err, "/does/not/exist")
	g, err := startGroup(realBinary(t), t.TempDir(), "brief", os.Environ(), []string{"sh", "-c", "echo because >&2; exit 3"})
	require.NoError(t, err)
	defer g.close()
	err = g.waitUntil(t.Context(), func() bool { return false })
	require.ErrorContains(t, err, "brief ended before it was ready")
	assert.ErrorContains(t, err, "because")
}
