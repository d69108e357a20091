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

// pdModel is the embedded engine's; any name would do.
const pdModel = "llama-3-8b"

// pdClient asks sidecars for the two halves of a request.
type pdClient struct{ http *http.Client }

func newPDClient() pdClient {
	return pdClient{&http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true, IdleConnTimeout: 5 * time.Second}}}
}

func (c pdClient) close() { c.http.CloseIdleConnections() }

// pdEvent has the fields of the events that are looked at.
type pdEvent struct {
	Handle     string  `json:"kv_handle"`
	ExpiresAt  string  `json:"expires_at"`
	Token      *uint32 `json:"token_id"`
	Recomputed int     `json:"recomputed_tokens"`
	Pulled     int     `json:"pulled_tokens"`
}

var errStreamEnded = errors.New("the stream ended before its end")

// stream posts a request and calls each with every event; an error of each's
// ends it, and the connection.
func (c pdClient) stream(ctx context.Context, addr, path string, body map[string]any, each func(pdEvent) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // an answer that is not read to its end is given up
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	res, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(res.Body, 4<<10))
		return fmt.Errorf("%s: status %d: %s", path, res.StatusCode, bytes.TrimSpace(text))
	}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case lines.Text() == "event: error":
			return fmt.Errorf("%s: an error in the stream", path)
		case !ok:
			continue
		case data == "[DONE]":
			return nil
		}
		var e pdEvent
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return fmt.Errorf("%s: cannot decode an event: %w", path, err)
		}
		if err := each(e); err != nil {
			return err
		}
	}
	return errors.Join(errStreamEnded, lines.Err())
}

// prefill computes a prompt and returns its handle and when the answer came.
// begun, which may be nil, is called with the handle when the prefill begins.
func (c pdClient) prefill(ctx context.Context, addr string, tokens []int, begun func(handle string)) (handle string, end time.Time, err error) {
	err = c.stream(ctx, addr, "/disagg/prefill", map[string]any{"request_id": "bench", "model_id": pdModel, "token_ids": tokens, "stream": true}, func(e pdEvent) error {
		if handle == "" && begun != nil {
			begun(e.Handle)
		}
		handle, end = e.Handle, time.Now()
		return nil
	})
	return handle, end, err
}

// decoding is what a decode gave.
type decoding struct {
	arrivals           []time.Time // of the tokens
	pulled, recomputed int
	err                error
}

func (c pdClient) decode(ctx context.Context, addr, handle string, n int) (d decoding) {
	d.err = c.stream(ctx, addr, "/disagg/decode", map[string]any{"request_id": "bench", "model_id": pdModel, "kv_handle": handle, "max_tokens": n, "stream": true}, func(e pdEvent) error {
		if e.Token != nil {
			d.arrivals = append(d.arrivals, time.Now())
		} else {
			d.pulled, d.recomputed = e.Pulled, e.Recomputed
		}
		return nil
	})
	if d.err == nil && len(d.arrivals) == 0 {
		d.err = errNoToken
	}
	return d
}

// both prefills at one address and decodes at another. With early, the decode
// is asked as soon as the handle is known, else when the prefill has ended.
func (c pdClient) both(ctx context.Context, prefill, decode string, tokens []int, n int, early bool) (end time.Time, d decoding, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan decoding, 1)
	var begun func(string)
	if early {
		begun = func(handle string) { go func() { done <- c.decode(ctx, decode, handle, n) }() }
	}
	handle, end, err := c.prefill(ctx, prefill, tokens, begun)
	switch {
	case err != nil && handle == "":
		return end, d, err
	case !early:
		if err == nil {
			d = c.decode(ctx, decode, handle, n)
		}
	default:
		if err != nil {
			cancel()
		}
		d = <-done
	}
	return end, d, errors.Join(err, d.err)
}
