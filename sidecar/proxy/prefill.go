package proxy

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
)

// newTransport returns connections to prefill pods, which are closed before the
// other side does: see idleFor.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:     (&net.Dialer{Timeout: dialTimeout}).DialContext,
		MaxIdleConns:    0,
		IdleConnTimeout: idleFor, MaxIdleConnsPerHost: 256, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
	}
}

const (
	attempts     = 2
	lostEvery    = 200 * time.Millisecond // how often the mesh is asked whether a pod is there
	maxBusy      = 10 * time.Second
	fetchTimeout = 10 * time.Second
)

var (
	errPodLost        = errors.New("the mesh has lost the pod")
	errPrefillTimeout = errors.New("the time for prefills elsewhere is over")
)

// prefill has another pod prefill, a second one if that fails, and loads what
// it made. It returns the kv_transfer_params for the decode, "" for none, and
// the reason that counts. It fails only by ending early with ctx.
func (s *Server) prefill(ctx context.Context, r *request, d decision) (params string, why reason) {
	id := transferID()
	body := r.forPrefill(id)
	tried := make(map[*pod]bool)
	until := time.Now().Add(s.cfg.PrefillTimeout)
	why = reasonBroken
	for attempt := range attempts {
		one := choose(d.pods, tried, d.prefix, d.prompt)
		if one == nil {
			break
		}
		if attempt == 0 {
			s.budget.first()
		} else if !s.budget.second() {
			s.count.noBudget.Inc()
			break
		} else {
			s.count.retries.Inc()
		}
		tried[one] = true
		began := time.Now()
		limit := until
		if attempt+1 < attempts { // so that a hang leaves time for another pod
			limit = began.Add(time.Until(until) / 2)
		}
		var how outcome
		follow := s.follow(ctx, d.prefix, one)
		params, how = s.attempt(ctx, r, one, body, limit)
		follow()
		s.count.prefills[how].Inc()
		took := time.Since(began)
		s.cfg.Log.Debug().Str("request_id", r.id).Str("pod", one.Addr).Stringer("outcome", how).Dur("took", took).Int("prompt", d.prompt).Int("lacks", d.lacks).Msg("prefill elsewhere")
		if how == prefillOK {
			s.count.prefillFor.Update(took.Seconds())
			if d.prefix == nil {
				if tokens, ok := s.tokens(ctx, r, lateTokenize); ok {
					d.prefix = s.cfg.Cache.Prefix(r.salt, tokens)
				}
			}
			s.fetch(ctx, d.prefix, one)
			return params, disaggregated
		}
		why = reasonFailed
		if !how.again() || ctx.Err() != nil {
			break
		}
		s.strange.Warn().Str("request_id", r.id).Str("pod", one.Addr).Stringer("outcome", how).Dur("took", took).Msg("a pod did not prefill")
	}
	return "", why
}

// attempt asks one pod.
func (s *Server) attempt(parent context.Context, r *request, one *pod, body []byte, until time.Time) (params string, how outcome) {
	done, err := one.breaker.Allow()
	if err != nil {
		return "", prefillBusy
	}
	one.mine.Add(1)
	defer one.mine.Add(-1)
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	ctx, stop := context.WithDeadlineCause(ctx, until, errPrefillTimeout)
	defer stop()
	end := make(chan struct{})
	watched := s.watchPod(one, cancel, end)
	params, how = s.ask(ctx, r, one, body)
	close(end)
	<-watched
	if how == prefillUnreachable {
		switch cause := context.Cause(ctx); {
		case parent.Err() != nil:
			how = prefillGone
		case errors.Is(cause, errPodLost):
			how = prefillLost
		case errors.Is(cause, errPrefillTimeout):
			how = prefillTimeout
		}
	}
	switch how {
	case prefillOK:
		done(nil)
	case prefillRefused, prefillBusy, prefillGone:
		done(errExcluded)
	default:
		done(errors.New(how.String()))
	}
	return params, how
}

// watchPod cancels when the mesh loses the pod: a stopped process keeps its
// connections.
func (s *Server) watchPod(one *pod, cancel context.CancelCauseFunc, end <-chan struct{}) (done <-chan struct{}) {
	over := make(chan struct{})
	go func() {
		defer close(over)
		ticker := time.NewTicker(lostEvery)
		defer ticker.Stop()
		for {
			select {
			case <-end:
				return
			case <-ticker.C:
				if !s.pods.alive(one) {
					cancel(errPodLost)
					return
				}
			}
		}
	}()
	return over
}

func (s *Server) ask(ctx context.Context, r *request, one *pod, body []byte) (params string, how outcome) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+one.Addr+r.route.path(), bytes.NewReader(body))
	if err != nil {
		return "", prefillError
	}
	req.Header = legHeaders(&r.c.Request.Header)
	req.Header.Set(requestIDHeader, r.id)
	res, err := s.podClient.Do(req)
	if err != nil {
		return "", prefillUnreachable
	}
	defer func() { _ = res.Body.Close() }()
	one.learn(res.Header)
	switch {
	case res.StatusCode == http.StatusOK:
	case res.StatusCode == http.StatusTooManyRequests || res.StatusCode == http.StatusServiceUnavailable:
		return "", prefillBusy
	case res.StatusCode >= 400 && res.StatusCode < 500:
		return "", prefillRefused
	default:
		return "", prefillError
	}
	answer, err := io.ReadAll(io.LimitReader(res.Body, MaxPrefillAnswer+1))
	if err != nil {
		return "", prefillUnreachable
	}
	params, ok := parsePrefillAnswer(answer)
	if !ok {
		return "", prefillError
	}
	return params, prefillOK
}

// parsePrefillAnswer returns the kv_transfer_params of a completion, "" if it
// has none.
func parsePrefillAnswer(answer []byte) (params string, ok bool) {
	if len(answer) > MaxPrefillAnswer || !valid(string(answer)) {
		return "", false
	}
	object := gjson.ParseBytes(answer)
	if !object.IsObject() || !object.Get("choices").IsArray() {
		return "", false
	}
	p := object.Get("kv_transfer_params")
	switch {
	case !p.Exists() || p.Type == gjson.Null:
		return "", true
	case !p.IsObject() || len(p.Raw) > MaxTransferParams:
		return "", false
	}
	return p.Raw, true
}

// learn notes how busy the pod says it is.
func (p *pod) learn(h http.Header) {
	if n, err := strconv.ParseUint(h.Get(loadHeader), 10, 32); err == nil {
		p.reported.Store(int64(min(n, maxLoad)))
	}
	if n, err := strconv.ParseUint(h.Get("Retry-After"), 10, 16); err == nil {
		p.busyTil.Store(time.Now().Add(min(time.Duration(n)*time.Second, maxBusy)).UnixNano())
	}
}

// follow loads pages that the pod makes as they are there, so that few are left
// when it has answered. stop ends that, and returns when it has ended.
func (s *Server) follow(ctx context.Context, prefix Prefix, one *pod) (stop func()) {
	if prefix == nil || one.Name == "" {
		return func() {}
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.PrefillTimeout)
	ended := make(chan struct{})
	before := prefix.Here()
	go func() {
		defer close(ended)
		prefix.Follow(ctx, one.Name)
	}()
	return func() {
		cancel()
		<-ended
		came := max(0, prefix.Here()-before)
		s.count.followed.Add(came)
		s.count.fetched.Add(came)
	}
}

// fetch loads what the pod made into this node's cache, so that the engine finds
// it here within its own deadline, whatever the pages' size.
func (s *Server) fetch(ctx context.Context, prefix Prefix, one *pod) {
	if prefix == nil || one.Name == "" {
		return
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	before := prefix.Here()
	s.count.fetched.Add(max(0, prefix.Fetch(ctx, one.Name)-before))
	s.count.fetchFor.UpdateDuration(began)
}

// transferID names one hand-over.
func transferID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return hex.EncodeToString(b[:])
}
