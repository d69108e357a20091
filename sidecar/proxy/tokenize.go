package proxy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"membrane/kvwire"
)

// tokenizer asks the engine for a prompt's tokens.
type tokenizer struct {
	url     string
	client  *http.Client
	count   *counters
	recall  *recall
	noneTil atomic.Int64 // Unix nanoseconds; until then the engine has no such route
}

// noneFor is how long an engine that has no /tokenize is not asked again.
const noneFor = time.Minute

// tokenizeFields are those of a completion or chat request that /tokenize takes
// and that change what it answers.
var tokenizeFields = [2][]string{
	completions: {"model", "prompt", "add_special_tokens"},
	chat: {
		"model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
		"add_special_tokens", "mm_processor_kwargs",
	},
}

// tokens returns the tokens of a request's prompt, or false when the engine
// does not say in time. authorization is passed on.
func (t *tokenizer) tokens(ctx context.Context, r *request, timeout time.Duration, authorization []string) ([]uint32, bool) {
	var b bytes.Buffer
	b.WriteByte('{')
	for _, name := range tokenizeFields[r.route] {
		if v := r.body.get(name); v.Exists() {
			if b.Len() > 1 {
				b.WriteByte(',')
			}
			b.WriteString(`"` + name + `":` + v.Raw)
		}
	}
	b.WriteByte('}')
	key := sha256.Sum256(b.Bytes())
	if tokens, ok := t.recall.get(key); ok {
		t.count.tokenize["remembered"].Inc()
		return tokens, true
	}
	if time.Now().UnixNano() < t.noneTil.Load() {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tokens, how := t.ask(ctx, b.Bytes(), authorization)
	t.count.tokenize[how].Inc()
	if how != "engine" {
		return nil, false
	}
	t.recall.put(key, tokens)
	return tokens, true
}

func (t *tokenizer) ask(ctx context.Context, body []byte, authorization []string) (tokens []uint32, how string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url, bytes.NewReader(body))
	if err != nil {
		return nil, "error"
	}
	req.Header.Set("Content-Type", "application/json")
	if authorization != nil {
		req.Header["Authorization"] = authorization
	}
	res, err := t.client.Do(req)
	if err != nil {
		return nil, failedBy(err)
	}
	defer func() { _ = res.Body.Close() }()
	switch res.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		t.noneTil.Store(time.Now().Add(noneFor).UnixNano())
		return nil, "none"
	default:
		return nil, "error"
	}
	answer, err := io.ReadAll(io.LimitReader(res.Body, MaxTokenizeAnswer+1))
	if err != nil {
		return nil, failedBy(err)
	}
	tokens, ok := parseTokenized(answer)
	if !ok {
		return nil, "error"
	}
	return tokens, "engine"
}

func failedBy(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "timeout"
	}
	return "error"
}

// parseTokenized reads the answer of /tokenize.
func parseTokenized(answer []byte) ([]uint32, bool) {
	if len(answer) > MaxTokenizeAnswer || !valid(string(answer)) {
		return nil, false
	}
	list := gjson.GetBytes(answer, "tokens")
	if !list.IsArray() {
		return nil, false
	}
	tokens, ok := parseIDs(list.Raw)
	if !ok || len(tokens) > kvwire.MaxTokens {
		return nil, false
	}
	return tokens, true
}
