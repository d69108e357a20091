// Package embedded runs the embedded engine (package llama) as a process of
// its own, attached to a sidecar through the engine socket as any engine is.
//
// It owns the attachment ([Session]), the use of leased pages in place of
// prefill and the publishing of computed ones ([Engine]), and a small
// OpenAI-compatible HTTP listener ([Server]). It does not own the model's
// arithmetic, page names or any policy: what is worth fetching is the
// sidecar's affair.
package embedded
