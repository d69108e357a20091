package kvwire

import (
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
