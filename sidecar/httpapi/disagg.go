package httpapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/fasthttp/router"
	"github.com/valyala/fasthttp"

	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
)

// disaggRoutes adds prefill and decode on different nodes, and named bundles.
func (s *Server) disaggRoutes(r *router.Router) {
	r.GET("/disagg/healthz", s.wrap("disagg_healthz", 0, func(c *fasthttp.RequestCtx, _ auth.Identity) { answer(c, status{"ok"}) }))
	r.POST("/disagg/prefill", s.wrap("disagg_prefill", auth.ScopeWrite, s.disaggPrefill))
	r.POST("/disagg/prefill/batch", s.wrap("disagg_prefill_batch", auth.ScopeWrite, s.disaggBatch))
	r.POST("/disagg/decode", s.wrap("disagg_decode", auth.ScopeWrite, s.disaggDecode))
	// All of the rest of the path, so that a handle with a slash is told so.
	r.PUT("/kv/{handle:*}", s.wrap("kv_put", auth.ScopeWrite, s.putBundle))
	r.GET("/kv/{handle:*}", s.wrap("kv_get", auth.ScopeRead, s.getBundle))
	r.HEAD("/kv/{handle:*}", s.wrap("kv_head", auth.ScopeRead, s.headBundle))
}

type disaggPrefillRequest struct {
	RequestID       string  `json:"request_id"`
	Model           string  `json:"model_id"`
	Tokens          []int64 `json:"token_ids"`
	TypeIDs         []int64 `json:"token_type_ids"`
	MaxDecodeTokens int     `json:"max_decode_tokens"`
	Fingerprint     string  `json:"fingerprint"`
	DeadlineMS      *int64  `json:"deadline_ms"`
	Stream          bool    `json:"stream"`
}

func (r disaggPrefillRequest) request() disagg.PrefillRequest {
	return disagg.PrefillRequest{
		RequestID: r.RequestID, Model: r.Model, Tokens: r.Tokens, TypeIDs: r.TypeIDs, MaxDecodeTokens: r.MaxDecodeTokens,
		Fingerprint: r.Fingerprint, Deadline: deadline(r.DeadlineMS),
	}
}

// deadline returns a caller's deadline; what cannot be one becomes one that is
// refused.
func deadline(ms *int64) time.Duration {
	switch {
	case ms == nil:
		return 0
	case *ms < 1:
		return -1
	}
	return time.Duration(min(*ms, math.MaxInt32)) * time.Millisecond
}

type disaggPrefillAnswer struct {
	RequestID    string  `json:"request_id"`
	Handle       string  `json:"kv_handle"`
	PrefillMS    float64 `json:"prefill_ms"`
	PromptLen    int     `json:"prompt_len"`
	CachedPrefix int     `json:"cached_prefix_len"`
	ExpiresAt    string  `json:"expires_at"`
}

func prefillAnswerOf(p disagg.Prefilled) disaggPrefillAnswer {
	return disaggPrefillAnswer{p.RequestID, p.Handle, millis(p.Took), p.Tokens, p.Cached, rfc3339(p.Expires)}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func rfc3339(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z07:00") }

// decodeDisagg reads a request of these routes, whose mistakes are all 400.
func (s *Server) decodeDisagg(c *fasthttp.RequestCtx, v any) bool {
	ok := s.decode(c, v)
	if !ok && c.Response.StatusCode() == http.StatusUnprocessableEntity {
		c.Response.SetStatusCode(http.StatusBadRequest)
	}
	return ok
}

func (s *Server) disaggPrefill(c *fasthttp.RequestCtx, who auth.Identity) {
	var r disaggPrefillRequest
	if s.refuseDraining(c) || !s.decodeDisagg(c, &r) {
		return
	}
	ctx, stop := s.whileConnected(c)
	if r.Stream {
		s.streamPrefill(ctx, stop, c, who.Tenant, r.request())
		return
	}
	defer stop()
	got, err := s.cfg.Disagg.Prefill(ctx, who.Tenant, r.request())
	if err != nil {
		s.failDisagg(c, err)
		return
	}
	answer(c, prefillAnswerOf(got))
}

type disaggBatchRequest struct {
	Requests []disaggPrefillRequest `json:"requests"`
}

type disaggBatchAnswer struct {
	Responses []disaggPrefillAnswer `json:"responses"`
	ElapsedMS float64               `json:"elapsed_ms"`
}

func (s *Server) disaggBatch(c *fasthttp.RequestCtx, who auth.Identity) {
	began := time.Now()
	var r disaggBatchRequest
	if s.refuseDraining(c) || !s.decodeDisagg(c, &r) {
		return
	}
	batch := make([]disagg.PrefillRequest, len(r.Requests))
	for i := range r.Requests {
		if r.Requests[i].Stream {
			fail(c, http.StatusBadRequest, "bad_request", fmt.Sprintf("requests[%d].stream", i), "is for a single prefill: leave it out")
			return
		}
		batch[i] = r.Requests[i].request()
	}
	ctx, stop := s.whileConnected(c)
	defer stop()
	got, err := s.cfg.Disagg.PrefillBatch(ctx, who.Tenant, batch)
	if err != nil {
		s.failDisagg(c, err)
		return
	}
	out := disaggBatchAnswer{Responses: make([]disaggPrefillAnswer, len(got)), ElapsedMS: millis(time.Since(began))}
	for i := range got {
		out.Responses[i] = prefillAnswerOf(got[i])
	}
	answer(c, out)
}

type disaggDecodeRequest struct {
	RequestID   string   `json:"request_id"`
	Handle      string   `json:"kv_handle"`
	Model       string   `json:"model_id"`
	MaxTokens   *int     `json:"max_tokens"`
	Stream      bool     `json:"stream"`
	Temperature float64  `json:"temperature"`
	TopP        *float64 `json:"top_p"`
	Seed        *int64   `json:"seed"`
	Stop        []int64  `json:"stop_token_ids"`
	DeadlineMS  *int64   `json:"deadline_ms"`
}

func (r disaggDecodeRequest) request() (disagg.DecodeRequest, error) {
	out := disagg.DecodeRequest{
		RequestID: r.RequestID, Handle: r.Handle, Model: r.Model, Deadline: deadline(r.DeadlineMS),
		Sampling: disagg.Sampling{Temperature: r.Temperature, Seed: r.Seed},
	}
	if r.MaxTokens != nil {
		if out.MaxTokens = *r.MaxTokens; out.MaxTokens == 0 {
			return out, disagg.ZeroMaxTokens()
		}
	}
	if r.TopP != nil {
		if out.Sampling.TopP = *r.TopP; *r.TopP == 0 {
			return out, disagg.ZeroTopP()
		}
	}
	var err error
	out.Sampling.Stop, err = disagg.StopTokens(r.Stop)
	return out, err
}

type disaggDecodeAnswer struct {
	RequestID    string   `json:"request_id"`
	Tokens       []uint32 `json:"token_ids"`
	Finished     bool     `json:"finished"`
	FinishReason string   `json:"finish_reason"`
	PromptLen    int      `json:"prompt_len"`
	Pulled       int      `json:"pulled_tokens"`
	Recomputed   int      `json:"recomputed_tokens"`
	ExpiresAt    string   `json:"expires_at"`
}

func decodeAnswerOf(d disagg.Decoded) disaggDecodeAnswer {
	return disaggDecodeAnswer{d.RequestID, d.Tokens, d.Finished, string(d.Reason), d.Prompt, d.Pulled, d.Recomputed, rfc3339(d.Expires)}
}

func (s *Server) disaggDecode(c *fasthttp.RequestCtx, who auth.Identity) {
	var r disaggDecodeRequest
	if s.refuseDraining(c) || !s.decodeDisagg(c, &r) {
		return
	}
	req, err := r.request()
	if err != nil {
		s.failDisagg(c, err)
		return
	}
	ctx, stop := s.whileConnected(c)
	if r.Stream {
		s.streamDecode(ctx, stop, c, who.Tenant, req)
		return
	}
	defer stop()
	got, err := s.cfg.Disagg.Decode(ctx, who.Tenant, req, nil)
	if err != nil {
		s.failDisagg(c, err)
		return
	}
	answer(c, decodeAnswerOf(got))
}

// statusClientGone is nginx's status for a client that did not wait; only
// metrics and logs see it.
const statusClientGone = 499

var disaggStatus = map[disagg.Kind]int{
	disagg.Malformed: http.StatusBadRequest, disagg.NotFound: http.StatusNotFound, disagg.WrongRole: http.StatusConflict,
	disagg.Late: http.StatusGatewayTimeout, disagg.TooLarge: http.StatusRequestEntityTooLarge, disagg.Gone: statusClientGone,
}

func (s *Server) failDisagg(c *fasthttp.RequestCtx, err error) {
	var e *disagg.Error
	switch {
	case !errors.As(err, &e):
		s.failWith(c, err)
	case e.Kind == disagg.Busy:
		unavailable(c, e.Code(), e.Message, e.RetryAfter)
	default:
		fail(c, disaggStatus[e.Kind], e.Code(), e.Field, e.Message)
	}
}

func bundleName(c *fasthttp.RequestCtx) (model, name string) {
	name, _ = c.UserValue("handle").(string)
	model = defaultModel
	if v := c.QueryArgs().Peek("model_id"); v != nil {
		model = string(v)
	}
	return model, name
}

type bundleAnswer struct {
	ContentHash string `json:"content_hash"`
}

func (s *Server) putBundle(c *fasthttp.RequestCtx, who auth.Identity) {
	if s.refuseDraining(c) {
		c.SetConnectionClose() // the body may still come
		return
	}
	size := int64(c.Request.Header.ContentLength())
	if size < 0 {
		fail(c, http.StatusLengthRequired, "length_required", "Content-Length", "is missing: say how long the bundle is")
		c.SetConnectionClose()
		return
	}
	body := c.RequestBodyStream()
	model, name := bundleName(c)
	if body == nil {
		body = eof{}
	}
	hash, err := s.cfg.Disagg.PutBundle(who.Tenant, model, name, size, body)
	if err != nil {
		var e *disagg.Error
		if errors.As(err, &e) {
			s.failDisagg(c, err)
		} else {
			s.refuseBody(c, err)
		}
		c.SetConnectionClose()
		return
	}
	answer(c, bundleAnswer{hash})
}

type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }

// bundleBody sends a bundle out of the cache and lets go of it at the end.
type bundleBody struct {
	rest   []byte
	bundle *disagg.Bundle
}

func (b *bundleBody) Read(p []byte) (int, error) {
	if len(b.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *bundleBody) Close() error {
	b.rest = nil
	b.bundle.Close()
	return nil
}

const (
	contentHashHeader = "X-Content-SHA256"
	expiresHeader     = "X-Membrane-Expires"
)

func (s *Server) getBundle(c *fasthttp.RequestCtx, who auth.Identity) {
	model, name := bundleName(c)
	ctx, stop := context.WithTimeout(s.ctx, readTimeout)
	defer stop()
	b, err := s.cfg.Disagg.GetBundle(ctx, who.Tenant, model, name)
	if err != nil {
		s.failDisagg(c, err)
		return
	}
	c.Response.Header.SetContentType("application/octet-stream")
	c.Response.Header.Set(contentHashHeader, b.Hash)
	c.Response.Header.Set(expiresHeader, rfc3339(b.Expires))
	c.Response.SetBodyStream(&bundleBody{b.Bytes(), b}, len(b.Bytes()))
}

func (s *Server) headBundle(c *fasthttp.RequestCtx, who auth.Identity) {
	model, name := bundleName(c)
	ctx, stop := context.WithTimeout(s.ctx, readTimeout)
	defer stop()
	size, hash, expires, err := s.cfg.Disagg.StatBundle(ctx, who.Tenant, model, name)
	if err != nil {
		s.failDisagg(c, err)
		return
	}
	c.Response.SkipBody = true
	c.Response.Header.SetContentType("application/octet-stream")
	c.Response.Header.Set("Content-Length", strconv.FormatInt(size, 10))
	c.Response.Header.SetContentLength(int(size))
	c.Response.Header.Set(contentHashHeader, hash)
	c.Response.Header.Set(expiresHeader, rfc3339(expires))
}
