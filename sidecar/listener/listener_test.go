package listener

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"membrane/cache"
)

// echo sends back what it gets; one byte makes it known.
type echo struct {
	l    **Listener[*echo]
	sock *Sock
}

func (e *echo) Shut() { e.sock.Shut() }

func (e *echo) Run() {
	defer func() { _ = e.sock.TCP.Close() }()
	b := make([]byte, 64)
	for {
		n, err := e.sock.Read(b)
		if err != nil {
			return
		}
		(*e.l).Met(e)
		v := unix.Iovec{Base: &b[0]}
		v.SetLen(n)
		if e.sock.Writev([]unix.Iovec{v}, time.Second) != nil {
			return
		}
	}
}

func start(t *testing.T, connections, fromOne, strangers int) (l *Listener[*echo], addr string, away *atomic.Int64) {
	t.Helper()
	away = new(atomic.Int64)
	l, err := New(Config[*echo]{
		Who: "a test", Connections: connections, FromOne: fromOne, Strangers: strangers,
		Open: func(nc *net.TCPConn) (*echo, bool, error) {
			s, err := NewSock(nc, nil)
			return &echo{&l, s}, false, err
		},
		Refuse:     func(nc *net.TCPConn) { _, _ = nc.Write([]byte("full")) },
		TurnedAway: func() { away.Add(1) },
	})
	require.NoError(t, err)
	on, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Serve(on))
	t.Cleanup(func() { _ = l.Close() })
	return l, on.Addr().String(), away
}

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(time.Minute)))
	return nc
}

func say(t *testing.T, nc net.Conn, word string) {
	t.Helper()
	_, err := nc.Write([]byte(word))
	require.NoError(t, err)
	got := make([]byte, len(word))
	_, err = io.ReadFull(nc, got)
	require.NoError(t, err)
	require.Equal(t, word, string(got))
}

func TestOldestStrangerMakesRoom(t *testing.T) {
	t.Parallel()
	l, addr, away := start(t, 10, 10, 2)
	known := dial(t, addr)
	say(t, known, "hello")
	first := dial(t, addr)
	require.Eventually(t, func() bool { return l.Connections() == 2 }, time.Minute, time.Millisecond)
	second, third := dial(t, addr), dial(t, addr)
	_, err := first.Read(make([]byte, 1))
	require.Error(t, err)
	say(t, known, "still")
	say(t, second, "here")
	say(t, third, "too")
	assert.EqualValues(t, 1, away.Load())
	require.Eventually(t, func() bool { return l.Connections() == 3 }, time.Minute, time.Millisecond)
}

func TestLimitsOfConnections(t *testing.T) {
	t.Parallel()
	for _, limits := range [][2]int{{2, 9}, {9, 2}} {
		l, addr, away := start(t, limits[0], limits[1], 9)
		one, two := dial(t, addr), dial(t, addr)
		say(t, one, "1")
		say(t, two, "2")
		got, err := io.ReadAll(dial(t, addr))
		require.NoError(t, err)
		assert.Equal(t, "full", string(got))
		assert.EqualValues(t, 1, away.Load())
		require.NoError(t, one.Close())
		require.Eventually(t, func() bool { return l.Connections() == 1 }, time.Minute, time.Millisecond)
		say(t, dial(t, addr), "3")
	}
}

func TestCloseEndsEverything(t *testing.T) {
	t.Parallel()
	l, addr, _ := start(t, 9, 9, 9)
	c := dial(t, addr)
	say(t, c, "a")
	require.NoError(t, l.Close())
	assert.Error(t, l.Context().Err())
	_, err := c.Read(make([]byte, 1))
	require.Error(t, err)
	require.ErrorIs(t, l.Close(), net.ErrClosed)
	require.ErrorIs(t, l.Serve(nil), net.ErrClosed)
	assert.Zero(t, l.Connections())
}

func TestBadConfig(t *testing.T) {
	t.Parallel()
	_, err := New(Config[*echo]{Who: "x"})
	require.ErrorContains(t, err, "Open")
	_, err = New(Config[*echo]{
		Who: "x", Open: func(*net.TCPConn) (*echo, bool, error) { return nil, false, nil },
		Refuse: func(*net.TCPConn) {}, TurnedAway: func() {},
	})
	require.ErrorContains(t, err, "at least 1")
}

// plain is a source of bytes in pieces of any length.
type plain struct{ r io.Reader }

func (p plain) Read(b []byte) (int, error) { return p.r.Read(b) }

func TestReaderTakesApartWhatItGets(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		data := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "data")
		size := rapid.IntRange(8, 64).Draw(t, "size")
		var src io.Reader = bytes.NewReader(data)
		if rapid.Bool().Draw(t, "bytewise") {
			src = iotest.OneByteReader(src)
		}
		p := NewReader(plain{src}, size)
		for at := 0; ; {
			n := rapid.IntRange(0, 100).Draw(t, "n")
			var err error
			if rapid.Bool().Draw(t, "skip") {
				err = p.Skip(int64(n))
			} else {
				got := make([]byte, n)
				if err = p.Full(got); err == nil && !bytes.Equal(got, data[at:at+n]) {
					t.Fatalf("%v at %d", got, at)
				}
			}
			if at += n; at > len(data) {
				if !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Fatalf("%v behind the end", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestPartsAndCompareAgree(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, cache.PartSize - 64, cache.PartSize - 63, cache.PartSize, 3*cache.PartSize + 5} {
		header := bytes.Repeat([]byte("h"), 64)
		value := bytes.Repeat([]byte("0123456789abcdef"), n/16+1)[:n]
		slot := make([]byte, 64+n)
		copy(slot, header)
		var a, b cache.PartSums
		require.NoError(t, NewReader(plain{bytes.NewReader(value)}, 256).Parts(slot, 64, &a))
		assert.Equal(t, value, slot[64:])
		assert.Equal(t, cache.SumParts(slot), a.Sum())
		require.NoError(t, NewReader(plain{bytes.NewReader(value)}, 256).Compare(header, int64(n), &b))
		assert.Equal(t, a.Sum(), b.Sum())
		if n > 0 {
			require.ErrorIs(t, NewReader(plain{bytes.NewReader(value[1:])}, 256).Parts(slot, 64, &a), io.ErrUnexpectedEOF)
		}
	}
}
