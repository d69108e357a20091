package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"
)

// httpConn asks for fragments' metadata over one keep-alive connection. A key
// is the number of a fragment; values have no bytes.
type httpConn struct {
	*link
	requests [][]byte
	want     [][]byte // what each body must contain, nil: nothing
	body     []byte
}

// dialHTTP connects to an HTTP server. Each hash is a fragment that it must
// find; without hashes it is asked for something and may answer anything.
func dialHTTP(ctx context.Context, addr string, hashes []string) (*httpConn, error) {
	l, err := dialLink(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &httpConn{link: l}
	for _, h := range hashes {
		c.requests = append(c.requests, retrieveRequest(addr, h))
		c.want = append(c.want, []byte(h))
	}
	if len(hashes) == 0 {
		c.requests, c.want = [][]byte{retrieveRequest(addr, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")}, [][]byte{nil}
	}
	return c, nil
}

func retrieveRequest(addr, hash string) []byte {
	return fmt.Appendf(nil, "GET /retrieve?content_hash=%s HTTP/1.1\r\nHost: %s\r\n\r\n", hash, addr)
}

// Get asks for one fragment after the other.
func (c *httpConn) Get(first int, dst [][]byte, got []bool) error {
	for i := range dst {
		k := (first + i) % len(c.requests)
		c.begin()
		c.out = append(c.out, c.requests[k]...)
		if err := c.flush(); err != nil {
			return err
		}
		if err := c.answer(); err != nil {
			return err
		}
		if !bytes.Contains(c.body, c.want[k]) {
			return fmt.Errorf("fragment %s is not in the answer %q", c.want[k], c.body)
		}
		got[i] = true
	}
	return nil
}

// answer reads one answer into body: status 200 with a length.
func (c *httpConn) answer() error {
	length, first := -1, true
	for {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		line = bytes.TrimRight(line, "\r\n")
		if first {
			if !bytes.HasPrefix(line, []byte("HTTP/1.1 200")) {
				return fmt.Errorf("the server answers %q", line)
			}
			first = false
			continue
		}
		if len(line) == 0 {
			break
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		if bytes.EqualFold(name, []byte("content-length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return fmt.Errorf("the server answers %q", line)
			}
		}
	}
	if length < 0 || length > 1<<20 {
		return fmt.Errorf("the server answers with a body of %d bytes", length)
	}
	if cap(c.body) < length {
		c.body = make([]byte, length)
	}
	c.body = c.body[:length]
	return c.full(c.body)
}

// Set is not for this route.
func (*httpConn) Set(int, [][]byte) error { return errNoBytes }

// Drop is not for this route.
func (*httpConn) Drop(int, int) error { return errNoBytes }

// Each of fragmentCount prompts is one fragment.
const (
	fragmentCount  = 8
	fragmentTokens = 128
)

// prefill has a server compute fragments and returns their hashes.
func prefill(ctx context.Context, addr string) ([]string, error) {
	var hashes []string
	for i := range fragmentCount {
		h, err := prefillPrompt(ctx, addr, i)
		if err != nil {
			return nil, err
		}
		hashes = append(hashes, h...)
	}
	return hashes, nil
}

func prefillPrompt(ctx context.Context, addr string, seed int) ([]string, error) {
	tokens := make([]int, fragmentTokens)
	for i := range tokens {
		tokens[i] = (seed*fragmentTokens + i) % 1000
	}
	body, err := json.Marshal(map[string]any{"prompt_tokens": tokens, "model_id": "bench-peers"})
	if err != nil {
		return nil, err
	}
	req, resp := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
	defer fasthttp.ReleaseRequest(req)
	defer fasthttp.ReleaseResponse(resp)
	req.SetRequestURI("http://" + addr + "/prefill")
	req.Header.SetMethod(fasthttp.MethodPost)
	req.Header.SetContentType("application/json")
	req.SetBody(body)
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(ioTime)
	}
	if err := fasthttp.DoDeadline(req, resp, deadline); err != nil {
		return nil, fmt.Errorf("cannot prefill at %q: %w", addr, err)
	}
	var answer struct {
		Fragments []struct {
			Identity struct {
				PayloadHash string `json:"payload_hash"`
			} `json:"identity"`
			PayloadRef  string `json:"payload_ref"`
			ContentHash string `json:"content_hash"`
		} `json:"fragments"`
	}
	if err := json.Unmarshal(resp.Body(), &answer); err != nil || resp.StatusCode() != fasthttp.StatusOK {
		return nil, fmt.Errorf("cannot prefill at %q: status %d: %.200s", addr, resp.StatusCode(), resp.Body())
	}
	var hashes []string
	for _, f := range answer.Fragments {
		hashes = append(hashes, f.Identity.PayloadHash)
	}
	if len(hashes) == 0 {
		return nil, errors.New("the prefill made no fragments")
	}
	return hashes, nil
}
