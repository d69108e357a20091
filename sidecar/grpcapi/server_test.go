package grpcapi

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
	"membrane/sidecar/fragments"
	"membrane/sidecar/grpcapi/transferpb"
	"membrane/sidecar/roles"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// api is a listener and a stock client of it.
type api struct {
	server *Server
	transferpb.TransferClient
	conn  *grpc.ClientConn
	cache *cache.Cache
	set   *metrics.Set
}

func newAPI(t *testing.T, keys *auth.Keys, role string) *api {
	t.Helper()
	c, err := cache.New(cache.Config{Budget: 16 << 20})
	require.NoError(t, err)
	set := metrics.NewSet()
	fs, err := fragments.New(fragments.Config{Cache: c, Metrics: set})
	require.NoError(t, err)
	k, err := roles.New(roles.Config{Setting: role})
	require.NoError(t, err)
	ds, err := disagg.New(disagg.Config{Cache: c, Backend: disagg.Embedded(fs), Roles: k, Metrics: set, Log: zerolog.Nop()})
	require.NoError(t, err)
	s, err := New(Config{Disagg: ds, Keys: keys, Metrics: set, Log: zerolog.Nop()})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.Serve(l)
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, conn.Close())
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		assert.NoError(t, s.Close(ctx))
		ds.Close()
		fs.Close()
		assert.NoError(t, c.Close())
	})
	return &api{s, transferpb.NewTransferClient(conn), conn, c, set}
}

// fillPins pins pages of nobody's up to the cap.
func fillPins(t *testing.T, c *cache.Cache) {
	t.Helper()
	space, err := c.Space("pins", kvwire.Namespace{1})
	require.NoError(t, err)
	for i := range 200 {
		h := []kvwire.Hash{{byte(i), 1}}
		_, err := space.Put(kvwire.Shard{Count: 1}, kvwire.Form{1}, h[0], make([]byte, 128<<10))
		require.NoError(t, err)
		_, why, err := space.Pin(kvwire.Form{1}, h, time.Minute)
		require.NoError(t, err)
		if why == kvwire.ReasonPinned {
			return
		}
	}
	require.Fail(t, "the pins have no cap")
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func prompt() *transferpb.PrefillRequest {
	return &transferpb.PrefillRequest{RequestId: "r1", ModelId: "llama-3-8b", TokenIds: []int64{1, 2, 3}}
}

func TestCalls(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil, "both")
	ctx := within(t, time.Minute)
	p, err := a.Prefill(ctx, prompt())
	require.NoError(t, err)
	assert.Equal(t, "r1", p.GetRequestId())
	assert.Len(t, p.GetKvHandle(), 64)
	assert.EqualValues(t, 3, p.GetPromptLen())
	assert.Zero(t, p.GetCachedPrefixLen())
	assert.Positive(t, p.GetPrefillMs())
	assert.WithinDuration(t, time.Now().Add(disagg.DefaultTTL), time.UnixMilli(p.GetExpiresUnixMs()), time.Minute)

	ask := &transferpb.DecodeRequest{RequestId: "r2", KvHandle: p.GetKvHandle(), ModelId: "llama-3-8b", MaxTokens: 8}
	d, err := a.Decode(ctx, ask)
	require.NoError(t, err)
	assert.Equal(t, "r2", d.GetRequestId())
	assert.Len(t, d.GetTokenIds(), 8)
	assert.True(t, d.GetFinished())
	assert.Equal(t, "length", d.GetFinishReason())
	assert.Zero(t, d.GetRecomputedTokens())
	assert.Equal(t, p.GetExpiresUnixMs(), d.GetExpiresUnixMs())

	b, err := a.BatchPrefill(ctx, &transferpb.BatchPrefillRequest{Requests: []*transferpb.PrefillRequest{prompt(), prompt()}})
	require.NoError(t, err)
	require.Len(t, b.GetResponses(), 2)
	assert.Equal(t, p.GetKvHandle(), b.GetResponses()[1].GetKvHandle())
	assert.EqualValues(t, 3, b.GetResponses()[1].GetCachedPrefixLen())

	stream, err := a.DecodeStream(ctx, ask)
	require.NoError(t, err)
	var tokens []int64
	var done *transferpb.DecodeResponse
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		require.Nil(t, done, "nothing follows the whole")
		assert.Equal(t, "r2", e.GetRequestId())
		if done = e.GetDone(); done == nil {
			tokens = append(tokens, e.GetTokenId())
		}
	}
	assert.Equal(t, d.GetTokenIds(), tokens)
	assert.Equal(t, d.GetTokenIds(), done.GetTokenIds())

	seeded := proto.CloneOf(ask)
	seeded.Temperature, seeded.Seed = 1.5, proto.Int64(7)
	s1, err := a.Decode(ctx, seeded)
	require.NoError(t, err)
	s2, err := a.Decode(ctx, seeded)
	require.NoError(t, err)
	assert.Equal(t, s1.GetTokenIds(), s2.GetTokenIds())
	assert.NotEqual(t, d.GetTokenIds(), s1.GetTokenIds())
	seeded.StopTokenIds = s1.GetTokenIds()[:1]
	s3, err := a.Decode(ctx, seeded)
	require.NoError(t, err)
	assert.Empty(t, s3.GetTokenIds())
	assert.Equal(t, "stop", s3.GetFinishReason())
}

func TestStatuses(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil, "both")
	ctx := within(t, time.Minute)
	f := func(code codes.Code, message string, err error) {
		t.Helper()
		assert.Equal(t, code, status.Code(err), "%v", err)
		assert.Contains(t, status.Convert(err).Message(), message)
	}
	prefill := func(code codes.Code, message string, change func(*transferpb.PrefillRequest)) {
		t.Helper()
		r := prompt()
		change(r)
		_, err := a.Prefill(ctx, r)
		f(code, message, err)
	}
	prefill(codes.InvalidArgument, "request_id: is missing", func(r *transferpb.PrefillRequest) { r.RequestId = "" })
	prefill(codes.InvalidArgument, "model_id: is missing", func(r *transferpb.PrefillRequest) { r.ModelId = "" })
	prefill(codes.InvalidArgument, "token_ids: is empty", func(r *transferpb.PrefillRequest) { r.TokenIds = nil })
	prefill(codes.InvalidArgument, "token_ids[0]: -1 is not a token id", func(r *transferpb.PrefillRequest) { r.TokenIds = []int64{-1} })
	prefill(codes.InvalidArgument, "token_ids: 32769 tokens", func(r *transferpb.PrefillRequest) { r.TokenIds = make([]int64, disagg.MaxPromptTokens+1) })
	prefill(codes.ResourceExhausted, "larger than max", func(r *transferpb.PrefillRequest) { r.Fingerprint = strings.Repeat("x", MaxMessage) })
	for _, n := range []int{0, disagg.MaxBatch + 1} {
		batch := &transferpb.BatchPrefillRequest{}
		for range n {
			batch.Requests = append(batch.Requests, prompt())
		}
		_, err := a.BatchPrefill(ctx, batch)
		f(codes.InvalidArgument, "split the batch", err)
	}
	decode := func(code codes.Code, message string, change func(*transferpb.DecodeRequest)) {
		t.Helper()
		r := &transferpb.DecodeRequest{RequestId: "r", ModelId: "llama-3-8b", KvHandle: strings.Repeat("ab", 32)}
		change(r)
		_, err := a.Decode(ctx, r)
		f(code, message, err)
		stream, err := a.DecodeStream(ctx, r)
		require.NoError(t, err)
		_, err = stream.Recv()
		f(code, message, err)
	}
	decode(codes.NotFound, "prefill again", func(*transferpb.DecodeRequest) {})
	decode(codes.InvalidArgument, "'/' is not allowed", func(r *transferpb.DecodeRequest) { r.KvHandle = "../x" })
	decode(codes.InvalidArgument, "max_tokens", func(r *transferpb.DecodeRequest) { r.MaxTokens = -1 })
	decode(codes.InvalidArgument, "top_p", func(r *transferpb.DecodeRequest) { r.TopP = proto.Float64(0) })
	decode(codes.InvalidArgument, "stop_token_ids[0]", func(r *transferpb.DecodeRequest) { r.StopTokenIds = []int64{-1} })
	assert.Zero(t, a.cache.Stats().Pages, "nothing is stored")
	p, err := a.Prefill(ctx, prompt())
	require.NoError(t, err)
	decode(codes.InvalidArgument, "another model", func(r *transferpb.DecodeRequest) { r.KvHandle, r.ModelId = p.GetKvHandle(), "m" })

	d := newAPI(t, nil, "decode")
	_, err = d.Prefill(ctx, prompt())
	f(codes.FailedPrecondition, "send prefill to a node with the role prefill or both", err)

	// At the cap of pins, with when to try again.
	fillPins(t, a.cache)
	big := prompt()
	big.TokenIds = make([]int64, 128)
	_, err = a.Prefill(ctx, big)
	f(codes.Unavailable, "leases and pins", err)
	require.Len(t, status.Convert(err).Details(), 1)
	assert.Positive(t, status.Convert(err).Details()[0].(*errdetails.RetryInfo).GetRetryDelay().AsDuration())

	a.server.Drain()
	_, err = a.Prefill(ctx, prompt())
	f(codes.Unavailable, "stopping", err)
	h, err := healthpb.NewHealthClient(a.conn).Check(ctx, &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	assert.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, h.GetStatus())
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	var lines []string
	key := func(subject string, scope auth.Scope) context.Context {
		k, line, err := auth.Generate(subject, scope)
		require.NoError(t, err)
		lines = append(lines, line)
		return metadata.AppendToOutgoingContext(within(t, time.Minute), "authorization", "Bearer "+k)
	}
	acme, other, reader := key("acme", auth.ScopeWrite), key("other", auth.ScopeWrite), key("acme", auth.ScopeRead)
	keys, err := auth.ParseKeyfile([]byte(strings.Join(lines, "\n")))
	require.NoError(t, err)
	a := newAPI(t, keys, "both")
	open := within(t, time.Minute)
	for _, ctx := range []context.Context{open, metadata.AppendToOutgoingContext(open, "authorization", "Bearer mbr_wrong"), metadata.AppendToOutgoingContext(open, "authorization", "Basic x")} {
		_, err = a.Prefill(ctx, prompt())
		assert.Equal(t, codes.Unauthenticated, status.Code(err))
	}
	_, err = a.Prefill(reader, prompt())
	assert.Equal(t, codes.PermissionDenied, status.Code(err))
	p, err := a.Prefill(acme, prompt())
	require.NoError(t, err)
	ask := &transferpb.DecodeRequest{RequestId: "r", KvHandle: p.GetKvHandle(), ModelId: "llama-3-8b", MaxTokens: 2}
	_, err = a.Decode(other, ask)
	assert.Equal(t, codes.NotFound, status.Code(err), "another tenant's handle")
	_, err = a.Decode(acme, ask)
	assert.NoError(t, err)
	stream, err := a.DecodeStream(open, ask)
	require.NoError(t, err)
	_, err = stream.Recv()
	assert.Equal(t, codes.Unauthenticated, status.Code(err))

	h, err := healthpb.NewHealthClient(a.conn).Check(open, &healthpb.HealthCheckRequest{Service: "membrane.disagg.Transfer"})
	require.NoError(t, err, "health is public")
	assert.Equal(t, healthpb.HealthCheckResponse_SERVING, h.GetStatus())
	services := func(ctx context.Context) ([]string, error) {
		s, err := reflectpb.NewServerReflectionClient(a.conn).ServerReflectionInfo(ctx)
		require.NoError(t, err)
		_ = s.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}})
		answer, err := s.Recv()
		_ = s.CloseSend()
		var names []string
		for _, one := range answer.GetListServicesResponse().GetService() {
			names = append(names, one.GetName())
		}
		return names, err
	}
	_, err = services(open)
	assert.Equal(t, codes.Unauthenticated, status.Code(err))
	names, err := services(reader)
	require.NoError(t, err)
	assert.Contains(t, names, "membrane.disagg.Transfer")
}

func TestDeadlinesAndCancellation(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil, "both")
	p, err := a.Prefill(within(t, time.Minute), prompt())
	require.NoError(t, err)
	long := &transferpb.DecodeRequest{RequestId: "r", KvHandle: p.GetKvHandle(), ModelId: "llama-3-8b", MaxTokens: disagg.MaxOutputTokens}
	_, err = a.Decode(within(t, 200*time.Millisecond), long)
	assert.Equal(t, codes.DeadlineExceeded, status.Code(err))
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := a.DecodeStream(ctx, long)
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	cancel()
	require.Eventually(t, func() bool { return a.server.InFlight() == 0 }, 10*time.Second, time.Millisecond)
}

// The numbers that the predecessor's clients have on the wire.
func TestFieldNumbers(t *testing.T) {
	t.Parallel()
	f := func(m proto.Message, names ...string) {
		t.Helper()
		for i, name := range names {
			field := m.ProtoReflect().Descriptor().Fields().ByNumber(protowire.Number(i + 1))
			require.NotNil(t, field, name)
			assert.EqualValues(t, name, field.Name())
		}
	}
	f(&transferpb.PrefillRequest{}, "request_id", "model_id", "token_ids", "token_type_ids", "max_decode_tokens", "fingerprint")
	f(&transferpb.PrefillResponse{}, "request_id", "kv_handle", "prefill_ms", "prompt_len", "cached_prefix_len")
	f(&transferpb.BatchPrefillRequest{}, "requests")
	f(&transferpb.BatchPrefillResponse{}, "responses", "elapsed_ms")
	f(&transferpb.DecodeRequest{}, "request_id", "kv_handle", "model_id", "max_tokens")
	f(&transferpb.DecodeResponse{}, "request_id", "token_ids", "finished")
	assert.Equal(t, "/membrane.disagg.Transfer/BatchPrefill", transferpb.Transfer_BatchPrefill_FullMethodName)
}
