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

// answer is what an engine streamed back for one prompt.
type answer struct {
	tokens []uint32
	// firstToken is the time from sending the request to the first token's
	// arrival here.
	firstToken time.Duration
	// reused is what the engine says of its prompt.
	reused    int
	peerPages int // of what was reused, from other sidecars for this request
	reason    string
	// load is how long the engine waited for its sidecar before it computed.
	load time.Duration
}

// complete sends a prompt to an engine's completion API and reads the stream
// to its end.
func complete(ctx context.Context, client *http.Client, addr string, prompt []uint32, maxTokens int) (answer, error) {
	body, err := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": maxTokens, "stream": true})
	if err != nil {
		return answer{}, fmt.Errorf("cannot encode a prompt: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return answer{}, fmt.Errorf("cannot make a request: %w", err)
	}
	begin := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, fmt.Errorf("cannot complete: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return answer{}, fmt.Errorf("cannot complete: status %d: %s", resp.StatusCode, text)
	}
	return readStream(resp.Body, begin)
}

func readStream(r io.Reader, begin time.Time) (answer, error) {
	var a answer
	scan := bufio.NewScanner(r)
	for scan.Scan() {
		data, ok := strings.CutPrefix(scan.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return a, nil
		}
		var chunk struct {
			Choices []struct {
				TokenIDs []uint32 `json:"token_ids"`
			} `json:"choices"`
			Error    *struct{ Message string } `json:"error"`
			Membrane *struct {
				Reused    int     `json:"reused_tokens"`
				PeerPages int     `json:"peer_pages"`
				Reason    string  `json:"miss_reason"`
				LoadMS    float64 `json:"load_ms"`
			} `json:"membrane"`
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return a, fmt.Errorf("cannot decode a chunk: %w", err)
		}
		if chunk.Error != nil {
			return a, fmt.Errorf("cannot complete: %s", chunk.Error.Message)
		}
		for _, c := range chunk.Choices {
			if len(a.tokens) == 0 && len(c.TokenIDs) > 0 {
				a.firstToken = time.Since(begin)
			}
			a.tokens = append(a.tokens, c.TokenIDs...)
		}
		if chunk.Membrane != nil {
			a.reused, a.peerPages, a.reason = chunk.Membrane.Reused, chunk.Membrane.PeerPages, chunk.Membrane.Reason
			a.load = time.Duration(chunk.Membrane.LoadMS * float64(time.Millisecond))
		}
	}
	return a, errors.Join(errors.New("the stream ended without [DONE]"), scan.Err())
}
