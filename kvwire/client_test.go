package kvwire

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fakeSidecar answers hello and hands every further frame to serve; it returns
// a client of it. The connection ends with the test.
func fakeSidecar(t *testing.T, serve func(conn net.Conn, h Header)) *Client {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s.sock"))
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		for {
			h, err := ReadHeader(conn)
			if err != nil {
				return
			}
			if _, err := ReadBody(conn, h, nil); err != nil {
				return
			}
			if h.Type == TypeHello {
				out, begin := BeginFrame(nil, TypeHello|AnswerBit, h.ID)
				_, _ = conn.Write(EndFrame(append(out, "{}"...), begin))
				continue
			}
			serve(conn, h)
		}
	}()
	c, err := Dial(t.Context(), l.Addr().String(), ClientOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = c.conn.Close() // not Close, which waits for calls under way
		_ = l.Close()
		<-done
	})
	return c
}

// Invariant 2: a call ends at its deadline though nothing comes.
func TestCallEndsAtItsDeadline(t *testing.T) {
	t.Parallel()
	c := fakeSidecar(t, func(net.Conn, Header) {})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := c.Match(ctx, Match{}, nil)
		ended <- err
	}()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, context.DeadlineExceeded)
	case <-time.After(2 * time.Second):
		t.Error("the call goes on after its deadline")
	}
}

// Invariant 1: what is read inline counts only if it has its checksum.
func TestReadRefusesWrongBytes(t *testing.T) {
	t.Parallel()
	object := []byte("what the holder sent")
	for flip, want := range map[int]string{-1: "", 0: "checksum", len(object) - 1: "checksum"} {
		c := fakeSidecar(t, func(conn net.Conn, h Header) {
			sent := bytes.Clone(object)
			if flip >= 0 {
				sent[flip] ^= 1
			}
			out := AppendHeader(nil, Header{Type: TypePage, ID: h.ID, Length: uint32(PageHeaderSize + len(sent))})
			out = AppendPageHeader(out, PageHeader{Shard: Shard{Count: 1}, Length: uint64(len(sent)), Sum: Sum(object)})
			_, _ = conn.Write(append(out, sent...))
		})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		err := c.Read(ctx, Read{Lease: 1, Pages: 1}, func(_ int, n int64) []byte { return make([]byte, n) })
		if want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, want, "byte %d flipped", flip)
	}
}

// A ping that waits for a stopped sidecar must not make a match late.
func TestCallEndsAtItsDeadlineWhileAnotherWaits(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s.sock")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	defer func() { assert.NoError(t, l.Close()) }()
	pinged, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		conn, err := l.Accept()
		if !assert.NoError(t, err) {
			return
		}
		defer func() { _ = conn.Close() }()
		h, err := ReadHeader(conn)
		assert.NoError(t, err)
		_, err = ReadBody(conn, h, nil)
		assert.NoError(t, err)
		body, err := json.Marshal(HelloAnswer{})
		assert.NoError(t, err)
		out, begin := BeginFrame(nil, TypeHello|AnswerBit, h.ID)
		_, err = conn.Write(EndFrame(append(out, body...), begin))
		assert.NoError(t, err)
		_, err = ReadHeader(conn)
		assert.NoError(t, err)
		close(pinged)
		_, err = ReadHeader(conn) // and no answer until the client closes
		assert.Error(t, err)
	}()
	c, err := Dial(t.Context(), path, ClientOptions{})
	require.NoError(t, err)
	ended := make(chan error, 1)
	long, giveUp := context.WithTimeout(t.Context(), 2*time.Second)
	defer giveUp()
	go func() { ended <- c.Ping(long) }()
	<-pinged
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err = c.Match(short, Match{}, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.Less(t, time.Since(began), time.Second, "the match waited for the ping")
	require.ErrorIs(t, <-ended, context.DeadlineExceeded)
	require.Error(t, c.Close()) // it was spent by the ping
	<-stopped
}
