package embedded

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// stallingProxy forwards to a localhost port and stops at the first request of
// the type that is set, as a sidecar that is stopped at that moment.
type stallingProxy struct {
	addr  string
	stall atomic.Int64
}

func newStallingProxy(t *testing.T, to string) *stallingProxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	p := &stallingProxy{addr: l.Addr().String()}
	p.stall.Store(-1)
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go p.forward(client, to)
		}
	}()
	return p
}

func (p *stallingProxy) forward(client net.Conn, to string) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	go func() { _, _ = io.Copy(client, server) }()
	for {
		h, err := kvwire.ReadHeader(client)
		if err != nil {
			return
		}
		if int64(h.Type) == p.stall.Load() {
			_, _ = io.Copy(io.Discard, client) // until the client gives up
			return
		}
		if _, err := server.Write(kvwire.AppendHeader(nil, h)); err != nil {
			return
		}
		if _, err := io.CopyN(server, client, int64(h.Length)); err != nil {
			return
		}
	}
}

func TestLoadEndsAtItsDeadlineWhereverTheSidecarStops(t *testing.T) {
	for name, at := range map[string]kvwire.Type{"match": kvwire.TypeMatch, "read": kvwire.TypeRead, "release": kvwire.TypeRelease} {
		t.Run(name, func(t *testing.T) {
			p := newPort(t)
			proxy := newStallingProxy(t, p.tcp)
			e := newEngine(t, "", func(c *Config) { c.Deadline = 400 * time.Millisecond })
			reg := Registration(e.cfg.Model, "inline", 64, 0)
			reg.Inline = true
			e.session = NewSession(proxy.addr, reg, kvwire.ClientOptions{Inline: true}, zerolog.Nop())
			attached(t, e, true)
			req := Request{Tokens: prompt(200), MaxTokens: 8}
			want := completeOK(t, e, req)
			require.Equal(t, 192, completeOK(t, e, req).Reused)
			proxy.stall.Store(int64(at))
			res := completeOK(t, e, req)
			assert.Equal(t, want.Tokens, res.Tokens)
			assert.Zero(t, res.Reused)
			assert.Less(t, res.Load, e.cfg.Deadline+e.cfg.Deadline/10+250*time.Millisecond)
		})
	}
}
