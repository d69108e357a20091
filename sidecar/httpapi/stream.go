package httpapi

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/sidecar/disagg"
)

// streamToken is one event of a stream; the last one is a
// disaggDecodeAnswer with all tokens, and "[DONE]" ends the stream.
type streamToken struct {
	RequestID string `json:"request_id"`
	Token     uint32 `json:"token_id"`
}

type outcome struct {
	done disagg.Decoded
	err  error
}

// streamDecode answers a decode with server-sent events. What goes wrong before
// the first token has a status of its own; later it is an event "error".
func (s *Server) streamDecode(ctx context.Context, stop func(), c *fasthttp.RequestCtx, tenant string, req disagg.DecodeRequest) {
	tokens, end := make(chan uint32), make(chan outcome, 1)
	s.inFlight.Add(1) // beyond the handler, until the stream has ended
	s.wg.Go(func() {
		defer s.inFlight.Add(-1)
		done, err := s.cfg.Disagg.Decode(ctx, tenant, req, func(token uint32) error {
			select {
			case tokens <- token:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		end <- outcome{done, err}
		close(tokens)
	})
	first, more := <-tokens
	if !more { // no token at all: an error, or a stop token at once
		if o := <-end; o.err != nil {
			stop()
			s.failDisagg(c, o.err)
			return
		} else {
			end <- o
		}
	}
	c.Response.Header.SetContentType("text/event-stream")
	c.Response.Header.Set("Cache-Control", "no-store")
	conn := c.Conn()
	c.SetBodyStreamWriter(func(w *bufio.Writer) {
		defer stop()
		send := func(event string, v any) bool {
			b, err := json.Marshal(v)
			if err != nil {
				return false
			}
			// The server's own limit is for answers that are ready.
			_ = conn.SetWriteDeadline(time.Now().Add(writeTimeout))
			_, _ = fmt.Fprintf(w, "%sdata: %s\n\n", event, b)
			return w.Flush() == nil
		}
		ok := true
		for token := first; more; token, more = <-tokens {
			if ok && !send("", streamToken{req.RequestID, token}) {
				ok = false
				stop() // and wait for the decode to notice
			}
		}
		switch o := <-end; {
		case !ok:
		case o.err != nil:
			send("event: error\n", problemOf(o.err))
		case send("", decodeAnswerOf(o.done)):
			_, _ = w.WriteString("data: [DONE]\n\n")
		}
	})
}

func problemOf(err error) problem {
	if e, ok := asDisagg(err); ok {
		return problem{e.Code(), e.Field, e.Message}
	}
	return problem{"internal", "", "the sidecar failed; its log has the request id"}
}
