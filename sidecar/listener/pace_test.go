package listener

import (
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pair returns the two ends of a TCP connection.
func pair(t *testing.T) (client net.Conn, sock *Sock) {
	t.Helper()
	on, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	client = dial(t, on.Addr().String())
	nc, err := on.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, on.Close())
	sock, err = NewSock(nc.(*net.TCPConn), nil)
	require.NoError(t, err)
	return client, sock
}

func TestPaceLimitsTheRestOfARequestOnly(t *testing.T) {
	t.Parallel()
	client, sock := pair(t)
	var busy atomic.Int64
	busy.Add(1)
	p := NewPace(sock, &busy, time.Nanosecond)
	b := make([]byte, 1)
	read := func() error {
		_, err := p.Read(b)
		return err
	}
	send := func() {
		_, err := client.Write([]byte("x"))
		require.NoError(t, err)
	}

	p.Begin()
	require.ErrorIs(t, read(), os.ErrDeadlineExceeded)
	assert.EqualValues(t, 1, busy.Load())
	require.NoError(t, p.Hurry(3600*slowest), "an hour")
	send()
	require.NoError(t, read())
	require.NoError(t, p.Hurry(0))
	require.ErrorIs(t, read(), os.ErrDeadlineExceeded)

	// Between requests there is none, and nothing is under way.
	require.NoError(t, p.Done())
	p.Await()
	waited := make(chan error)
	go func() { waited <- read() }()
	require.Eventually(t, func() bool { return busy.Load() == 0 }, time.Minute, time.Millisecond)
	send()
	require.NoError(t, <-waited)
	assert.EqualValues(t, 1, busy.Load())
}

func TestPaceOfWhoIsBound(t *testing.T) {
	t.Parallel()
	client, sock := pair(t)
	var busy atomic.Int64
	p := NewPace(sock, &busy, time.Hour)
	require.NoError(t, p.Bind(time.Nanosecond))
	b := make([]byte, 1)
	for range 2 {
		_, err := p.Read(b)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "before a request")
		p.Begin()
		_, err = p.Read(b)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "within one")
		require.NoError(t, p.Hurry(1<<40))
		require.NoError(t, p.Done())
		p.Await()
	}
	p.Free()
	require.NoError(t, p.Done())
	_, err := client.Write([]byte("x"))
	require.NoError(t, err)
	_, err = p.Read(b)
	require.NoError(t, err)
}
