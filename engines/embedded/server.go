package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/fasthttp/router"
	"github.com/valyala/fasthttp"

	"membrane/kvwire"
)

// Server is the engine's HTTP listener: a small part of OpenAI's API, with
// token ids for text.
//
//	POST /v1/completions  {prompt: [ids] or text, max_tokens, stream, cache_salt}
//	GET  /v1/models
//	GET  /health
//
// Text is taken as its UTF-8 bytes, one token each: the embedded model has no
// tokenizer.
type Server struct {
	engine *Engine
	http   *fasthttp.Server
	ctx    context.Context
	cancel context.CancelFunc
}

const maxRequestBody = 16 << 20

// NewServer returns a server for the engine. The caller closes both.
func NewServer(e *Engine) *Server {
	s := &Server{engine: e}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	r := router.New()
	r.POST("/v1/completions", s.completions)
	r.GET("/v1/models", s.models)
	r.GET("/health", func(ctx *fasthttp.RequestCtx) { ctx.SetBodyString("ok\n") })
	s.http = &fasthttp.Server{
		Handler: r.Handler, Name: "membrane-engine", MaxRequestBodySize: maxRequestBody,
		ReadTimeout: 30 * time.Second, IdleTimeout: time.Minute, CloseOnShutdown: true, NoDefaultDate: true,
	}
	return s
}

// Serve answers on l until Close.
func (s *Server) Serve(l net.Listener) error { return s.http.Serve(l) }

// Close ends requests under way and stops listening.
func (s *Server) Close() error {
	s.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	return s.http.ShutdownWithContext(ctx)
}

type completionRequest struct {
	Model     string          `json:"model"`
	Prompt    json.RawMessage `json:"prompt"`
	MaxTokens *int            `json:"max_tokens"`
	Stream    bool            `json:"stream"`
	CacheSalt *string         `json:"cache_salt"`
}

type choice struct {
	Index        int      `json:"index"`
	Text         string   `json:"text"`
	TokenIDs     []uint32 `json:"token_ids"`
	FinishReason *string  `json:"finish_reason"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	Details          struct {
		CachedTokens int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// reuse is what the engine says of the cache, beside OpenAI's fields.
type reuse struct {
	ReusedTokens int     `json:"reused_tokens"`
	PeerPages    int     `json:"peer_pages"`
	StoredPages  int     `json:"stored_pages"`
	MissReason   string  `json:"miss_reason"`
	LoadMS       float64 `json:"load_ms"`
	FirstTokenMS float64 `json:"first_token_ms"`
}

type completion struct {
	ID       string   `json:"id"`
	Object   string   `json:"object"`
	Model    string   `json:"model"`
	Choices  []choice `json:"choices"`
	Usage    *usage   `json:"usage,omitempty"`
	Membrane *reuse   `json:"membrane,omitempty"`
}

func (s *Server) completions(ctx *fasthttp.RequestCtx) {
	req, stream, err := s.parse(ctx.PostBody())
	if err != nil {
		fail(ctx, fasthttp.StatusBadRequest, err)
		return
	}
	ctx.SetContentType("application/json")
	id := fmt.Sprintf("cmpl-%x", ctx.ID())
	if stream {
		s.stream(ctx, id, req)
		return
	}
	res, err := s.engine.Complete(s.ctx, req, nil)
	if err != nil {
		fail(ctx, statusOf(err), err)
		return
	}
	_ = json.NewEncoder(ctx).Encode(s.whole(id, req, res))
}

func (s *Server) parse(body []byte) (Request, bool, error) {
	var c completionRequest
	if err := json.Unmarshal(body, &c); err != nil {
		return Request{}, false, fmt.Errorf("the body is not a completion request: %w", err)
	}
	req := Request{MaxTokens: 16, CacheSalt: c.CacheSalt}
	if c.MaxTokens != nil {
		req.MaxTokens = *c.MaxTokens
	}
	var text string
	var ids []int64
	switch {
	case json.Unmarshal(c.Prompt, &text) == nil:
		for _, b := range []byte(text) {
			req.Tokens = append(req.Tokens, uint32(b))
		}
	case json.Unmarshal(c.Prompt, &ids) == nil:
		if _, err := kvwire.CheckTokens("prompt", ids); err != nil {
			return Request{}, false, err
		}
		for _, id := range ids {
			req.Tokens = append(req.Tokens, uint32(id))
		}
	default:
		return Request{}, false, errors.New("prompt: neither a text nor a list of token ids")
	}
	limit := s.engine.Model().Config().MaxPositions
	switch {
	case len(req.Tokens) == 0:
		return Request{}, false, errors.New("prompt: has no tokens")
	case req.MaxTokens < 1 || req.MaxTokens > limit:
		return Request{}, false, fmt.Errorf("max_tokens: %d is not between 1 and %d", req.MaxTokens, limit)
	case len(req.Tokens)+req.MaxTokens > limit:
		return Request{}, false, fmt.Errorf("prompt: %d tokens and max_tokens %d are more than the model's %d positions", len(req.Tokens), req.MaxTokens, limit)
	case c.CacheSalt != nil && len(*c.CacheSalt) > kvwire.MaxSalt:
		return Request{}, false, fmt.Errorf("cache_salt: %d bytes are more than %d", len(*c.CacheSalt), kvwire.MaxSalt)
	}
	return req, c.Stream, nil
}

func (s *Server) whole(id string, req Request, res Result) completion {
	reason := "length"
	out := completion{
		ID: id, Object: "text_completion", Model: s.engine.Model().ID(),
		Choices: []choice{{TokenIDs: res.Tokens, Text: text(res.Tokens), FinishReason: &reason}},
	}
	s.finish(&out, req, res)
	return out
}

func (s *Server) finish(out *completion, req Request, res Result) {
	out.Usage = &usage{PromptTokens: len(req.Tokens), CompletionTokens: len(res.Tokens), TotalTokens: len(req.Tokens) + len(res.Tokens)}
	out.Usage.Details.CachedTokens = res.Reused
	out.Membrane = &reuse{
		ReusedTokens: res.Reused, PeerPages: res.FromPeers, StoredPages: res.Stored, MissReason: res.Reason.String(),
		LoadMS: millis(res.Load), FirstTokenMS: millis(res.FirstToken),
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (s *Server) stream(ctx *fasthttp.RequestCtx, id string, req Request) {
	ctx.SetContentType("text/event-stream")
	ctx.SetBodyStreamWriter(func(w *bufio.Writer) {
		send := func(v any) bool {
			b, err := json.Marshal(v)
			if err != nil {
				return false
			}
			_, _ = fmt.Fprintf(w, "data: %s\n\n", b)
			return w.Flush() == nil
		}
		chunk := completion{ID: id, Object: "text_completion", Model: s.engine.Model().ID()}
		res, err := s.engine.Complete(s.ctx, req, func(t uint32) bool {
			chunk.Choices = []choice{{TokenIDs: []uint32{t}, Text: text([]uint32{t})}}
			return send(chunk)
		})
		if err != nil {
			send(map[string]any{"error": map[string]string{"message": err.Error()}})
			return
		}
		reason := "length"
		chunk.Choices = []choice{{TokenIDs: []uint32{}, FinishReason: &reason}}
		s.finish(&chunk, req, res)
		if send(chunk) {
			_, _ = w.WriteString("data: [DONE]\n\n")
		}
	})
}

// text shows the tokens that are printable bytes and a dot for the others.
func text(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		if t >= 0x20 && t < 0x7F {
			b.WriteByte(byte(t))
		} else {
			b.WriteByte('.')
		}
	}
	return b.String()
}

func (s *Server) models(ctx *fasthttp.RequestCtx) {
	ctx.SetContentType("application/json")
	m := s.engine.Model()
	_ = json.NewEncoder(ctx).Encode(map[string]any{"object": "list", "data": []any{
		map[string]any{"id": m.ID(), "object": "model", "owned_by": "membrane", "max_model_len": m.Config().MaxPositions},
	}})
}

func statusOf(err error) int {
	switch {
	case errors.Is(err, ErrBusy):
		return fasthttp.StatusServiceUnavailable
	case errors.Is(err, context.Canceled):
		return fasthttp.StatusServiceUnavailable
	}
	return fasthttp.StatusBadRequest
}

func fail(ctx *fasthttp.RequestCtx, status int, err error) {
	ctx.Response.Reset()
	ctx.SetStatusCode(status)
	ctx.SetContentType("application/json")
	kind := "invalid_request_error"
	if status >= fasthttp.StatusInternalServerError {
		kind = "server_error"
		ctx.Response.Header.Set("Retry-After", "1")
	}
	_ = json.NewEncoder(ctx).Encode(map[string]any{"error": map[string]any{"message": err.Error(), "type": kind, "code": status}})
}
