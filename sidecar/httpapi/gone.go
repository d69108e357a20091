package httpapi

import (
	"context"
	"errors"

	"github.com/valyala/fasthttp"

	"membrane/engines/hangup"
	"membrane/sidecar/disagg"
)

// whileConnected returns a context that ends when the client has gone away. The
// body must have been read. stop ends the watch and may be called twice.
func (s *Server) whileConnected(c *fasthttp.RequestCtx) (ctx context.Context, stop func()) {
	return hangup.Watch(s.ctx, c.Conn())
}

func asDisagg(err error) (*disagg.Error, bool) {
	var e *disagg.Error
	return e, errors.As(err, &e)
}
