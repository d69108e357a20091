package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// streamed is what an OpenAI-compatible server streamed back for one prompt.
type streamed struct {
	// tokens has ids only where the server gives them.
	tokens []uint32
	// arrivals has the moment of every token, those of one chunk the same.
	arrivals []time.Time
	// prompt and cached are the server's counts of the prompt's tokens, cached
	// those that it says it did not compute.
	prompt, cached int
	// reuse is zero but for an embedded engine.
	reuse reuse
}

// reuse is what an embedded engine says of the cache.
type reuse struct {
	Tokens    int     `json:"reused_tokens"`
	PeerPages int     `json:"peer_pages"`
	Reason    string  `json:"miss_reason"`
	LoadMS    float64 `json:"load_ms"`
}

// completionBody is the body of POST /v1/completions. Fields that a server
// does not know are ignored by the usual ones.
type completionBody struct {
	Model           string         `json:"model"`
	Prompt          []uint32       `json:"prompt"`
	MaxTokens       int            `json:"max_tokens"`
	Temperature     float64        `json:"temperature"`
	Stream          bool           `json:"stream"`
	StreamOptions   map[string]any `json:"stream_options"`
	IgnoreEOS       bool           `json:"ignore_eos"`
	ReturnTokenIDs  bool           `json:"return_token_ids"`
	CacheSalt       string         `json:"cache_salt,omitempty"`
	KVTransferParam map[string]any `json:"kv_transfer_params,omitempty"`
}

// newCompletion returns a greedy request for exactly maxTokens tokens,
// streamed.
func newCompletion(model string, prompt []uint32, maxTokens int) completionBody {
	return completionBody{
		Model: model, Prompt: prompt, MaxTokens: maxTokens, Stream: true, IgnoreEOS: true, ReturnTokenIDs: true,
		StreamOptions: map[string]any{"include_usage": true},
	}
}

// maxEvent is the longest line of a stream that is taken.
const maxEvent = 1 << 20

// streamCompletion sends a request to the server at base (http://HOST:PORT)
// and reads the stream to its end. What had arrived before an error is
// returned with it.
func streamCompletion(ctx context.Context, client *http.Client, base, key string, body completionBody) (streamed, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return streamed{}, fmt.Errorf("cannot encode a prompt: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/completions", bytes.NewReader(b))
	if err != nil {
		return streamed{}, fmt.Errorf("cannot make a request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := client.Do(req)
	if err != nil {
		return streamed{}, fmt.Errorf("cannot complete: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return streamed{}, fmt.Errorf("cannot complete: status %d: %s", resp.StatusCode, text)
	}
	return readEvents(resp.Body, time.Now)
}

// event is one chunk of a stream.
type event struct {
	Choices []struct {
		Text     string   `json:"text"`
		TokenIDs []uint32 `json:"token_ids"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens int `json:"prompt_tokens"`
		Details      *struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
	Membrane *reuse `json:"membrane"`
}

func readEvents(r io.Reader, now func() time.Time) (streamed, error) {
	var s streamed
	scan := bufio.NewScanner(r)
	scan.Buffer(nil, maxEvent)
	for scan.Scan() {
		at := now()
		data, ok := strings.CutPrefix(scan.Text(), "data:")
		if !ok {
			continue
		}
		data = strings.TrimSpace(data)
		if data == "[DONE]" {
			return s, nil
		}
		var e event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return s, fmt.Errorf("cannot decode a chunk: %w", err)
		}
		if e.Error != nil {
			return s, fmt.Errorf("cannot complete: %s", e.Error.Message)
		}
		s.add(e, at)
	}
	return s, errors.Join(errors.New("the stream ended without [DONE]"), scan.Err())
}

// add counts an event's tokens: its ids, or one for a text of a server that
// gives none.
func (s *streamed) add(e event, at time.Time) {
	for _, c := range e.Choices {
		n := len(c.TokenIDs)
		if n == 0 && c.Text != "" {
			n = 1
		}
		s.tokens = append(s.tokens, c.TokenIDs...)
		for range n {
			s.arrivals = append(s.arrivals, at)
		}
	}
	if e.Usage != nil {
		s.prompt = e.Usage.PromptTokens
		if e.Usage.Details != nil {
			s.cached = e.Usage.Details.CachedTokens
		}
	}
	if e.Membrane != nil {
		s.reuse = *e.Membrane
	}
}
