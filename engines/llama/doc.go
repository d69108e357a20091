// Package llama is the embedded engine: a small Llama decoder in pure Go and
// float32, with a paged KV cache whose bytes can leave and come back.
//
// It owns reading a Hugging Face folder (config.json and safetensors), making
// a deterministic model for any model id, prefill and greedy decoding, and the
// canonical byte layout of a KV page. It does not own tokenizers, sampling,
// batching of sequences, hashing of pages or anything that talks to a sidecar.
//
// All arithmetic is done in an order that depends only on the position of a
// value in the model, so one binary gives bit-equal KV and logits for the same
// tokens however they are split into calls, and with any number of threads.
// Products are rounded before they are added (no fused multiply-add), because
// the compiler may fuse one loop and not another.
//
// It is what the quickstart and the demo run on. It is not meant for serving.
package llama
