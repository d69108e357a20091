package grpcapi

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"membrane/sidecar/disagg"
	"membrane/sidecar/grpcapi/transferpb"
)

// deadline is the time that a call has left, for the service, which has a
// default of its own for calls without one.
func deadline(ctx context.Context) time.Duration {
	until, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return min(max(time.Until(until), time.Millisecond), disagg.MaxDeadline)
}

func prefillRequest(ctx context.Context, r *transferpb.PrefillRequest) disagg.PrefillRequest {
	return disagg.PrefillRequest{
		RequestID: r.GetRequestId(), Model: r.GetModelId(), Tokens: r.GetTokenIds(), TypeIDs: r.GetTokenTypeIds(),
		MaxDecodeTokens: int(r.GetMaxDecodeTokens()), Fingerprint: r.GetFingerprint(), Deadline: deadline(ctx),
	}
}

func prefillResponse(p disagg.Prefilled) *transferpb.PrefillResponse {
	return &transferpb.PrefillResponse{
		RequestId: p.RequestID, KvHandle: p.Handle, PrefillMs: millis(p.Took), PromptLen: int32(p.Tokens),
		CachedPrefixLen: int32(p.Cached), ExpiresUnixMs: p.Expires.UnixMilli(),
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Prefill answers transfer.proto's Prefill.
func (s *Server) Prefill(ctx context.Context, r *transferpb.PrefillRequest) (*transferpb.PrefillResponse, error) {
	p, err := s.cfg.Disagg.Prefill(ctx, tenant(ctx), prefillRequest(ctx, r))
	if err != nil {
		return nil, s.statusOf(err)
	}
	return prefillResponse(p), nil
}

// BatchPrefill answers transfer.proto's BatchPrefill.
func (s *Server) BatchPrefill(ctx context.Context, r *transferpb.BatchPrefillRequest) (*transferpb.BatchPrefillResponse, error) {
	began := time.Now()
	batch := make([]disagg.PrefillRequest, len(r.GetRequests()))
	for i, one := range r.GetRequests() {
		batch[i] = prefillRequest(ctx, one)
	}
	done, err := s.cfg.Disagg.PrefillBatch(ctx, tenant(ctx), batch)
	if err != nil {
		return nil, s.statusOf(err)
	}
	out := &transferpb.BatchPrefillResponse{ElapsedMs: millis(time.Since(began))}
	for _, p := range done {
		out.Responses = append(out.Responses, prefillResponse(p))
	}
	return out, nil
}

func decodeRequest(ctx context.Context, r *transferpb.DecodeRequest) (disagg.DecodeRequest, error) {
	out := disagg.DecodeRequest{
		RequestID: r.GetRequestId(), Handle: r.GetKvHandle(), Model: r.GetModelId(), MaxTokens: int(r.GetMaxTokens()), Deadline: deadline(ctx),
		Sampling: disagg.Sampling{Temperature: r.GetTemperature(), Seed: r.Seed},
	}
	if r.TopP != nil {
		if out.Sampling.TopP = r.GetTopP(); out.Sampling.TopP == 0 {
			return out, disagg.ZeroTopP()
		}
	}
	var err error
	out.Sampling.Stop, err = disagg.StopTokens(r.GetStopTokenIds())
	return out, err
}

func decodeResponse(d disagg.Decoded) *transferpb.DecodeResponse {
	out := &transferpb.DecodeResponse{
		RequestId: d.RequestID, TokenIds: make([]int64, len(d.Tokens)), Finished: d.Finished, FinishReason: string(d.Reason),
		PromptLen: int32(d.Prompt), PulledTokens: int32(d.Pulled), RecomputedTokens: int32(d.Recomputed), ExpiresUnixMs: d.Expires.UnixMilli(),
	}
	for i, token := range d.Tokens {
		out.TokenIds[i] = int64(token)
	}
	return out
}

// Decode answers transfer.proto's Decode.
func (s *Server) Decode(ctx context.Context, r *transferpb.DecodeRequest) (*transferpb.DecodeResponse, error) {
	req, err := decodeRequest(ctx, r)
	if err != nil {
		return nil, s.statusOf(err)
	}
	d, err := s.cfg.Disagg.Decode(ctx, tenant(ctx), req, nil)
	if err != nil {
		return nil, s.statusOf(err)
	}
	return decodeResponse(d), nil
}

// DecodeStream answers transfer.proto's DecodeStream.
func (s *Server) DecodeStream(r *transferpb.DecodeRequest, stream grpc.ServerStreamingServer[transferpb.DecodeEvent]) error {
	ctx := stream.Context()
	req, err := decodeRequest(ctx, r)
	if err != nil {
		return s.statusOf(err)
	}
	d, err := s.cfg.Disagg.Decode(ctx, tenant(ctx), req, func(token uint32) error {
		return stream.Send(&transferpb.DecodeEvent{RequestId: req.RequestID, Event: &transferpb.DecodeEvent_TokenId{TokenId: int64(token)}})
	})
	if err != nil {
		return s.statusOf(err)
	}
	return stream.Send(&transferpb.DecodeEvent{RequestId: req.RequestID, Event: &transferpb.DecodeEvent_Done{Done: decodeResponse(d)}})
}
