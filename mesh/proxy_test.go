package mesh

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// proxy stands between a node and a peer's listener and does to the peer's
// bytes what a test asks for.
type proxy struct {
	addr   string
	to     string
	refuse atomic.Bool // close connections at once
	tamper atomic.Pointer[func(n int64, b []byte)]

	mu    sync.Mutex
	conns []net.Conn
}

// bytes sets what sees the n-th and following bytes that come back from the
// peer on a connection; it may change them or block.
func (p *proxy) bytes(fn func(n int64, b []byte)) {
	if fn == nil {
		p.tamper.Store(nil)
		return
	}
	p.tamper.Store(&fn)
}

func newProxy(t testing.TB, to string) *proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{addr: ln.Addr().String(), to: to}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		p.cut()
		wg.Wait()
	})
	return p
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

func (p *proxy) serve(down net.Conn) {
	defer down.Close()
	if p.refuse.Load() {
		return
	}
	up, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer up.Close()
	p.mu.Lock()
	p.conns = append(p.conns, down, up)
	p.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = io.Copy(up, down)
		_ = up.Close()
	})
	buf := make([]byte, 64<<10)
	for n := int64(0); ; {
		k, err := up.Read(buf)
		if k > 0 {
			if fn := p.tamper.Load(); fn != nil {
				(*fn)(n, buf[:k])
			}
			n += int64(k)
			if _, err := down.Write(buf[:k]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	_ = down.Close()
	_ = up.Close()
	wg.Wait()
}
