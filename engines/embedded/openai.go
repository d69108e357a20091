package embedded

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/engines/hangup"
)

// The byte-level tokenizer of [WithOpenAI] has 512 entries: the 256
// bytes, then the marks of the chat template, then ids without a text.
const (
	tokenBegin   = 256 // of a message
	tokenEnd     = 257 // of a message
	maxMessages  = 4096
	assistant    = "assistant"
	chatObject   = "chat.completion"
	chunkObject  = "chat.completion.chunk"
	eventStream  = "text/event-stream"
	jsonContent  = "application/json"
	lengthReason = "length"
)

// ServerOption changes what a [Server] answers.
type ServerOption func(*Server)

// WithOpenAI adds POST /v1/chat/completions and POST /tokenize, with a
// byte-level tokenizer and a chat template of its own, and the checks of vLLM
// on stream_options and min_tokens.
func WithOpenAI() ServerOption { return func(s *Server) { s.openAI = true } }

// message is one of a chat; its content is a text or a list of text parts.
type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

type part struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

func bytesOf(text string) []uint32 {
	out := make([]uint32, len(text))
	for i := range len(text) {
		out[i] = uint32(text[i])
	}
	return out
}

// render applies the chat template.
func render(messages []message) ([]uint32, error) {
	if len(messages) == 0 || len(messages) > maxMessages {
		return nil, fmt.Errorf("messages: %d are not 1 to %d", len(messages), maxMessages)
	}
	var out []uint32
	for i, m := range messages {
		var text string
		if err := json.Unmarshal(m.Content, &text); err != nil {
			var parts []part
			if err := json.Unmarshal(m.Content, &parts); err != nil {
				return nil, fmt.Errorf("messages[%d].content: neither a text nor a list of parts", i)
			}
			for _, p := range parts {
				if p.Type != "text" {
					return nil, fmt.Errorf("messages[%d].content: this model takes text only", i)
				}
				text += p.Text
			}
		}
		out = append(out, tokenBegin)
		out = append(out, bytesOf(m.Role+"\n"+text)...)
		out = append(out, tokenEnd, '\n')
	}
	out = append(out, tokenBegin)
	return append(out, bytesOf(assistant+"\n")...), nil
}

// checkOptions refuses what vLLM refuses.
func checkOptions(c completionRequest, maxTokens int) error {
	switch {
	case len(c.StreamOptions) > 0 && string(c.StreamOptions) != "null" && !c.Stream:
		return errors.New("stream_options: only allowed with stream")
	case c.MinTokens > maxTokens:
		return fmt.Errorf("min_tokens: %d is more than max_tokens %d", c.MinTokens, maxTokens)
	}
	return nil
}

type delta struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

type chatChoice struct {
	Index        int      `json:"index"`
	Message      *delta   `json:"message,omitempty"`
	Delta        *delta   `json:"delta,omitempty"`
	TokenIDs     []uint32 `json:"token_ids"`
	FinishReason *string  `json:"finish_reason"`
}

type chatCompletion struct {
	ID       string       `json:"id"`
	Object   string       `json:"object"`
	Created  int64        `json:"created"`
	Model    string       `json:"model"`
	Choices  []chatChoice `json:"choices"`
	Usage    *usage       `json:"usage,omitempty"`
	Membrane *reuse       `json:"membrane,omitempty"`
}

func (s *Server) chat(ctx *fasthttp.RequestCtx) {
	var c completionRequest
	req, err := Request{}, json.Unmarshal(ctx.PostBody(), &c)
	if err == nil {
		c.Prompt = nil
		req, err = s.request(c)
	}
	if err != nil {
		fail(ctx, fasthttp.StatusBadRequest, err)
		return
	}
	out := chatCompletion{ID: fmt.Sprintf("chatcmpl-%x", ctx.ID()), Object: chatObject, Created: time.Now().Unix(), Model: s.engine.Model().ID()}
	run, stop := hangup.Watch(s.ctx, ctx.Conn())
	reason := lengthReason
	if !c.Stream {
		defer stop()
		res, err := s.engine.Complete(run, req, nil)
		if err != nil {
			fail(ctx, statusOf(err), err)
			return
		}
		out.Choices = []chatChoice{{Message: &delta{assistant, text(res.Tokens)}, TokenIDs: res.Tokens, FinishReason: &reason}}
		out.Usage, out.Membrane = s.account(req, res)
		ctx.SetContentType(jsonContent)
		_ = json.NewEncoder(ctx).Encode(out)
		return
	}
	out.Object = chunkObject
	ctx.SetContentType(eventStream)
	ctx.SetBodyStreamWriter(func(w *bufio.Writer) {
		defer stop()
		out.Choices = []chatChoice{{Delta: &delta{Role: assistant}, TokenIDs: []uint32{}}}
		if !event(w, out) {
			return
		}
		res, err := s.engine.Complete(run, req, func(t uint32) bool {
			out.Choices = []chatChoice{{Delta: &delta{Content: text([]uint32{t})}, TokenIDs: []uint32{t}}}
			return event(w, out)
		})
		if err != nil {
			event(w, map[string]any{"error": map[string]string{"message": err.Error()}})
			return
		}
		out.Choices = []chatChoice{{Delta: &delta{}, TokenIDs: []uint32{}, FinishReason: &reason}}
		out.Usage, out.Membrane = s.account(req, res)
		if event(w, out) {
			_, _ = w.WriteString("data: [DONE]\n\n")
		}
	})
}

// event sends one server-sent event and reports whether the client took it.
func event(w *bufio.Writer, v any) bool {
	b, err := json.Marshal(v)
	if err != nil {
		return false
	}
	_, _ = fmt.Fprintf(w, "data: %s\n\n", b)
	return w.Flush() == nil
}

// tokenize answers vLLM's route of that name.
func (s *Server) tokenize(ctx *fasthttp.RequestCtx) {
	var c completionRequest
	if err := json.Unmarshal(ctx.PostBody(), &c); err != nil {
		fail(ctx, fasthttp.StatusBadRequest, fmt.Errorf("the body is not a request to tokenize: %w", err))
		return
	}
	tokens, err := promptTokens(c)
	if err != nil {
		fail(ctx, fasthttp.StatusBadRequest, err)
		return
	}
	ctx.SetContentType(jsonContent)
	_ = json.NewEncoder(ctx).Encode(map[string]any{"count": len(tokens), "max_model_len": s.engine.Model().Config().MaxPositions, "tokens": tokens})
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
