package httpapi

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/sidecar/auth"
	"membrane/sidecar/fragments"
)

const (
	defaultModel   = "default"
	maxContentHash = 256
	retryDraining  = time.Second
	retryReady     = 5 * time.Second
)

type status struct {
	Status string `json:"status"`
}

type prefillRequest struct {
	Tokens *[]int64 `json:"prompt_tokens"`
	Model  *string  `json:"model_id"`
}

type prefillAnswer struct {
	Success   bool                 `json:"success"`
	Fragments []fragments.Fragment `json:"fragments"`
}

func (s *Server) prefill(c *fasthttp.RequestCtx, who auth.Identity) {
	if s.refuseDraining(c) {
		return
	}
	var r prefillRequest
	if !s.decode(c, &r) || !required(c, "prompt_tokens", r.Tokens != nil) {
		return
	}
	fs, err := s.cfg.Fragments.Prefill(s.ctx, who.Tenant, *r.Tokens, or(r.Model, defaultModel))
	if err != nil {
		s.failWith(c, err)
		return
	}
	windows := (len(*r.Tokens) + fragments.WindowTokens - 1) / fragments.WindowTokens
	if len(fs) < windows {
		unavailable(c, "over_budget", fmt.Sprintf("the cache had room for %d of %d windows", len(fs), windows), time.Second)
		return
	}
	answer(c, prefillAnswer{Success: true, Fragments: fs})
}

type reconstructRequest struct {
	Tokens  *[]int64 `json:"tokens"`
	Model   *string  `json:"model_id"`
	Prefill bool     `json:"prefill"`
}

func (s *Server) reconstruct(c *fasthttp.RequestCtx, who auth.Identity) {
	var r reconstructRequest
	if !s.decode(c, &r) || !required(c, "tokens", r.Tokens != nil) {
		return
	}
	if r.Prefill {
		if !who.Scopes.Allows(auth.ScopeWrite) {
			forbid(c, auth.ScopeWrite)
			return
		}
		if s.refuseDraining(c) {
			return
		}
	}
	got, err := s.cfg.Fragments.Reconstruct(s.ctx, who.Tenant, *r.Tokens, or(r.Model, defaultModel), r.Prefill)
	if err != nil {
		s.failWith(c, err)
		return
	}
	answer(c, got)
}

func (s *Server) retrieve(c *fasthttp.RequestCtx, who auth.Identity) {
	hash := string(c.QueryArgs().Peek("content_hash"))
	if !required(c, "content_hash", hash != "") {
		return
	}
	if len(hash) > maxContentHash {
		fail(c, http.StatusUnprocessableEntity, "too_large", "content_hash", fmt.Sprintf("%d bytes are more than %d", len(hash), maxContentHash))
		return
	}
	got := s.cfg.Fragments.Retrieve(who.Tenant, hash)
	c.Response.SetStatusCode(http.StatusOK)
	send(c, got.AppendJSON(make([]byte, 0, 1<<10)), nil)
}

type inventoryAnswer struct {
	NodeID string         `json:"node_id"`
	Digest map[string]int `json:"digest"`
	Next   string         `json:"next"`
}

func (s *Server) inventory(c *fasthttp.RequestCtx, who auth.Identity) {
	limit := 0
	if text := string(c.QueryArgs().Peek("limit")); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n > fragments.MaxInventory {
			fail(c, http.StatusUnprocessableEntity, "bad_field", "limit", fmt.Sprintf("%q is not a number from 0 to %d", clip(text), fragments.MaxInventory))
			return
		}
		limit = n
	}
	if limit == 0 {
		limit = fragments.MaxInventory
	}
	s.heavy <- struct{}{}
	defer func() { <-s.heavy }()
	list, next := s.cfg.Fragments.Inventory(who.Tenant, string(c.QueryArgs().Peek("after")), limit)
	a := inventoryAnswer{NodeID: s.cfg.NodeID, Digest: make(map[string]int, len(list)), Next: next}
	for _, f := range list {
		a.Digest[f.StorageKey()] = f.VersionID
	}
	answer(c, a)
}

func (s *Server) ready(c *fasthttp.RequestCtx, _ auth.Identity) {
	if s.leaving.Load() || s.draining.Load() {
		c.Response.Header.Set("Retry-After", strconv.Itoa(int(retryReady.Seconds())))
		c.Response.SetStatusCode(http.StatusServiceUnavailable)
		write(c, status{"draining"})
		return
	}
	answer(c, status{"ready"})
}

// drained is the answer of POST /drain.
type drained struct {
	Draining bool `json:"draining"`
	// InFlight is what is under way in the whole sidecar: requests, leases of
	// engines, stores. Zero is the time to stop.
	InFlight int `json:"in_flight"`
}

// drain makes /readyz say no and peers look elsewhere. Everything is served on
// until the sidecar is stopped: others learn of it later than it does.
func (s *Server) drain(c *fasthttp.RequestCtx, _ auth.Identity) {
	if !s.leaving.Swap(true) {
		s.cfg.Log.Info().Msg("asked to drain: not ready any more")
		if s.cfg.Leave != nil {
			s.cfg.Leave()
		}
	}
	n := s.InFlight()
	if s.cfg.InFlight != nil {
		n = s.cfg.InFlight()
	}
	answer(c, drained{true, n - 1}) // this request is none of them
}

func (s *Server) refuseDraining(c *fasthttp.RequestCtx) bool {
	if !s.draining.Load() {
		return false
	}
	unavailable(c, "draining", "the sidecar is stopping", retryDraining)
	return true
}

func (s *Server) metrics(c *fasthttp.RequestCtx, _ auth.Identity) {
	var b bytes.Buffer
	s.cfg.WriteMetrics(&b)
	c.Response.Header.SetContentType("text/plain; version=0.0.4; charset=utf-8")
	c.Response.SetBodyRaw(b.Bytes())
}

func (s *Server) meshAddress(c *fasthttp.RequestCtx, _ auth.Identity) {
	code, body := s.cfg.MeshAddress(string(c.Method()), string(c.Path()), string(c.Request.Header.Peek("Authorization")), time.Now())
	c.Response.SetStatusCode(code)
	c.Response.Header.SetContentType("application/json")
	c.Response.SetBodyRaw(body)
}

func required(c *fasthttp.RequestCtx, field string, there bool) bool {
	if !there {
		fail(c, http.StatusUnprocessableEntity, "bad_field", field, "is missing")
	}
	return there
}

func or(v *string, otherwise string) string {
	if v == nil {
		return otherwise
	}
	return *v
}
