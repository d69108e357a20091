package httpapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/fasthttp/router"
	"github.com/rs/zerolog"
	"github.com/valyala/fasthttp"
	"golang.org/x/sync/semaphore"

	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
	"membrane/sidecar/fragments"
)

const (
	readTimeout    = 30 * time.Second
	writeTimeout   = 30 * time.Second
	idleTimeout    = time.Minute
	maxConnections = 1024
	maxFromOne     = maxConnections / 2 // of them from one address
)

// Peer is a node as /peers shows it.
type Peer struct {
	NodeID  string `json:"node_id"`
	Host    string `json:"host"`
	Port    int    `json:"port"`
	Healthy bool   `json:"healthy"`
	Suspect bool   `json:"suspect"`
	Status  string `json:"status"`
	Name    string `json:"name"`
	Gossip  string `json:"gossip_addr"`
	Data    string `json:"data_addr"`
	// Role is what the node serves; RoleAuto, that it chose it by itself;
	// RoleSince (RFC 3339), since when; RoleWhy, for which reason.
	Role      string `json:"role"`
	RoleAuto  bool   `json:"role_auto"`
	RoleSince string `json:"role_since,omitempty"`
	RoleWhy   string `json:"role_why,omitempty"`
	// RoleNext is set while the node drains the phase that it gives up.
	RoleNext string `json:"role_next,omitempty"`
	// Queues is how many requests wait there; of others only where the ratio of
	// roles follows it.
	Queues  *Queues `json:"queues,omitempty"`
	Version string  `json:"version"`
	RTTMS   float64 `json:"rtt_ms"`
	Pages   int     `json:"pages"`
}

// Queues are how many requests of each phase wait.
type Queues struct {
	Prefill int `json:"prefill"`
	Decode  int `json:"decode"`
}

// Peers is the answer of /peers: the other nodes, and this one.
type Peers struct {
	Peers []Peer `json:"peers"`
	Self  Peer   `json:"self"`
}

// Config is what the listener needs. All fields but Keys are required.
type Config struct {
	NodeID    string
	Fragments *fragments.Service
	Disagg    *disagg.Service
	// Keys are asked for on every route but the probes; nil leaves all open.
	Keys *auth.Keys
	// Peers, Status and Summary give the answers of /peers, /statusz and
	// /metrics.json.
	Peers           func() Peers
	Status, Summary func() any
	// Leave tells the whole sidecar that it will be stopped, and InFlight how
	// much is under way in it; both may be nil.
	Leave    func()
	InFlight func() int
	// MeshAddress answers GET /mesh/address, whose credential is a peer's.
	MeshAddress func(method, path, authorization string, now time.Time) (status int, body []byte)
	// Metrics gets this listener's metrics; WriteMetrics writes all that
	// there are.
	Metrics      *metrics.Set
	WriteMetrics func(io.Writer)
	Log          zerolog.Logger
}

// Server is the HTTP listener.
type Server struct {
	cfg      Config
	http     *fasthttp.Server
	router   *router.Router
	other    *endpoint   // of requests that no route takes
	leaving  atomic.Bool // POST /drain: not ready, serves on
	draining atomic.Bool
	inFlight atomic.Int64
	bodies   *semaphore.Weighted // bytes
	heavy    chan struct{}       // a token for each that has much to hold or to do
	ctx      context.Context     // ends when the server must stop at once
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu        sync.Mutex
	listeners []net.Listener
}

// New returns a server without listeners.
func New(cfg Config) (*Server, error) {
	if cfg.Fragments == nil || cfg.Disagg == nil || cfg.Peers == nil || cfg.Status == nil || cfg.Summary == nil || cfg.MeshAddress == nil || cfg.Metrics == nil || cfg.WriteMetrics == nil {
		return nil, errors.New("cannot make the HTTP listener: a field of its configuration is nil")
	}
	s := &Server{cfg: cfg, router: router.New(), bodies: semaphore.NewWeighted(maxBodies), heavy: make(chan struct{}, maxHeavy)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.other = s.endpoint("other")
	s.routes()
	s.http = &fasthttp.Server{
		Name: "membrane", Handler: s.Handler, ErrorHandler: s.badRequest,
		ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		// The body is read by those handlers that want one, after the key was
		// checked: fasthttp would make room for what a header announces.
		StreamRequestBody: true, MaxRequestBodySize: MaxBody, DisablePreParseMultipartForm: true,
		Concurrency: maxConnections, MaxConnsPerIP: maxFromOne, CloseOnShutdown: true,
		Logger: quiet{cfg.Log}, NoDefaultServerHeader: true,
	}
	cfg.Metrics.NewGauge("membrane_requests_in_flight", func() float64 { return float64(s.inFlight.Load()) })
	return s, nil
}

func (s *Server) routes() {
	r := s.router
	r.RedirectTrailingSlash, r.RedirectFixedPath, r.HandleOPTIONS = false, false, false
	r.NotFound = s.wrap("other", 0, func(c *fasthttp.RequestCtx, _ auth.Identity) {
		fail(c, http.StatusNotFound, "not_found", "", fmt.Sprintf("there is no %s", clip(string(c.Path()))))
	})
	r.MethodNotAllowed = s.wrap("other", 0, func(c *fasthttp.RequestCtx, _ auth.Identity) {
		// The router adds OPTIONS, which we do not answer, somewhere.
		allow := strings.TrimPrefix(strings.ReplaceAll(string(c.Response.Header.Peek("Allow")), ", OPTIONS", ""), "OPTIONS, ")
		c.Response.Header.Set("Allow", allow)
		fail(c, http.StatusMethodNotAllowed, "method_not_allowed", "", fmt.Sprintf("%s takes %s", clip(string(c.Path())), allow))
	})
	r.POST("/prefill", s.wrap("prefill", auth.ScopeWrite, s.prefill))
	r.POST("/reconstruct", s.wrap("reconstruct", auth.ScopeRead, s.reconstruct))
	r.GET("/retrieve", s.wrap("retrieve", auth.ScopeRead, s.retrieve))
	r.GET("/inventory", s.wrap("inventory", auth.ScopeRead, s.inventory))
	r.GET("/peers", s.wrap("peers", auth.ScopeRead, func(c *fasthttp.RequestCtx, _ auth.Identity) { answer(c, s.cfg.Peers()) }))
	r.GET("/metrics", s.wrap("metrics", auth.ScopeRead, s.metrics))
	r.GET("/metrics.json", s.wrap("metrics_json", auth.ScopeRead, func(c *fasthttp.RequestCtx, _ auth.Identity) { answer(c, s.cfg.Summary()) }))
	r.GET("/statusz", s.wrap("statusz", auth.ScopeAdmin, func(c *fasthttp.RequestCtx, _ auth.Identity) { pretty(c, s.cfg.Status()) }))
	r.GET("/livez", s.wrap("livez", 0, func(c *fasthttp.RequestCtx, _ auth.Identity) { answer(c, status{"alive"}) }))
	r.GET("/readyz", s.wrap("readyz", 0, s.ready))
	r.POST("/drain", s.wrap("drain", auth.ScopeAdmin, s.drain))
	s.disaggRoutes(r)
	r.GET("/mesh/address", s.wrap("mesh_address", 0, s.meshAddress))
}

// Handler answers one request.
func (s *Server) Handler(c *fasthttp.RequestCtx) { s.router.Handler(c) }

// Serve answers requests on a listener, which it closes. It returns at once.
func (s *Server) Serve(l net.Listener) {
	s.mu.Lock()
	s.listeners = append(s.listeners, l)
	s.mu.Unlock()
	s.wg.Go(func() {
		if err := s.http.Serve(l); err != nil && s.ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
			s.cfg.Log.Error().Err(err).Stringer("address", l.Addr()).Msg("the HTTP listener failed")
		}
	})
}

// Drain makes /readyz say no and refuses prefills from now on.
func (s *Server) Drain() { s.draining.Store(true) }

// InFlight returns how many requests are under way.
func (s *Server) InFlight() int { return int(s.inFlight.Load()) }

// Close stops listening and waits for requests under way until ctx ends; then
// it cancels them.
func (s *Server) Close(ctx context.Context) error {
	stop := context.AfterFunc(ctx, s.cancel)
	defer stop()
	err := s.http.ShutdownWithContext(ctx)
	s.cancel()
	s.mu.Lock()
	for _, l := range s.listeners {
		_ = l.Close() // fasthttp has closed those that it served
	}
	s.mu.Unlock()
	s.wg.Wait()
	if err != nil {
		return fmt.Errorf("cannot end the HTTP requests in time: %w", err)
	}
	return nil
}

// badRequest answers what fasthttp cannot read.
func (s *Server) badRequest(c *fasthttp.RequestCtx, err error) {
	requestID(c)
	var timeout net.Error
	var small *fasthttp.ErrSmallBuffer
	switch {
	case errors.As(err, &small):
		fail(c, http.StatusRequestHeaderFieldsTooLarge, "too_large", "headers", "the headers have too many bytes")
	case errors.As(err, &timeout) && timeout.Timeout():
		fail(c, http.StatusRequestTimeout, "timeout", "", "the request did not arrive in time")
	default:
		fail(c, http.StatusBadRequest, "bad_request", "", "this is not an HTTP/1.1 request")
	}
	s.other.count(c, time.Now())
}

// quiet puts fasthttp's own lines, which are about clients' mistakes, where
// they do no harm.
type quiet struct{ log zerolog.Logger }

func (q quiet) Printf(format string, args ...any) { q.log.Debug().Msgf(format, args...) }
