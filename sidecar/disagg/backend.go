package disagg

import (
	"context"

	"membrane/cache"
	"membrane/kvwire"
)

// Backend computes. The one that is built in is [Embedded]; the seam is here so
// that tests can have one that hangs or fails.
type Backend interface {
	// Model returns the model of an id.
	Model(id string) (Model, error)
	// Waiting returns how many prompts wait for their turn.
	Waiting() int
}

// Model is one model of a backend.
type Model interface {
	// Layout names the pages of the model and says how many tokens one has.
	Layout() (ns kvwire.Namespace, form kvwire.Form, pageTokens int)
	// PageBytes is the size of a page of so many tokens, in bytes.
	PageBytes(tokens int) int
	// MaxTokens is the most positions of a sequence.
	MaxTokens() int
	// Vocabulary is how many token ids a prompt may use; 0 for all.
	Vocabulary() int
	// Space is where a tenant's pages lie.
	Space(tenant string) (*cache.Space, error)
	// Acquire waits for the backend's turn to prefill.
	Acquire(ctx context.Context) (release func(), err error)
	// Start begins an empty sequence.
	Start() Sequence
	// Stored is told of each page that was computed and is held now.
	Stored(tenant string, hash kvwire.Hash, start, tokens int, page []byte)
}

// Sequence is the KV of one prompt on its way. One goroutine uses it.
type Sequence interface {
	// Load appends the KV of the next tokens from a page.
	Load(tokens int, page []byte) error
	// Compute appends the KV of tokens by computing it and returns the state
	// behind the last one.
	Compute(ctx context.Context, tokens []uint32) (state []byte, err error)
	// Rewind drops the last token and computes it again, for the state behind
	// it.
	Rewind(ctx context.Context, last uint32) (state []byte, err error)
	// Page returns the KV of tokens that are there.
	Page(start, tokens int) []byte
	// Generate goes on behind the state and calls yield with each token, until
	// that returns false, n are made, or one of stop is.
	Generate(ctx context.Context, state []byte, n int, how Sampling, yield func(token uint32) bool) (Finish, error)
}

// Finish says why a generation ended.
type Finish string

// The reasons.
const (
	FinishLength   Finish = "length"
	FinishStop     Finish = "stop"
	FinishDeadline Finish = "deadline"
)
