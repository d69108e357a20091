package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/fasthttp/router"
	"github.com/valyala/fasthttp"

	"membrane/engines/hangup"
	"membrane/kvwire"
)

// Server is the engine's HTTP listener: a small part of OpenAI's API, with
// token ids for text.
//
//	POST /v1/completions  {prompt: [ids] or text, max_tokens, stream, cache_salt, logprobs}
//	GET  /v1/models
//	GET  /health
//
// With logprobs, any number, an answer that is not streamed has the
// log-probability of each token of its own. Text is taken as its UTF-8 bytes, one token each. [WithOpenAI] adds chat and
// /tokenize. A client that goes away ends its request.
type Server struct {
	engine *Engine
	openAI bool
	http   *fasthttp.Server
	ctx    context.Context
	cancel context.CancelFunc
}

const maxRequestBody = 16 << 20

// NewServer returns a server for the engine. The caller closes both.
func NewServer(e *Engine, opts ...ServerOption) *Server {
	s := &Server{engine: e}
	for _, o := range opts {
		o(s)
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	r := router.New()
	r.POST("/v1/completions", s.completions)
	r.GET("/v1/models", s.models)
	if s.openAI {
		r.POST("/v1/chat/completions", s.chat)
		r.POST("/tokenize", s.tokenize)
	}
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
	Model               string          `json:"model"`
	Prompt              json.RawMessage `json:"prompt"`
	Messages            []message       `json:"messages"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           int             `json:"min_tokens"`
	Stream              bool            `json:"stream"`
	StreamOptions       json.RawMessage `json:"stream_options"`
	CacheSalt           *string         `json:"cache_salt"`
	Logprobs            json.RawMessage `json:"logprobs"` // a number; for chat true or false
}

type choice struct {
	Index        int       `json:"index"`
	Text         string    `json:"text"`
	TokenIDs     []uint32  `json:"token_ids"`
	Logprobs     *logprobs `json:"logprobs,omitempty"`
	FinishReason *string   `json:"finish_reason"`
}

type logprobs struct {
	TokenLogprobs []float64 `json:"token_logprobs"`
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
	run, stop := hangup.Watch(s.ctx, ctx.Conn())
	defer stop()
	res, err := s.engine.Complete(run, req, nil)
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
	c.Messages, c.MaxCompletionTokens = nil, nil
	req, err := s.request(c)
	req.Logprobs = !c.Stream && len(c.Logprobs) > 0 && string(c.Logprobs) != "null"
	return req, c.Stream, err
}

// promptTokens returns the tokens of a prompt or of messages.
func promptTokens(c completionRequest) ([]uint32, error) {
	if c.Prompt == nil {
		if c.Messages == nil {
			return nil, errors.New("prompt: is missing")
		}
		return render(c.Messages)
	}
	var text string
	var ids []int64
	switch {
	case json.Unmarshal(c.Prompt, &text) == nil:
		return bytesOf(text), nil
	case json.Unmarshal(c.Prompt, &ids) == nil:
		if _, err := kvwire.CheckTokens("prompt", ids); err != nil {
			return nil, err
		}
		out := make([]uint32, len(ids))
		for i, id := range ids {
			out[i] = uint32(id)
		}
		return out, nil
	}
	return nil, errors.New("prompt: neither a text nor a list of token ids")
}

// request checks what is common to completions and chat.
func (s *Server) request(c completionRequest) (Request, error) {
	req := Request{MaxTokens: 16, CacheSalt: c.CacheSalt}
	for _, n := range []*int{c.MaxTokens, c.MaxCompletionTokens} {
		if n != nil {
			req.MaxTokens = *n
		}
	}
	var err error
	if req.Tokens, err = promptTokens(c); err != nil {
		return Request{}, err
	}
	if s.openAI {
		if err := checkOptions(c, req.MaxTokens); err != nil {
			return Request{}, err
		}
	}
	limit := s.engine.Model().Config().MaxPositions
	switch {
	case len(req.Tokens) == 0:
		return Request{}, errors.New("prompt: has no tokens")
	case req.MaxTokens < 1 || req.MaxTokens > limit:
		return Request{}, fmt.Errorf("max_tokens: %d is not between 1 and %d", req.MaxTokens, limit)
	case len(req.Tokens)+req.MaxTokens > limit:
		return Request{}, fmt.Errorf("prompt: %d tokens and max_tokens %d are more than the model's %d positions", len(req.Tokens), req.MaxTokens, limit)
	case c.CacheSalt != nil && len(*c.CacheSalt) > kvwire.MaxSalt:
		return Request{}, fmt.Errorf("cache_salt: %d bytes are more than %d", len(*c.CacheSalt), kvwire.MaxSalt)
	}
	return req, nil
}

func (s *Server) whole(id string, req Request, res Result) completion {
	reason := "length"
	out := completion{
		ID: id, Object: "text_completion", Model: s.engine.Model().ID(),
		Choices: []choice{{TokenIDs: res.Tokens, Text: text(res.Tokens), FinishReason: &reason}},
	}
	if req.Logprobs {
		out.Choices[0].Logprobs = &logprobs{res.Logprobs}
	}
	s.finish(&out, req, res)
	return out
}

func (s *Server) finish(out *completion, req Request, res Result) {
	out.Usage, out.Membrane = s.account(req, res)
}

func (s *Server) account(req Request, res Result) (*usage, *reuse) {
	u := &usage{PromptTokens: len(req.Tokens), CompletionTokens: len(res.Tokens), TotalTokens: len(req.Tokens) + len(res.Tokens)}
	u.Details.CachedTokens = res.Reused
	return u, &reuse{
		ReusedTokens: res.Reused, PeerPages: res.FromPeers, StoredPages: res.Stored, MissReason: res.Reason.String(),
		LoadMS: millis(res.Load), FirstTokenMS: millis(res.FirstToken),
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (s *Server) stream(ctx *fasthttp.RequestCtx, id string, req Request) {
	ctx.SetContentType("text/event-stream")
	run, stop := hangup.Watch(s.ctx, ctx.Conn())
	ctx.SetBodyStreamWriter(func(w *bufio.Writer) {
		defer stop()
		chunk := completion{ID: id, Object: "text_completion", Model: s.engine.Model().ID()}
		res, err := s.engine.Complete(run, req, func(t uint32) bool {
			chunk.Choices = []choice{{TokenIDs: []uint32{t}, Text: text([]uint32{t})}}
			return event(w, chunk)
		})
		if err != nil {
			event(w, map[string]any{"error": map[string]string{"message": err.Error()}})
			return
		}
		reason := "length"
		chunk.Choices = []choice{{TokenIDs: []uint32{}, FinishReason: &reason}}
		s.finish(&chunk, req, res)
		if event(w, chunk) {
			_, _ = w.WriteString("data: [DONE]\n\n")
		}
	})
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
