package embedded

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/rs/zerolog"

	"membrane/engines/llama"
	"membrane/kvwire"
)

// Config says which model an [Engine] runs and where its sidecar is.
type Config struct {
	// Model computes. Required.
	Model *llama.Model
	// Name is the engine's id at the sidecar. Required.
	Name string
	// Sidecar is the path of an engine socket or HOST:PORT of a localhost
	// listener; "" runs without one.
	Sidecar string
	// Key is an API key with the scope engine, where the sidecar wants one.
	Key string
	// BlockTokens is the engine's own block, in tokens. 0 means 64.
	BlockTokens int
	// Deadline bounds the wait for the sidecar before prefill, and each wait
	// after the answer. 0 means 500 ms.
	Deadline time.Duration
	// Lease is how long leased pages are pinned. 0 means 10 s.
	Lease time.Duration
	// Verify checks the leased bytes once more after they were copied.
	Verify bool
	// InboxSlots is how many pages are stored at a time. 0 means 16.
	InboxSlots int
	Log        zerolog.Logger
}

const maxQueue = 256

// Engine completes prompts one at a time, in the order of their arrival. Its
// methods may be called by several goroutines.
type Engine struct {
	cfg     Config
	session *Session
	turn    chan struct{} // holds one value: whose turn it is to compute
	queue   chan struct{} // bounds who may wait for it
}

// New returns an engine that is attached to its sidecar in the background.
func New(cfg Config) (*Engine, error) {
	if cfg.Model == nil || cfg.Name == "" {
		return nil, errors.New("cannot make an engine: model and name are required")
	}
	setDefault(&cfg.BlockTokens, 64)
	setDefault(&cfg.Deadline, 500*time.Millisecond)
	setDefault(&cfg.Lease, 10*time.Second)
	setDefault(&cfg.InboxSlots, 16)
	if cfg.BlockTokens < 1 || cfg.BlockTokens > kvwire.MaxPageTokens {
		return nil, fmt.Errorf("cannot make an engine: block_tokens %d is not between 1 and %d", cfg.BlockTokens, kvwire.MaxPageTokens)
	}
	e := &Engine{cfg: cfg, turn: make(chan struct{}, 1), queue: make(chan struct{}, maxQueue)}
	e.turn <- struct{}{}
	if cfg.Sidecar != "" {
		opts := kvwire.ClientOptions{Key: cfg.Key, Name: cfg.Name, Populate: true}
		e.session = NewSession(cfg.Sidecar, Registration(cfg.Model, cfg.Name, cfg.BlockTokens, cfg.InboxSlots), opts, cfg.Log)
	}
	return e, nil
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Facts returns what the model's numbers depend on.
func Facts(m *llama.Model) kvwire.ModelFacts {
	c := m.Config()
	return kvwire.ModelFacts{
		WeightsID: m.WeightsID(), DType: "float32",
		RoPE:   ropeSignature(c.RopeTheta),
		Layers: c.Layers, KVHeads: c.KVHeads, HeadSize: c.HeadDim,
	}
}

// ropeSignature is that of the Python package (facts.py): an exponent in it
// would give the same model another namespace.
func ropeSignature(theta float64) string {
	return "base=" + strconv.FormatFloat(theta, 'f', -1, 64)
}

// Registration returns what an engine with this model tells its sidecar.
func Registration(m *llama.Model, name string, blockTokens, inboxSlots int) kvwire.Register {
	c := m.Config()
	const float = 4
	dim := int64(float)
	token := dim * int64(c.HeadDim)
	head := token * int64(blockTokens)
	kv := head * int64(c.KVHeads)
	return kvwire.Register{
		Engine: name, Role: kvwire.RoleBoth, Model: Facts(m), InboxSlots: inboxSlots,
		Descriptor: kvwire.Descriptor{
			Layout: "canonical", DType: "float32", BlockTokens: blockTokens, BlockBytes: int64(m.PageBytes(blockTokens)),
			Axes: []string{"layer", "kv", "head", "token", "dim"}, Strides: []int64{2 * kv, kv, head, token, dim},
			TPSize: 1, PPSize: 1, Layers: [2]int{0, c.Layers}, Heads: [2]int{0, c.KVHeads},
		},
	}
}

// Close detaches from the sidecar.
func (e *Engine) Close() {
	if e.session != nil {
		e.session.Close()
	}
}

// Attached reports whether a sidecar is attached now.
func (e *Engine) Attached() bool { return e.session != nil && e.session.Attached() }

// Model returns the engine's model.
func (e *Engine) Model() *llama.Model { return e.cfg.Model }

// Request is a prompt to complete.
type Request struct {
	Tokens    []uint32
	MaxTokens int
	// CacheSalt keeps this request's pages apart from those of others; nil for
	// none.
	CacheSalt *string
	// Logprobs asks for the log-probability of each token.
	Logprobs bool
}

// Result says how a request went.
type Result struct {
	Tokens []uint32
	// Logprobs has the natural logarithm of each token's probability, if they
	// were asked for.
	Logprobs []float64
	// Reused is how many prompt tokens were loaded instead of computed.
	Reused int
	// FromPeers is how many pages came from other sidecars for this request.
	FromPeers int
	// Stored is how many pages the sidecar took.
	Stored int
	// Reason says why no more was reused, [kvwire.ReasonNone] if all was.
	Reason kvwire.Reason
	// Load is the time from asking the sidecar until the engine went on, by
	// loading or without.
	Load time.Duration
	// FirstToken is the time from the start of the work to the first token.
	FirstToken time.Duration
}

// ErrBusy is returned when too many requests wait.
var ErrBusy = errors.New("too many requests wait for the engine")

// Complete decodes greedily after the prompt, calling yield with each token
// as it is known (yield may be nil; false ends early). What the sidecar does
// or fails to do never makes it fail.
func (e *Engine) Complete(ctx context.Context, req Request, yield func(uint32) bool) (Result, error) {
	if len(req.Tokens) == 0 {
		return Result{}, errors.New("cannot complete: prompt has no tokens")
	}
	select {
	case e.queue <- struct{}{}:
		defer func() { <-e.queue }()
	default:
		return Result{}, ErrBusy
	}
	select {
	case <-e.turn:
		defer func() { e.turn <- struct{}{} }()
	case <-ctx.Done():
		return Result{}, ctx.Err()
	}
	return e.complete(ctx, req, yield)
}

func (e *Engine) complete(ctx context.Context, req Request, yield func(uint32) bool) (Result, error) {
	begin := time.Now()
	kv := e.cfg.Model.NewKV(e.cfg.BlockTokens)
	var res Result
	handle := e.load(ctx, req, kv, &res)
	defer e.drop(ctx, handle)

	loaded := kv.Len()
	if loaded == len(req.Tokens) { // the last token's logits are not in the KV
		loaded--
		if err := kv.Truncate(loaded); err != nil {
			return res, err
		}
	}
	res.Reused = loaded
	logits, err := e.cfg.Model.Prefill(ctx, kv, req.Tokens[loaded:])
	if err != nil {
		return res, fmt.Errorf("cannot prefill: %w", err)
	}
	err = e.cfg.Model.Decode(ctx, kv, logits, req.MaxTokens, func(t uint32, logits []float32) bool {
		if len(res.Tokens) == 0 {
			res.FirstToken = time.Since(begin)
		}
		res.Tokens = append(res.Tokens, t)
		if req.Logprobs {
			res.Logprobs = append(res.Logprobs, llama.Logprob(logits, t))
		}
		return yield == nil || yield(t)
	})
	if err != nil {
		return res, fmt.Errorf("cannot decode: %w", err)
	}
	res.Stored = e.store(ctx, handle, req.Tokens, res.Tokens, kv, loaded)
	return res, nil
}

func wire(tokens []uint32) []byte {
	b := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}
