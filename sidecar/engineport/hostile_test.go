package engineport

import (
	"bufio"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// rawConn opens a connection without a client's manners.
func rawConn(t *testing.T, network, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial(network, addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	return c
}

func sendFrame(t *testing.T, c net.Conn, typ kvwire.Type, length int, body []byte) {
	t.Helper()
	b := kvwire.AppendHeader(nil, kvwire.Header{Type: typ, ID: 7, Length: uint32(length)})
	_, err := c.Write(append(b, body...))
	require.NoError(t, err)
}

// answerOf reads one frame; an error frame is returned as such.
func answerOf(t *testing.T, c net.Conn) (kvwire.Header, error) {
	t.Helper()
	h, body, err := kvwire.ReadFrame(c, nil)
	require.NoError(t, err)
	if h.Type != kvwire.TypeError|kvwire.AnswerBit {
		return h, nil
	}
	e, err := kvwire.ParseError(body)
	require.NoError(t, err)
	return h, e
}

func greeted(t *testing.T, p *port) net.Conn {
	t.Helper()
	c := rawConn(t, "tcp", p.tcp)
	sendFrame(t, c, kvwire.TypeHello, 2, []byte("{}"))
	_, err := answerOf(t, c)
	require.NoError(t, err)
	return c
}

func TestBodiesUnderWayAreBounded(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	var slow []net.Conn
	for range maxBodies / kvwire.MaxControl {
		c := greeted(t, p)
		sendFrame(t, c, kvwire.TypeExtend, kvwire.MaxControl, make([]byte, 100))
		slow = append(slow, c)
	}
	require.Eventually(t, func() bool { return p.bodies.used.Load() == maxBodies }, 5*time.Second, time.Millisecond)
	c := attach(t, p.tcp, registration("e1"))
	long := tokens(smallBody, 0)
	m := match(t, c, kvwire.Match{Tokens: long}) // a match is hashed as it comes
	before := p.count.errors[kvwire.CodeBusy].Get()
	_, err := c.Extend(within(t), m.Handle, long)
	wantError(t, err, kvwire.CodeBusy, "length")
	assert.Equal(t, before+1, p.count.errors[kvwire.CodeBusy].Get())
	n, err := c.Extend(within(t), m.Handle, long[:1024]) // small ones go on, on the same connection
	require.NoError(t, err)
	assert.EqualValues(t, smallBody/64+4, n, "the refused request changed the chain")
	require.NoError(t, slow[0].Close())
	require.Eventually(t, func() bool { return p.bodies.used.Load() < maxBodies }, 5*time.Second, time.Millisecond)
	_, err = c.Extend(within(t), m.Handle, long)
	require.NoError(t, err)
}

func TestUnfinishedFramesEnd(t *testing.T) {
	t.Parallel()
	const limit = 300 * time.Millisecond
	p := newPort(t, func(c *Config) { c.bodyTimeout = limit })
	for _, typ := range []kvwire.Type{kvwire.TypeMatch, kvwire.TypeWrite} {
		c := greeted(t, p)
		sendFrame(t, c, typ, 1000, make([]byte, 100))
		_, err := io.ReadAll(c)
		require.NoError(t, err, "%s: the connection was not closed", typ)
	}
	// The time is for a frame that has begun; between frames there is no limit.
	idle := attach(t, p.tcp, registration("e1"))
	_, err := idle.Match(within(t), kvwire.Match{Tokens: tokens(smallBody, 0)}, nil)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.connected.Load() == 1 }, 5*time.Second, time.Millisecond)
	require.Never(t, func() bool { return p.connected.Load() == 0 }, limit*3/2, 5*time.Millisecond)
	require.NoError(t, idle.Ping(within(t)))
}

func TestStrangersHaveNoTimeButTheirOwn(t *testing.T) {
	t.Parallel()
	p := newPort(t, func(c *Config) { c.greetTimeout = 500 * time.Millisecond })
	c := rawConn(t, "tcp", p.tcp)
	sendFrame(t, c, kvwire.TypeWrite, kvwire.WriteHeaderSize, make([]byte, kvwire.WriteHeaderSize))
	_, err := answerOf(t, c)
	wantError(t, err, kvwire.CodeUnauthorized, "key")
	_, err = io.ReadAll(c)
	require.NoError(t, err, "a write frame without hello took the time limit away")
}

func TestStrangersMakeRoomForNewcomers(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	var silent []net.Conn
	for range maxStrangers {
		silent = append(silent, rawConn(t, "tcp", p.tcp))
	}
	require.Eventually(t, func() bool { return p.connected.Load() == maxStrangers }, 5*time.Second, time.Millisecond)
	c := attach(t, p.tcp, registration("e1"))
	_, err := answerOf(t, silent[0])
	wantError(t, err, kvwire.CodeBusy, "")
	_, err = io.ReadAll(silent[0])
	require.NoError(t, err)
	require.NoError(t, c.Ping(within(t)))
	assert.EqualValues(t, 1, p.count.errors[kvwire.CodeBusy].Get())
}

func TestPortLeavesRoomForTheSocket(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	for range MaxPortConnections {
		greeted(t, p)
	}
	_, err := answerOf(t, rawConn(t, "tcp", p.tcp))
	wantError(t, err, kvwire.CodeBusy, "")
	c := attach(t, p.socket, registration("e1"))
	require.NoError(t, c.Ping(within(t)))
}

func TestInlineWritesUnderWayAreBounded(t *testing.T) {
	t.Parallel()
	p := newPort(t) // an arena of 32 MiB
	const size = 4 << 20
	begin := func(seed uint32) (net.Conn, []byte) {
		c := greeted(t, p)
		body := strings.NewReplacer("NAME", "w"+string(rune('a'+seed))).Replace(`{"engine":"NAME","role":"both","inline":true,"inbox_slots":0,
			"model":{"weights_id":"w","dtype":"float32","quantization":"","scales":"","rope":"r","layers":2,"kv_heads":2,"head_size":4,"mla":false,"kv_epoch":""},
			"descriptor":{"layout":"test","dtype":"float32","packing":"","block_tokens":16,"block_bytes":1048576,"axes":[],"strides":[],"tp_size":1,"pp_size":1,"tp_rank":0,"pp_rank":0,"layers":[0,2],"heads":[0,2]}}`)
		sendFrame(t, c, kvwire.TypeRegister, len(body), []byte(body))
		_, err := answerOf(t, c)
		require.NoError(t, err)
		m := kvwire.AppendMatch(nil, kvwire.Match{Tokens: tokens(64, seed*1000)})
		sendFrame(t, c, kvwire.TypeMatch, len(m), m)
		_, b, err := kvwire.ReadFrame(c, nil)
		require.NoError(t, err)
		head := append(append([]byte(nil), b[:8]...), make([]byte, 8)...) // handle, page 0
		return c, head
	}
	first, head := begin(0)
	sendFrame(t, first, kvwire.TypeWrite, kvwire.WriteHeaderSize+size, head)
	second, head := begin(1)
	sendFrame(t, second, kvwire.TypeWrite, kvwire.WriteHeaderSize+size, head)
	require.Eventually(t, func() bool { return p.receiving.used.Load() == 2*size }, 5*time.Second, time.Millisecond)
	third, head := begin(2)
	write := func() kvwire.Committed {
		sendFrame(t, third, kvwire.TypeWrite, kvwire.WriteHeaderSize+size, append(append([]byte(nil), head...), make([]byte, size)...))
		_, b, err := kvwire.ReadFrame(bufio.NewReader(third), nil)
		require.NoError(t, err)
		out, err := kvwire.ParseCommitted(b, nil)
		require.NoError(t, err)
		return out[0]
	}
	assert.Equal(t, kvwire.ReasonOverBudget, write().Reason)
	require.NoError(t, first.Close())
	require.Eventually(t, func() bool { return p.receiving.used.Load() == size }, 5*time.Second, time.Millisecond)
	assert.Equal(t, kvwire.StoreStored, write().Status)
	assert.EqualValues(t, size, p.receiving.used.Load())
}

func TestRequestThatPanicsIsNotUnderWay(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := &conn{s: p.Server, greeted: true} // without a socket
	assert.Panics(t, func() { _ = c.serve(kvwire.Header{Type: kvwire.TypePing, Length: 1}) })
	assert.Zero(t, p.InFlight())
}
