package proxy

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"time"

	"membrane/engines/hangup"
)

// untilClosed sends an answer of unknown length to a client of HTTP/1.0, which
// knows no chunks: the end of the connection ends it, and one that was cut is
// reset. fasthttp would send chunks, so it gives the connection away.
func (s *Server) untilClosed(ctx context.Context, a *answer) {
	c := a.f.c
	c.Response.Header.SetContentLength(-2) // none, and the connection is closed
	c.HijackSetNoResponse(true)
	var begun atomic.Bool
	s.wg.Add(1)
	// fasthttp never calls where the connection broke meanwhile.
	context.AfterFunc(ctx, func() {
		if !begun.Swap(true) {
			defer s.wg.Done()
			_ = a.Close()
		}
	})
	c.Hijack(func(conn net.Conn) {
		if begun.Swap(true) {
			return
		}
		defer s.wg.Done()
		defer func() { _ = a.Close() }()
		_ = conn.SetWriteDeadline(time.Now().Add(s.cfg.writeTimeout))
		_, err := conn.Write(c.Response.Header.Header())
		if err == nil {
			_, err = io.Copy(onlyWriter{conn}, a)
		}
		if err != nil {
			hangup.ResetOnClose(a.conn)
		}
	})
}

// onlyWriter hides a ReadFrom, which would read parts of any size.
type onlyWriter struct{ io.Writer }
