// Package proxy is the serving port: one OpenAI-compatible endpoint in front of
// the engine of this pod, behind which prompts may be prefilled by another pod.
//
// It owns the port, who may use it, the few fields that it edits in a request,
// the choice where a prompt is prefilled, the call to the prefill pod, and what
// happens when that fails. It does not own pages (package cache), who is alive
// (package mesh), handles (package disagg) nor the engine, which stays the only
// source of answers: the client gets the answer of its own pod's engine, or an
// error because that engine cannot be reached.
//
// # What is passed on
//
// Method, path, query, header values and bodies go to the engine and its answer
// comes back as they are, but for hop-by-hop headers (RFC 9110, §7.6.1), without
// waiting for the end of either. Letter case of header names may change. The
// bodies of POST /v1/completions and /v1/chat/completions are read whole, up to
// [MaxBody]. In them the values of at most cache_salt, kv_transfer_params,
// max_tokens (max_completion_tokens where a chat says so) and stream are
// written; all other bytes stay. In the copy for a prefill pod, stream_options,
// min_tokens, n and best_of are neutral where they were given, because engines
// refuse them beside stream false and one output token.
//
// # Clients and servers
//
// The server is fasthttp. Requests to the engine use fasthttp's requests and
// answers on connections of this package's own: fasthttp's client cannot be
// cancelled, and closing the connection is how an engine learns to stop;
// net/http's can, but hands every request to two goroutines more, which made
// what the proxy adds a third larger. Prefills elsewhere, whose time is that of
// the prompt, use net/http.
//
// # Concurrency
//
// All methods of [Server] may be called by several goroutines at once.
package proxy
