package httpapi

import (
	"bufio"
	"bytes"
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

// streamBegun is the first event of a prefill's stream, the last one a
// disaggPrefillAnswer. A decode that is asked for the handle follows the
// prefill.
type streamBegun struct {
	RequestID string `json:"request_id"`
	Handle    string `json:"kv_handle"`
	PromptLen int    `json:"prompt_len"`
}

// streamDecode answers a decode with server-sent events, one for each token.
func (s *Server) streamDecode(ctx context.Context, stop func(), c *fasthttp.RequestCtx, tenant string, req disagg.DecodeRequest) {
	s.stream(ctx, stop, c, func(event func(v any) error) (any, error) {
		done, err := s.cfg.Disagg.Decode(ctx, tenant, req, func(token uint32) error { return event(streamToken{req.RequestID, token}) })
		return decodeAnswerOf(done), err
	})
}

// streamPrefill answers a prefill with server-sent events, the handle first.
func (s *Server) streamPrefill(ctx context.Context, stop func(), c *fasthttp.RequestCtx, tenant string, req disagg.PrefillRequest) {
	s.stream(ctx, stop, c, func(event func(v any) error) (any, error) {
		req.Begun = func(b disagg.Prefilled) { _ = event(streamBegun{b.RequestID, b.Handle, b.Tokens}) } // who has gone ends ctx
		done, err := s.cfg.Disagg.Prefill(ctx, tenant, req)
		return prefillAnswerOf(done), err
	})
}

type outcome struct {
	done any
	err  error
}

// stream answers with server-sent events: those that work tells of, then what
// it returns, then "[DONE]". What goes wrong before the first event has a
// status of its own; later it is an event "error".
func (s *Server) stream(ctx context.Context, stop func(), c *fasthttp.RequestCtx, work func(event func(v any) error) (any, error)) {
	events, end := make(chan any), make(chan outcome, 1)
	s.inFlight.Add(1) // beyond the handler, until the stream has ended
	s.wg.Go(func() {
		defer s.inFlight.Add(-1)
		done, err := work(func(v any) error {
			select {
			case events <- v:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		end <- outcome{done, err}
		close(events)
	})
	first, more := <-events
	if !more { // no event at all: an error, or a stop token at once
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
	all := func(w *bufio.Writer) {
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
		for v := first; more; v, more = <-events {
			if ok && !send("", v) {
				ok = false
				stop() // and wait for the work to notice
			}
		}
		switch o := <-end; {
		case !ok:
		case o.err != nil:
			send("event: error\n", problemOf(o.err))
		case send("", o.done):
			_, _ = w.WriteString("data: [DONE]\n\n")
		}
	}
	if c.Request.Header.IsHTTP11() {
		c.SetBodyStreamWriter(all)
		return
	}
	// HTTP/1.0 has no chunks: such a client gets all events at the end.
	var b bytes.Buffer
	w := bufio.NewWriter(&b)
	all(w)
	_ = w.Flush()
	c.Response.SetBodyRaw(b.Bytes())
}

func problemOf(err error) problem {
	if e, ok := asDisagg(err); ok {
		return problem{e.Code(), e.Field, e.Message}
	}
	return problem{"internal", "", "the sidecar failed; its log has the request id"}
}
