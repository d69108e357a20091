package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"membrane/engines/embedded"
	"membrane/engines/llama"
)

type engineFlags struct {
	model, modelID, name, addr, sidecar, key string
	layers, hidden, threads, block           int
	deadline, lease                          time.Duration
	verify, openAI                           bool
}

// newEngineCommand returns `membrane engine`.
func newEngineCommand() *cobra.Command {
	var f engineFlags
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Run the embedded engine as a process of its own, attached to a sidecar",
		Long: `Run the embedded engine: a small Llama on the CPU that computes real KV pages.
It attaches to a sidecar through the engine socket exactly as a serving engine
does, and answers POST /v1/completions with token ids (stream and cache_salt
work), GET /v1/models and GET /health. It serves all the same while no sidecar
is there. With --openai it answers POST /v1/chat/completions and POST /tokenize
too, with a tokenizer of bytes and a chat template of its own.

The model is a Hugging Face folder (--model), or one whose weights are made
from its id (--model-id), the same in every process.`,
		Example: `  membrane engine --sidecar /run/membrane/engine.sock --addr 127.0.0.1:8000
  curl -s localhost:8000/v1/completions -d '{"prompt": [1,2,3,4], "max_tokens": 8}'`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context()) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.model, "model", "", "folder with config.json and *.safetensors of a Llama")
	flags.StringVar(&f.modelID, "model-id", "default", "id of a generated model, when --model is not given")
	flags.IntVar(&f.layers, "layers", llama.DefaultLayers, "layers of a generated model")
	flags.IntVar(&f.hidden, "hidden", llama.DefaultHidden, "hidden size of a generated model, a multiple of 64")
	flags.IntVar(&f.threads, "threads", 1, "goroutines that compute")
	flags.StringVar(&f.name, "name", "", "engine id at the sidecar (default: engine-PID)")
	flags.StringVar(&f.addr, "addr", "127.0.0.1:0", "HOST:PORT to serve completions on, port 0 for any free one")
	flags.StringVar(&f.sidecar, "sidecar", envOr("MEMBRANE_SIDECAR", ""), "the sidecar: path of its engine socket or HOST:PORT of its localhost listener; empty runs without (MEMBRANE_SIDECAR)")
	keyFlag(flags, &f.key, "key", "API key with the scope engine, where the sidecar's localhost listener wants one")
	flags.IntVar(&f.block, "block-tokens", 64, "the engine's own block, in tokens")
	flags.DurationVar(&f.deadline, "deadline", 500*time.Millisecond, "longest wait for the sidecar")
	flags.DurationVar(&f.lease, "lease", 10*time.Second, "how long leased pages are pinned")
	flags.BoolVar(&f.verify, "verify", false, "have the leased bytes checked once more after they were copied")
	flags.BoolVar(&f.openAI, "openai", false, "serve chat and /tokenize too, so that a serving proxy can stand in front")
	return cmd
}

// check names the first flag that cannot be meant. Those of the model are checked
// where it is made.
func (f *engineFlags) check() error {
	isHostPort := func(s string) bool { _, _, err := net.SplitHostPort(s); return err == nil }
	switch {
	case !isHostPort(f.addr):
		return fmt.Errorf("--addr %q: is not HOST:PORT", f.addr)
	case f.sidecar != "" && !strings.Contains(f.sidecar, "/") && !isHostPort(f.sidecar):
		return fmt.Errorf("--sidecar %q: is neither a path, which has a slash, nor HOST:PORT", f.sidecar)
	case f.block < 1:
		return fmt.Errorf("--block-tokens %d: is not above 0", f.block)
	case f.deadline <= 0:
		return fmt.Errorf("--deadline %v: is not above 0", f.deadline)
	case f.lease <= 0:
		return fmt.Errorf("--lease %v: is not above 0", f.lease)
	}
	return nil
}

func (f *engineFlags) load() (*llama.Model, error) {
	var m *llama.Model
	var err error
	if f.model != "" {
		m, err = llama.Load(f.model)
	} else {
		m, err = llama.Generate(f.modelID, llama.WithLayers(f.layers), llama.WithHidden(f.hidden))
	}
	if err != nil {
		return nil, err
	}
	return m.WithThreads(f.threads)
}

func (f *engineFlags) run(ctx context.Context) error {
	if err := f.check(); err != nil {
		return usageError{err}
	}
	log := zerolog.New(os.Stderr).Level(zerolog.InfoLevel).With().Timestamp().Logger()
	model, err := f.load()
	if err != nil {
		return usageError{err}
	}
	if f.name == "" {
		f.name = fmt.Sprintf("engine-%d", os.Getpid())
	}
	engine, err := embedded.New(embedded.Config{
		Model: model, Name: f.name, Sidecar: f.sidecar, Key: f.key, BlockTokens: f.block,
		Deadline: f.deadline, Lease: f.lease, Verify: f.verify, Log: log,
	})
	if err != nil {
		return usageError{err}
	}
	defer engine.Close()
	listener, err := net.Listen("tcp", f.addr)
	if err != nil {
		return fmt.Errorf("cannot serve completions at %q: %w", f.addr, err)
	}
	var opts []embedded.ServerOption
	if f.openAI {
		opts = append(opts, embedded.WithOpenAI())
	}
	server := embedded.NewServer(engine, opts...)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	log.Info().Str("http", listener.Addr().String()).Str("model", model.ID()).Str("sidecar", f.sidecar).Msg("engine serving")
	select {
	case <-ctx.Done():
		err = errors.Join(server.Close(), <-served)
	case err = <-served:
	}
	return err
}
