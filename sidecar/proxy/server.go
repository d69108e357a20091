package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"github.com/valyala/fasthttp"
	"golang.org/x/sync/semaphore"

	"membrane/engines/hangup"
	"membrane/sidecar/auth"
)

const (
	readTimeout = time.Minute
	idleTimeout = time.Minute

	completionsPath = "/v1/completions"
	chatPath        = "/v1/chat/completions"
	healthPath      = "/health"
)

func (r route) path() string {
	if r == chat {
		return chatPath
	}
	return completionsPath
}

// Server is the serving port.
type Server struct {
	cfg       Config
	engine    *url.URL
	http      *fasthttp.Server
	pool      *enginePool
	transport *http.Transport // to prefill pods and /tokenize
	podClient *http.Client
	tokenizer *tokenizer
	salts     *salts
	pods      *pods
	budget    *budget
	count     *counters
	strange   zerolog.Logger // for what others can cause: some lines a minute
	bodies    *semaphore.Weighted
	inFlight  atomic.Int64
	leaving   atomic.Bool // asked to drain; still serves
	draining  atomic.Bool
	ctx       context.Context // ends when the server must stop at once
	cancel    context.CancelFunc
	wg        sync.WaitGroup
}

// New checks the configuration and returns a server without a listener.
func New(cfg Config) (*Server, error) {
	cfg, err := cfg.fill()
	if err != nil {
		return nil, err
	}
	engine, err := url.Parse(cfg.Engine)
	if err != nil {
		return nil, fmt.Errorf("cannot make the serving proxy with Engine %q: %w", cfg.Engine, err)
	}
	s := &Server{
		cfg: cfg, engine: engine, pool: newEnginePool(engine), transport: newTransport(), salts: newSalts(cfg.ClusterKey),
		pods: newPods(cfg.Pods), budget: newBudget(), count: newCounters(cfg.Metrics), bodies: semaphore.NewWeighted(maxBodies),
	}
	noRedirect := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	s.podClient = &http.Client{Transport: s.transport, CheckRedirect: noRedirect}
	s.tokenizer = &tokenizer{
		url: engine.Scheme + "://" + engine.Host + "/tokenize", client: &http.Client{Transport: s.transport, CheckRedirect: noRedirect},
		count: s.count, recall: newRecall(recallTokens),
	}
	s.strange = cfg.Log.Sample(&zerolog.BurstSampler{Burst: 10, Period: time.Minute})
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.http = &fasthttp.Server{
		Name: "membrane", Handler: s.handler(), ErrorHandler: s.badRequest, Logger: quiet{cfg.Log},
		ReadTimeout: cfg.readTimeout, IdleTimeout: idleTimeout, // writes have a deadline each, see answer
		StreamRequestBody: true, MaxRequestBodySize: MaxBody, DisablePreParseMultipartForm: true, ReadBufferSize: MaxHeaders,
		// One address alone cannot shut all others out.
		Concurrency: 4 * cfg.MaxInFlight, MaxConnsPerIP: 2 * cfg.MaxInFlight, CloseOnShutdown: true,
		NoDefaultServerHeader: true, NoDefaultDate: true, NoDefaultContentType: true,
	}
	cfg.Metrics.NewGauge("membrane_proxy_in_flight", func() float64 { return float64(s.inFlight.Load()) })
	cfg.Metrics.NewGauge("membrane_proxy_breakers_open", func() float64 { return float64(s.pods.broken()) })
	return s, nil
}

// handler serves and answers when a handler panics, for which fasthttp would end
// the process.
func (s *Server) handler() fasthttp.RequestHandler {
	return func(c *fasthttp.RequestCtx) {
		defer func() {
			if p := recover(); p != nil {
				s.cfg.Log.Error().Interface("panic", p).Bytes("stack", debug.Stack()).Msg("a request failed")
				fail(c, http.StatusInternalServerError, "internal", "", "the sidecar failed; its log says why")
			}
		}()
		s.serve(c)
		// What is written before the first part of an answer, or without one.
		// fasthttp takes the deadline away when the request has ended.
		_ = c.SetWriteDeadline(time.Now().Add(s.cfg.writeTimeout))
	}
}

// Serve answers requests on a listener, which it closes. It returns at once.
func (s *Server) Serve(l net.Listener) {
	s.wg.Go(func() {
		if err := s.http.Serve(l); err != nil && s.ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
			s.cfg.Log.Error().Err(err).Stringer("address", l.Addr()).Msg("the serving port failed")
		}
	})
}

// Leave makes /health say no and refuses prefills for others, so that routers
// and peers look elsewhere. Requests of clients are served on.
func (s *Server) Leave() { s.leaving.Store(true) }

// Drain refuses every new request from now on. What is under way goes on.
func (s *Server) Drain() { s.leaving.Store(true); s.draining.Store(true) }

// InFlight returns how many requests are under way, until their last byte.
func (s *Server) InFlight() int { return int(s.inFlight.Load()) }

func (s *Server) inFlightText() string { return strconv.FormatInt(s.inFlight.Load(), 10) }

// Close stops listening and waits for requests under way until ctx ends; then
// it cancels them.
func (s *Server) Close(ctx context.Context) error {
	stop := context.AfterFunc(ctx, s.cancel)
	defer stop()
	err := s.http.ShutdownWithContext(ctx)
	s.cancel()
	s.wg.Wait()
	s.pool.close()
	s.transport.CloseIdleConnections()
	if err != nil {
		return fmt.Errorf("cannot end the serving port's requests in time: %w", err)
	}
	return nil
}

// begin counts a request and checks who sends it. nil when it has been answered.
func (s *Server) begin(c *fasthttp.RequestCtx, of route, need auth.Scope) (*flight, auth.Identity) {
	f := &flight{s: s, c: c, route: of, began: time.Now(), stop: func() {}}
	who := auth.Anonymous()
	switch n := s.inFlight.Add(1); {
	case s.draining.Load():
		s.refuse(f, "draining", http.StatusServiceUnavailable, "draining", "", "this node is stopping")
		c.SetConnectionClose()
		return nil, who
	case n > int64(s.cfg.MaxInFlight):
		s.refuse(f, "saturated", http.StatusServiceUnavailable, "saturated", "", fmt.Sprintf("%d requests are under way, which is the most", s.cfg.MaxInFlight))
		c.SetConnectionClose() // its body may still come
		return nil, who
	}
	if need == 0 || s.cfg.Keys == nil {
		return f, who
	}
	who, known := s.identify(c)
	switch {
	case !known:
		c.Response.Header.Set("WWW-Authenticate", "Bearer")
		s.refuse(f, "key", http.StatusUnauthorized, "invalid_request_error", "", "an API key is needed: Authorization: Bearer KEY")
	case !who.Scopes.Allows(need):
		s.refuse(f, "scope", http.StatusForbidden, "invalid_request_error", "", fmt.Sprintf("this needs a key with the scope %s", need))
	default:
		return f, who
	}
	c.SetConnectionClose()
	return nil, who
}

func (s *Server) identify(c *fasthttp.RequestCtx) (auth.Identity, bool) {
	scheme, key, _ := strings.Cut(string(c.Request.Header.Peek(fasthttp.HeaderAuthorization)), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return auth.Identity{}, false
	}
	return s.cfg.Keys.Lookup(strings.TrimSpace(key))
}

// health is the engine's, unless this node leaves.
func (s *Server) health(c *fasthttp.RequestCtx) {
	if s.leaving.Load() {
		unavailable(c, http.StatusServiceUnavailable, "draining", "this node is stopping")
		return
	}
	s.passAs(c, 0)
}

// pass forwards what is neither of the two routes, unread. Below /v1/ it needs
// the scope that HTTP wants for reading and writing; elsewhere an engine has
// routes that change it.
func (s *Server) pass(c *fasthttp.RequestCtx, path string) {
	need := auth.ScopeAdmin
	if strings.HasPrefix(path, "/v1/") {
		need = auth.ScopeWrite
		if c.IsGet() || c.IsHead() {
			need = auth.ScopeRead
		}
	}
	s.passAs(c, need)
}

func (s *Server) passAs(c *fasthttp.RequestCtx, need auth.Scope) {
	f, _ := s.begin(c, other, need)
	if f == nil {
		return
	}
	defer f.rescue()
	ctx, stop := hangup.Watch(s.ctx, c.Conn())
	f.stop = stop
	length := c.Request.Header.ContentLength()
	switch stream := c.RequestBodyStream(); {
	case length == 0 || length < -1: // no length and no chunks
		s.forward(ctx, f, nil, nil, 0)
	case stream != nil:
		s.forward(ctx, f, nil, stream, length)
	default:
		s.forward(ctx, f, c.Request.Body(), nil, 0)
	}
}

// complete serves the two routes whose requests are read.
func (s *Server) complete(c *fasthttp.RequestCtx, of route) {
	f, who := s.begin(c, of, auth.ScopeWrite)
	if f == nil {
		return
	}
	defer f.rescue()
	f.buffers = takeBuffers()
	defer func() { f.buffers.give(); f.releaseBody() }()
	raw, ok := s.readBody(f)
	if !ok {
		return
	}
	r := &request{route: of, c: c, tenant: who.Tenant, id: string(c.Request.Header.Peek(requestIDHeader))}
	var err error
	if r.body, err = parseBody(raw); err != nil {
		s.refuse(f, "bad_body", http.StatusBadRequest, "invalid_request_error", "body", err.Error())
		return
	}
	if r.salt, err = s.salts.of(who.Tenant, r.body.get("cache_salt")); err != nil {
		s.refuse(f, "bad_body", http.StatusBadRequest, "invalid_request_error", "cache_salt", err.Error())
		return
	}
	r.leg = legOf(r.body.get("kv_transfer_params"))
	f.leg = r.leg
	if r.leg == prefillLeg {
		if s.leaving.Load() {
			s.refuse(f, "draining", http.StatusServiceUnavailable, "draining", "", "this node is stopping")
			return
		}
		if s.cfg.Cache.PinsFull() {
			s.refuse(f, "pins", http.StatusServiceUnavailable, "pins_full", "", "the cache holds as many pages for others as it may")
			return
		}
	}
	ctx, stop := hangup.Watch(s.ctx, c.Conn())
	f.stop = stop
	d := s.decide(ctx, r)
	params := ""
	if d.why == disaggregated {
		if r.id == "" {
			r.id = transferID()
		}
		f.id = r.id
		params, d.why = s.prefill(ctx, r, d)
	}
	s.count.decisions[d.why].Inc()
	if e := s.cfg.Log.Debug(); e.Enabled() {
		e.Str("request_id", r.id).Stringer("route", of).Stringer("why", d.why).Int("prompt", d.prompt).Int("lacks", d.lacks).Msg("request")
	}
	if ctx.Err() != nil {
		s.abandoned(f)
		f.end()
		return
	}
	s.forward(ctx, f, f.buffers.keep(f.buffers.write, r.local(*f.buffers.write, params)), nil, 0)
}

// badRequest answers what fasthttp cannot read.
func (s *Server) badRequest(c *fasthttp.RequestCtx, err error) {
	var timeout net.Error
	var small *fasthttp.ErrSmallBuffer
	switch {
	case errors.As(err, &small):
		fail(c, http.StatusRequestHeaderFieldsTooLarge, "invalid_request_error", "headers", fmt.Sprintf("the headers have more than %d bytes", MaxHeaders))
	case errors.As(err, &timeout) && timeout.Timeout():
		fail(c, http.StatusRequestTimeout, "invalid_request_error", "", "the request did not arrive in time")
	default:
		fail(c, http.StatusBadRequest, "invalid_request_error", "", "this is not an HTTP/1.1 request")
	}
}

// quiet puts fasthttp's own lines, which are about clients' mistakes, where
// they do no harm.
type quiet struct{ log zerolog.Logger }

func (q quiet) Printf(format string, args ...any) { q.log.Debug().Msgf(format, args...) }
