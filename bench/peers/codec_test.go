package peers

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

const testSize = 4 * kib

// fake listens and serves each connection until the test ends.
func fake(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

// store is what a fake keeps. Its flip spoils one byte of what it gives.
type store struct {
	mu   sync.Mutex
	m    map[string][]byte
	flip bool
}

func newStore() *store { return &store{m: map[string][]byte{}} }

func (s *store) get(key string) ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.m[key]
	if ok && s.flip {
		v = append([]byte(nil), v...)
		v[len(v)/2] ^= 1
	}
	return v, ok
}

func (s *store) set(key string, v []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.m[key] = v
}

func (s *store) drop(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.m[key]
	delete(s.m, key)
	return ok
}

func (s *store) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.m)
}

// serveRESP understands GET, SET and DEL.
func (s *store) serveRESP(c net.Conn) {
	r := bufio.NewReader(c)
	arg := func() []byte {
		line, err := r.ReadString('\n')
		n, err2 := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, "$")))
		if err != nil || err2 != nil {
			return nil
		}
		b := make([]byte, n+2)
		_, _ = io.ReadFull(r, b)
		return b[:n]
	}
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		n, _ := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, "*")))
		args := make([][]byte, n)
		for i := range args {
			args[i] = arg()
		}
		key := string(args[1])
		switch string(args[0]) {
		case "GET":
			if v, ok := s.get(key); ok {
				fmt.Fprintf(c, "$%d\r\n%s\r\n", len(v), v)
			} else {
				fmt.Fprint(c, "$-1\r\n")
			}
		case "SET":
			s.set(key, args[2])
			fmt.Fprint(c, "+OK\r\n")
		case "DEL":
			fmt.Fprintf(c, ":%d\r\n", map[bool]int{true: 1}[s.drop(key)])
		}
	}
}

// serveLM understands PUT, GET and EXIST.
func (s *store) serveLM(c net.Conn) {
	answer := func(code, length int) {
		b := make([]byte, lmAnswer)
		binary.LittleEndian.PutUint32(b, uint32(code))
		binary.LittleEndian.PutUint32(b[4:], uint32(length))
		_, _ = c.Write(b)
	}
	for {
		b := make([]byte, lmRequest)
		if _, err := io.ReadFull(c, b); err != nil {
			return
		}
		key := strings.TrimSpace(string(b[9*4:]))
		v, ok := s.get(key)
		switch binary.LittleEndian.Uint32(b) {
		case lmPut:
			v := make([]byte, binary.LittleEndian.Uint32(b[4:]))
			_, _ = io.ReadFull(c, v)
			s.set(key, v)
		case lmGet:
			if !ok {
				answer(lmFail, 0)
				continue
			}
			answer(lmOK, len(v))
			_, _ = c.Write(v)
		case lmExist:
			answer(map[bool]int{true: lmOK, false: lmFail}[ok], 0)
		}
	}
}

// serveKVB understands hello, batch get, put and delete. It grants credit in
// frames of its own.
func (s *store) serveKVB(c net.Conn) {
	frame := func(op byte, flags uint16, id uint64, credit uint32, payload []byte) {
		b := []byte{'K', 'V', 'B', '1', 1, op}
		b = binary.LittleEndian.AppendUint16(b, flags)
		b = binary.LittleEndian.AppendUint32(b, 3)
		b = binary.LittleEndian.AppendUint32(b, credit)
		b = binary.LittleEndian.AppendUint64(b, id)
		b = append(b, make([]byte, 32)...)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
		_, _ = c.Write(append(b, payload...))
	}
	streams := map[uint64][]byte{}
	for {
		h := make([]byte, kvbHeader)
		if _, err := io.ReadFull(c, h); err != nil {
			return
		}
		op, flags, id := h[5], binary.LittleEndian.Uint16(h[6:]), binary.LittleEndian.Uint64(h[16:])
		body := make([]byte, binary.LittleEndian.Uint32(h[56:]))
		if _, err := io.ReadFull(c, body); err != nil {
			return
		}
		key := string(h[24:56])
		frame(0, 0, 0, uint32(len(body)), nil)
		switch op {
		case kvbHello:
			answer := make([]byte, 64)
			binary.LittleEndian.PutUint32(answer[32:], 3)
			binary.LittleEndian.PutUint32(answer[36:], 64<<10) // smaller than what tests send
			frame(op, kvbResponse, id, 0, answer)
		case kvbPut:
			switch flags & 0xf0 {
			case kvbBegin:
				streams[id] = nil
				frame(op, kvbResponse, id, 0, make([]byte, 8))
			case kvbChunk:
				streams[id] = append(streams[id], body...)
			case kvbCommit:
				answer := make([]byte, 8)
				if uint64(kvwire.Sum(streams[id])) != binary.LittleEndian.Uint64(body) {
					answer[0] = 0x40
				}
				s.set(key, streams[id])
				frame(op, kvbResponse, id, 0, answer)
			}
		case kvbGet:
			n := int(binary.LittleEndian.Uint32(body))
			for i := range n { // a frame for each key
				v, ok := s.get(string(body[8+32*i:][:32]))
				answer := make([]byte, 32)
				binary.LittleEndian.PutUint32(answer[4:], 1)
				binary.LittleEndian.PutUint32(answer[8:], uint32(i))
				answer[16] = map[bool]byte{true: kvbOK, false: kvbMiss}[ok]
				binary.LittleEndian.PutUint32(answer[20:], uint32(len(v)))
				frame(op, kvbResponse|map[bool]uint16{true: kvbMore}[i < n-1], id, 0, append(answer, v...))
			}
		case kvbDelete:
			n := int(binary.LittleEndian.Uint32(body))
			for i := range n {
				s.drop(string(body[8+32*i:][:32]))
			}
			frame(op, kvbResponse, id, 0, make([]byte, 8+(n+7)/8*8))
		}
	}
}

// codecs are the clients of protocols that are faked here.
func codecs(t *testing.T, s *store) map[string]func() Conn {
	ctx := context.Background()
	must := func(c Conn, err error) Conn {
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	return map[string]func() Conn{
		"RESP":  func() Conn { c, err := dialRESP(ctx, fake(t, s.serveRESP), "k:"); return must(c, err) },
		"lm://": func() Conn { c, err := dialLM(ctx, fake(t, s.serveLM), "bench", 100); return must(c, err) },
		"KVB1":  func() Conn { c, err := dialKVB(ctx, fake(t, s.serveKVB), "k:"); return must(c, err) },
	}
}

// payloads makes values for a test.
func payloads(t *testing.T, n, size int) *Payloads {
	t.Helper()
	p, err := NewPayloads(n, size)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func buffers(n, size int) ([][]byte, []bool) {
	dst := make([][]byte, n)
	for i := range dst {
		dst[i] = make([]byte, size)
	}
	return dst, make([]bool, n)
}

// exercise stores, reads, misses and deletes.
func exercise(t *testing.T, c Conn, p *Payloads) {
	t.Helper()
	require.NoError(t, storeAll(c, p, p.Len()))
	dst, got := buffers(4, p.Size)
	for first := 0; first < p.Len(); first += 4 {
		require.NoError(t, c.Get(first, dst, got))
		assert.Equal(t, []bool{true, true, true, true}, got)
		for i := range dst {
			require.NoError(t, verify(dst[i], first+i, p))
		}
	}
	absent := 4 * chainPages
	require.NoError(t, c.Get(absent, dst, got))
	assert.Equal(t, []bool{false, false, false, false}, got, "keys that nobody stored")
	require.NoError(t, c.Get(0, dst[:1], got[:1]), "the connection goes on after a miss")
	assert.True(t, got[0])
	err := c.Drop(0, p.Len())
	if _, ok := c.(*lmConn); ok {
		assert.ErrorIs(t, err, errNoDrop)
		return
	}
	require.NoError(t, err)
	require.NoError(t, c.Get(0, dst, got))
	assert.Equal(t, []bool{false, false, false, false}, got, "dropped keys")
}

func TestCodecsAgainstFakes(t *testing.T) {
	for name, dial := range codecs(t, newStore()) {
		t.Run(name, func(t *testing.T) { exercise(t, dial(), payloads(t, 32, testSize)) })
	}
}

func TestWrongBytesAreCaught(t *testing.T) {
	for name := range codecs(t, newStore()) {
		t.Run(name, func(t *testing.T) {
			s := newStore()
			conn := codecs(t, s)[name]()
			p := payloads(t, 8, testSize)
			require.NoError(t, storeAll(conn, p, p.Len()))
			c := cell{Op: opGet, Size: testSize, Batch: 2, Streams: 1, HitPercent: 100}
			str := newStream(0, conn, c, newKeyspace(c, p, 0), true, 1)
			var m measurement
			require.NoError(t, str.step(&m))
			assert.EqualValues(t, 2*testSize, m.bytes)
			s.mu.Lock()
			s.flip = true
			s.mu.Unlock()
			var wrong *MixedUpError
			require.ErrorAs(t, str.step(&m), &wrong)
			assert.NotEqual(t, wrong.Want, wrong.Got)
		})
	}
}

func TestLengthsThatDoNotFitAreRefused(t *testing.T) {
	s := newStore()
	for name, dial := range codecs(t, s) {
		t.Run(name, func(t *testing.T) {
			c, p := dial(), payloads(t, 8, testSize)
			require.NoError(t, storeAll(c, p, p.Len()))
			dst, got := buffers(1, testSize/2)
			assert.ErrorContains(t, c.Get(0, dst, got), "instead of 2048")
		})
	}
}

func TestKeysOfLMComeRoundWhereNothingIsDeleted(t *testing.T) {
	s := newStore()
	c, err := dialLM(context.Background(), fake(t, s.serveLM), "bench", 2)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	for i := range 6 {
		require.NoError(t, c.Set(writeKeys+i, [][]byte{{byte(i)}}))
	}
	assert.Len(t, s.m, 2)
}

// binaryOf returns a real server's program, or skips.
func binaryOf(t *testing.T, names ...string) string {
	t.Helper()
	dir, err := DefaultDir()
	require.NoError(t, err)
	for _, name := range names {
		if path, err := (place{peers: dir}).program(name); err == nil {
			return path
		}
	}
	t.Skipf("none of %q is here", names)
	return ""
}

// realProducts are the systems that the codecs were written for.
func TestCodecsAgainstRealServers(t *testing.T) {
	for _, p := range []struct{ product, program, system string }{
		{"redis", "redis-server", sysRedis}, {"valkey", "valkey-server", sysValkey}, {"kvblockd", "kvblockd", sysKVB},
	} {
		t.Run(p.product, func(t *testing.T) {
			binaryOf(t, p.program)
			startedConn(t, p.product, p.system, "", func(c Conn) { exercise(t, c, payloads(t, 32, testSize)) })
		})
	}
}

// membraneBinary returns the binary that sidecars are started from.
func membraneBinary(t *testing.T) string {
	t.Helper()
	binary := os.Getenv("MEMBRANE_BIN")
	if binary == "" {
		t.Skip("MEMBRANE_BIN is not set: make test sets it")
	}
	return binary
}

func TestEveryWayIntoMembrane(t *testing.T) {
	binary := membraneBinary(t)
	for _, system := range []string{sysShm, sysEngine} {
		t.Run(system, func(t *testing.T) {
			startedConn(t, "membrane", system, binary, func(c Conn) { exercise(t, c, payloads(t, 32, testSize)) })
		})
	}
	t.Run(sysRESP, func(t *testing.T) {
		startedConn(t, "membrane-resp", sysRESP, binary, func(c Conn) { exercise(t, c, payloads(t, 32, testSize)) })
	})
}

func TestDataPortReadsWhatAnEngineStored(t *testing.T) {
	binary := membraneBinary(t)
	p := payloads(t, 32, testSize)
	started(t, "membrane", binary, func(ctx context.Context, on *running) {
		engine, err := dialEngine(ctx, on.addrs["engine_addr"], "writer", testSize)
		require.NoError(t, err)
		defer func() { _ = engine.Close() }()
		require.NoError(t, storeAll(engine, p, p.Len()))
		c, err := dialData(ctx, on.addrs["data"], "reader", testSize)
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		dst, got := buffers(4, testSize)
		require.NoError(t, c.Get(4, dst, got))
		for i := range dst {
			assert.True(t, got[i])
			require.NoError(t, verify(dst[i], 4+i, p))
		}
		require.NoError(t, c.Get(4*chainPages, dst, got))
		assert.Equal(t, []bool{false, false, false, false}, got)
		require.ErrorIs(t, c.Set(0, nil), errReadOnly)
	})
}

// started starts a product for a test.
func started(t *testing.T, product, binary string, use func(context.Context, *running)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dir, err := DefaultDir()
	require.NoError(t, err)
	work, err := os.MkdirTemp("", "mp") // short: sockets lie in it
	require.NoError(t, err)
	defer func() { _ = os.RemoveAll(work) }()
	on, err := allProducts()[product].start(ctx, place{binary: binary, peers: dir, dir: work, memory: 256 * mib})
	require.NoError(t, err)
	defer on.close()
	use(ctx, on)
}

func startedConn(t *testing.T, product, system, binary string, use func(Conn)) {
	t.Helper()
	started(t, product, binary, func(ctx context.Context, on *running) {
		for _, s := range allSystems(allProducts()) {
			if s.name != system {
				continue
			}
			c, err := s.open(ctx, on, opening{name: "test", size: testSize, writes: true, ring: 10})
			require.NoError(t, err)
			use(c)
			require.NoError(t, c.Close())
		}
	})
}

// selfAs starts this test binary as a system.
func selfAs(t *testing.T, what string) *server {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	s, err := spawn(what, t.TempDir(), []string{"MEMBRANE_PEERS_TEST=" + what}, self)
	require.NoError(t, err)
	t.Cleanup(s.kill)
	return s
}

func TestBareCopyAndEmptyServer(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	addr, err := selfAs(t, "bare").firstLine(ctx)
	require.NoError(t, err)
	c, err := dialBare(ctx, addr)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	dst, got := buffers(3, mib)
	require.NoError(t, c.Get(1, dst, got))
	assert.Equal(t, []bool{true, true, true}, got)
	assert.NotEqual(t, dst[0][:64], dst[1][:64], "frames come from different memory")

	addr, err = selfAs(t, "empty").firstLine(ctx)
	require.NoError(t, err)
	h, err := dialHTTP(ctx, addr, nil)
	require.NoError(t, err)
	defer func() { _ = h.Close() }()
	require.NoError(t, h.Get(0, [][]byte{nil}, got[:1]))
	require.NoError(t, h.Get(0, [][]byte{nil}, got[:1]), "the connection is kept")
}

func TestMetadataMustBeThatOfTheFragment(t *testing.T) {
	addr := fake(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if line == "\r\n" {
				fmt.Fprint(c, "HTTP/1.1 200 OK\r\nServer: x\r\ncontent-length: 22\r\n\r\n{\"found\":true,\"abc123\"")
			}
		}
	})
	got := make([]bool, 1)
	for hash, ok := range map[string]bool{"abc123": true, "def456": false} {
		c, err := dialHTTP(context.Background(), addr, []string{hash})
		require.NoError(t, err)
		err = c.Get(0, [][]byte{nil}, got)
		assert.Equal(t, ok, err == nil, hash)
		_ = c.Close()
	}
}
