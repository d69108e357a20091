package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
	"membrane/sidecar/grpcapi/transferpb"
)

const (
	// MaxMessage is the longest request, in bytes.
	MaxMessage = 4 << 20

	maxStreams     = 128 // calls at a time on one connection
	maxConnections = 256
	maxHeaders     = 16 << 10
	connectTimeout = 10 * time.Second
	idleTimeout    = 5 * time.Minute
	pingAfter      = 30 * time.Second // of silence, so that a client that is gone is noticed
	pingTimeout    = 10 * time.Second
	pingsApart     = 10 * time.Second // that clients must keep at the least
)

// Config is what the listener needs.
type Config struct {
	Disagg *disagg.Service
	// Keys are asked for on every call but health's; nil leaves all open.
	Keys    *auth.Keys
	Metrics *metrics.Set
	Log     zerolog.Logger
}

// Server is the gRPC listener.
type Server struct {
	transferpb.UnimplementedTransferServer

	cfg      Config
	grpc     *grpc.Server
	health   *health.Server
	inFlight atomic.Int64
	draining atomic.Bool
	wg       sync.WaitGroup
}

// New returns a server without a listener.
func New(cfg Config) (*Server, error) {
	if cfg.Disagg == nil || cfg.Metrics == nil {
		return nil, errors.New("cannot make the gRPC listener: Disagg and Metrics are needed")
	}
	s := &Server{cfg: cfg, health: health.NewServer()}
	s.grpc = grpc.NewServer(
		grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage), grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxHeaders), grpc.ConnectionTimeout(connectTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idleTimeout, Time: pingAfter, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingsApart, PermitWithoutStream: true}),
		grpc.UnaryInterceptor(s.unary), grpc.StreamInterceptor(s.stream),
	)
	transferpb.RegisterTransferServer(s.grpc, s)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	s.health.SetServingStatus(transferpb.Transfer_ServiceDesc.ServiceName, healthpb.HealthCheckResponse_SERVING)
	reflection.Register(s.grpc)
	cfg.Metrics.NewGauge("membrane_grpc_in_flight", func() float64 { return float64(s.inFlight.Load()) })
	return s, nil
}

// Serve answers calls on a listener, which it closes. It returns at once.
func (s *Server) Serve(l net.Listener) {
	s.wg.Go(func() {
		if err := s.grpc.Serve(netutil.LimitListener(l, maxConnections)); err != nil && !errors.Is(err, grpc.ErrServerStopped) && !s.draining.Load() {
			s.cfg.Log.Error().Err(err).Stringer("address", l.Addr()).Msg("the gRPC listener failed")
		}
	})
}

// InFlight returns how many calls are under way.
func (s *Server) InFlight() int { return int(s.inFlight.Load()) }

// Drain refuses new calls from now on and says so to health's watchers.
func (s *Server) Drain() {
	s.draining.Store(true)
	s.health.Shutdown()
}

// Close stops listening and waits for calls under way until ctx ends; then it
// cancels them.
func (s *Server) Close(ctx context.Context) error {
	s.Drain()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.grpc.GracefulStop()
	}()
	var err error
	select {
	case <-stopped:
	case <-ctx.Done():
		err = fmt.Errorf("cannot end the gRPC calls in time: %w", ctx.Err())
		s.grpc.Stop()
		<-stopped
	}
	s.wg.Wait()
	return err
}
