// Package disagg splits a request between nodes: one prefills a prompt and keeps
// its KV under a handle, another pulls that KV and decodes behind it.
//
// It owns the handles of this node: the manifests with the pins that keep their
// pages, how a handle is found elsewhere, prefill and decode over a compute
// backend, sampling, and named bundles. It does not own HTTP and gRPC (packages
// httpapi and grpcapi), which node serves which phase (package roles), where
// bytes live (package cache) or how they come from peers (package mesh).
//
// # A handle
//
// A handle is a digest of the model's namespace, the model id and the prompt,
// so the same prompt has the same handle everywhere. What stands behind it
// belongs to a tenant: a manifest with the prompt's tokens and the pages, which
// lie under the tenant's name in the cache. Nobody finds another tenant's.
//
// The pages under a handle are pinned until a decode has pulled them all or the
// handle expires; admission does not touch them. Pins have a cap, and at the cap
// a prefill is refused with the time after which to try again.
//
// All methods of [Service] may be called by several goroutines at once. Close
// ends its goroutine and unpins everything.
package disagg
