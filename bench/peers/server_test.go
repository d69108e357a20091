package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPausedSystemsStandStill(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s := selfAs(t, "bare")
	addr, err := s.firstLine(ctx)
	require.NoError(t, err)
	c, err := dialBare(ctx, addr)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	dst, got := buffers(1, mib)
	require.NoError(t, c.Get(0, dst, got))

	states := func() string {
		group, err := s.group()
		require.NoError(t, err)
		var all []byte
		for _, m := range group {
			all = append(all, m.state)
		}
		return string(all)
	}
	require.NoError(t, s.pause(ctx))
	assert.Equal(t, "T", states())
	before, err := s.cpu()
	require.NoError(t, err)
	answered := make(chan error, 1)
	go func() { answered <- c.Get(0, dst, got) }()
	// A stopped process uses no time however often it is asked.
	for range 100 {
		after, err := s.cpu()
		require.NoError(t, err)
		require.Equal(t, before, after)
	}
	select {
	case err := <-answered:
		t.Fatalf("a stopped system has answered: %v", err)
	default:
	}
	require.NoError(t, s.resume(ctx))
	assert.NotContains(t, states(), "T")
	failed := errors.New("a cell failed")
	assert.ErrorIs(t, (&running{server: s}).while(ctx, func() error { assert.NotContains(t, states(), "T"); return failed }), failed)
	assert.Equal(t, "T", states(), "it rests all the same")
	require.NoError(t, s.resume(ctx))
	select {
	case err := <-answered:
		require.NoError(t, err)
	case <-ctx.Done():
		t.Fatal("a system that goes on does not answer")
	}
	rss, err := s.resident()
	require.NoError(t, err)
	assert.Greater(t, rss, int64(bareMemory), "the memory that it sends from is present")
	pss, err := s.memory()
	require.NoError(t, err)
	assert.Greater(t, pss, int64(bareMemory))
}

// A client that has died is no reason for its system to run on beside what is
// measured next, and one that does not answer gives no answer to what is asked
// next.
func TestSystemsRestWithoutTheirClient(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client, err := spawn("silent", t.TempDir(), nil, "sleep", "60")
	require.NoError(t, err)
	defer client.kill()
	on := &running{server: selfAs(t, "empty"), helper: &helper{server: client, in: client.stdin.(io.Writer)}}
	short, stop := context.WithTimeout(ctx, 10*time.Millisecond)
	defer stop()
	_, err = on.helper.ask(short, map[string]any{"do": "get"})
	require.ErrorContains(t, err, "not ready in time")
	select {
	case <-client.exited:
	default:
		t.Error("a late answer would be taken for the next one")
	}
	client.kill()
	require.Error(t, on.rest(ctx))
	group, err := on.group()
	require.NoError(t, err)
	for _, m := range group {
		assert.Equal(t, "T", string(m.state))
	}
}

func TestSystemThatEndsSaysWhy(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := spawn("broken", t.TempDir(), nil, "sh", "-c", "echo no room >&2; exit 3")
	require.NoError(t, err)
	defer s.kill()
	_, err = s.firstLine(ctx)
	require.ErrorContains(t, err, "broken ended before it was ready")
	assert.Equal(t, "broken ended before it was ready: no room", reason(err))
	_, err = spawn("absent", t.TempDir(), nil, "/nonexistent/program")
	assert.ErrorContains(t, err, "cannot start absent")
}

// A helper's answer has a number for each operation, so that a long cell has a
// long line.
func TestLongLinesArrive(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	const n = 2 << 20
	s, err := spawn("talker", t.TempDir(), nil, "sh", "-c", fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo; echo end >&2", n))
	require.NoError(t, err)
	defer s.kill()
	line, err := s.firstLine(ctx)
	require.NoError(t, err)
	assert.Len(t, line, n)
	<-s.exited
	assert.Less(t, len(s.log()), 2*maxTail, "its log stays short")
}

func TestChildrenCountWithTheirParent(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := spawn("family", t.TempDir(), nil, "sh", "-c", "(echo up; exec sleep 60) & wait")
	require.NoError(t, err)
	defer s.kill()
	_, err = s.firstLine(ctx)
	require.NoError(t, err)
	require.NoError(t, s.pause(ctx))
	group, err := s.group()
	require.NoError(t, err)
	assert.Greater(t, len(group), 1)
	for _, m := range group {
		assert.Equal(t, "T", string(m.state))
	}
}

func TestParseStat(t *testing.T) {
	for line, want := range map[string]struct {
		member
		pgid int
	}{
		"7 (a b) c) S 1 5 5 0 -1 4 0 0 0 0 10 20 3 4 20 0 9 0": {member{7, 'S', 370 * time.Millisecond}, 5},
		"8 (x) T 1 6 5 0 -1 4 0 0 0 0 0 0 0 0 20 0 9 0":        {member{8, 'T', 0}, 6},
	} {
		m, pgid, err := parseStat(line)
		require.NoError(t, err, line)
		assert.Equal(t, want.member, m)
		assert.Equal(t, want.pgid, pgid)
	}
	for _, bad := range []string{"", "7", "7 (x)", "7 (x) S 1", "x (y) S 1 5 5 0 -1 4 0 0 0 0 10 20 3 4 20", "7 (y) S 1 5 5 0 -1 4 0 0 0 0 a 20 3 4 20"} {
		_, _, err := parseStat(bad)
		assert.Error(t, err, bad)
	}
}
