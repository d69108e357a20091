// Package grpcapi is the gRPC listener: prefill and decode on different nodes, as
// transferpb/transfer.proto says, with the standard health service and server
// reflection.
//
// It owns the listener's limits, its credentials and how errors become statuses.
// It does not own what the calls do (package disagg). `make proto` generates
// package transferpb.
//
// Health is public. Everything else needs a bearer key in the metadata
// "authorization" where the sidecar has keys: scope read for reflection, write
// for the calls.
package grpcapi
