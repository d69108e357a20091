package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
	"membrane/sidecar/grpcapi/transferpb"
)

type identityKey struct{}

// tenant returns who the call is for, as the interceptors found it.
func tenant(ctx context.Context) string {
	who, _ := ctx.Value(identityKey{}).(auth.Identity)
	return who.Tenant
}

func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (answer any, err error) {
	defer s.around(info.FullMethod, &err)()
	if ctx, err = s.admit(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

func (s *Server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer s.around(info.FullMethod, &err)()
	ctx, err := s.admit(stream.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return handler(srv, knownStream{stream, ctx})
}

type knownStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s knownStream) Context() context.Context { return s.ctx }

// around counts a call and answers when its handler panics.
func (s *Server) around(method string, err *error) func() {
	began := time.Now()
	work := strings.HasPrefix(method, "/"+transferpb.Transfer_ServiceDesc.ServiceName+"/")
	if work { // a watcher of health or a reflection stream may stay for ever
		s.inFlight.Add(1)
	}
	return func() {
		if p := recover(); p != nil {
			s.cfg.Log.Error().Interface("panic", p).Str("method", method).Bytes("stack", debug.Stack()).Msg("a call failed")
			*err = status.Error(codes.Internal, "the sidecar failed; its log says how")
		}
		name := method[strings.LastIndexByte(method, '/')+1:]
		m := s.cfg.Metrics
		m.GetOrCreateCounter(fmt.Sprintf(`membrane_grpc_calls_total{method=%q,code=%q}`, name, status.Code(*err))).Inc()
		if work {
			m.GetOrCreatePrometheusHistogram(fmt.Sprintf(`membrane_grpc_call_duration_seconds{method=%q}`, name)).UpdateDuration(began)
			s.inFlight.Add(-1) // last: who sees it ended sees it counted
		}
	}
}

// admit finds out who calls and whether they may.
func (s *Server) admit(ctx context.Context, method string) (context.Context, error) {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	need := auth.ScopeRead
	switch service {
	case healthpb.Health_ServiceDesc.ServiceName:
		return ctx, nil
	case transferpb.Transfer_ServiceDesc.ServiceName:
		need = auth.ScopeWrite
	}
	who := auth.Anonymous()
	if s.cfg.Keys != nil {
		var ok bool
		if who, ok = s.identify(ctx); !ok {
			return nil, status.Error(codes.Unauthenticated, "an API key is needed: metadata authorization: Bearer KEY")
		}
		if !who.Scopes.Allows(need) {
			return nil, status.Errorf(codes.PermissionDenied, "this needs a key with the scope %s", need)
		}
	}
	if need == auth.ScopeWrite && s.draining.Load() {
		return nil, unavailable("the sidecar is stopping", time.Second)
	}
	return context.WithValue(ctx, identityKey{}, who), nil
}

func (s *Server) identify(ctx context.Context) (auth.Identity, bool) {
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get("authorization")
	if len(values) != 1 {
		return auth.Identity{}, false
	}
	scheme, key, _ := strings.Cut(values[0], " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return auth.Identity{}, false
	}
	return s.cfg.Keys.Lookup(strings.TrimSpace(key))
}

var kindCodes = map[disagg.Kind]codes.Code{
	disagg.Malformed: codes.InvalidArgument, disagg.NotFound: codes.NotFound, disagg.WrongRole: codes.FailedPrecondition,
	disagg.Late: codes.DeadlineExceeded, disagg.Gone: codes.Canceled, disagg.TooLarge: codes.InvalidArgument,
}

// statusOf turns an error of the service into a status.
func (s *Server) statusOf(err error) error {
	var e *disagg.Error
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &e):
		s.cfg.Log.Error().Err(err).Msg("a call failed")
		return status.Error(codes.Internal, "the sidecar failed; its log says how")
	case e.Kind == disagg.Busy:
		return unavailable(e.Error(), e.RetryAfter)
	}
	return status.Error(kindCodes[e.Kind], e.Error())
}

// unavailable says when to try again, in the details that clients know.
func unavailable(message string, after time.Duration) error {
	st := status.New(codes.Unavailable, message)
	if detailed, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)}); err == nil {
		st = detailed
	}
	return st.Err()
}
