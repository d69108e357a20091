package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"membrane/engines/llama"
)

// DemoOptions tune [Demo]. The zero value works.
type DemoOptions struct {
	// Binary is the membrane binary to run; "" is this one.
	Binary string
	// Progress is called with a line for a person at every step.
	Progress func(string)
	// Keep, if set, is called with what runs, at the end and before anything
	// is stopped.
	Keep func(DemoSystem)

	shape demoShape
}

// demoShape is how large a demo's model and prompts are, in tokens where it is
// not said otherwise.
type demoShape struct {
	layers, hidden int // of the model
	prompt         int
	prefix, suffix int // of the workload's prompts; a family shares its prefix
}

// demoFull makes a cold prefill last a second or two on one core. Its prompt is
// sixteen pages and the token that is always computed.
var demoFull = demoShape{layers: 6, hidden: 256, prompt: 1025, prefix: 512, suffix: 64}

// DemoSystem is what a demo has running.
type DemoSystem struct {
	// Sidecars and Engines are the HOST:PORT of their HTTP listeners.
	Sidecars []string
	Engines  []string
}

// DemoResult is what a demo saw. Its JSON form is kept stable.
type DemoResult struct {
	// TokensEqual: every answer had the tokens of a computation without any
	// cache.
	TokensEqual  bool `json:"tokens_equal"`
	PromptTokens int  `json:"prompt_tokens"`
	// TokensReusedLocal and TokensReusedPeer are read from the byte counters of
	// the sidecar that served them.
	TokensReusedLocal int `json:"tokens_reused_local"`
	TokensReusedPeer  int `json:"tokens_reused_peer"`
	// First-token times, in milliseconds: computed, loaded from the engine's
	// own sidecar, loaded from another one.
	TTFTColdMS  float64 `json:"ttft_cold_ms"`
	TTFTLocalMS float64 `json:"ttft_local_ms"`
	TTFTPeerMS  float64 `json:"ttft_peer_ms"`
	// RequestsDuringKill were under way when a sidecar was killed, or sent
	// after it; AnsweredDuringKill of them got the right tokens.
	RequestsDuringKill int `json:"requests_during_kill"`
	AnsweredDuringKill int `json:"answered_during_kill"`
	// MembersSeen is how many members the sidecar that knew fewest knew.
	MembersSeen int     `json:"members_seen"`
	ElapsedS    float64 `json:"elapsed_s"`

	// Requests and ReusedShare are of the shared-prefix workload.
	Requests    int     `json:"workload_requests"`
	ReusedShare float64 `json:"workload_reused_share"`
}

const (
	demoNodes     = 3
	demoModel     = "demo"
	demoPage      = 64
	demoMaxTokens = 16
	demoTimeout   = 3 * time.Minute

	demoFamilies = 2
	demoPrompts  = 4 // in a family
)

// demo is one run.
type demo struct {
	opts     DemoOptions
	dir      string
	sidecars []*sidecar
	engines  []demoEngine
	client   *http.Client
	model    *llama.Model
	cases    []demoCase
	result   DemoResult
}

type demoEngine struct {
	*process
	http string
}

// Demo starts three sidecars that find each other by gossip, each with an
// embedded engine, every one a process of its own; prefills a prompt at one
// engine and decodes it at another from the first one's KV; runs a
// shared-prefix workload, kills a sidecar while requests run, and ends clean.
// It returns an error when anything was not as promised.
func Demo(ctx context.Context, opts DemoOptions) (DemoResult, error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	if opts.shape == (demoShape{}) {
		opts.shape = demoFull
	}
	if opts.Binary == "" {
		var err error
		if opts.Binary, err = executable(); err != nil {
			return DemoResult{}, err
		}
	}
	dir, err := os.MkdirTemp("", "membrane-demo-")
	if err != nil {
		return DemoResult{}, fmt.Errorf("cannot make a folder for sockets: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	d := &demo{opts: opts, dir: dir, client: &http.Client{}}
	defer d.client.CloseIdleConnections()
	err = d.run(ctx)
	if err == nil && opts.Keep != nil {
		opts.Keep(d.system())
	}
	err = errors.Join(err, d.stop())
	d.result.ElapsedS = time.Since(begin).Seconds()
	return d.result, err
}

func (d *demo) run(ctx context.Context) error {
	for _, step := range []func(context.Context) error{d.start, d.handOver, d.workload, d.killOne} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) system() DemoSystem {
	var s DemoSystem
	for i := range d.engines {
		s.Engines = append(s.Engines, d.engines[i].http)
		s.Sidecars = append(s.Sidecars, d.sidecars[i].http)
	}
	return s
}

func (d *demo) start(ctx context.Context) error {
	d.opts.Progress(fmt.Sprintf("starting %d sidecars and %d engines, a process each", demoNodes, demoNodes))
	model, err := llama.Generate(demoModel, llama.WithLayers(d.opts.shape.layers), llama.WithHidden(d.opts.shape.hidden))
	if err != nil {
		return err
	}
	d.model = model
	for i := range demoNodes {
		args := []string{"--memory=256MiB", "--inbox=32MiB"}
		if i > 0 {
			args = append(args, "--peer="+d.sidecars[0].http)
		}
		s, err := startSidecar(ctx, d.opts.Binary, d.dir, fmt.Sprintf("n%d", i+1), args...)
		if err != nil {
			return err
		}
		d.sidecars = append(d.sidecars, s)
		if err := d.startEngine(ctx, s, fmt.Sprintf("e%d", i+1)); err != nil {
			return err
		}
	}
	d.opts.Progress("waiting until every sidecar sees the others by gossip")
	return poll(ctx, "gossip", func() (bool, error) {
		d.result.MembersSeen = demoNodes
		for _, s := range d.sidecars {
			peers, err := healthyPeers(s.http)
			if err != nil {
				return false, err
			}
			d.result.MembersSeen = min(d.result.MembersSeen, len(peers)+1)
		}
		return d.result.MembersSeen == demoNodes, nil
	})
}

func (d *demo) startEngine(ctx context.Context, s *sidecar, name string) error {
	p, err := start(d.opts.Binary, "engine "+name, "engine", "--name="+name, "--sidecar="+s.socket, "--model-id="+demoModel,
		"--layers="+strconv.Itoa(d.opts.shape.layers), "--hidden="+strconv.Itoa(d.opts.shape.hidden))
	if err != nil {
		return err
	}
	fields, err := p.logged(ctx, "engine serving")
	if err == nil {
		_, err = p.logged(ctx, "sidecar attached")
	}
	if err != nil {
		p.kill()
		return err
	}
	addr, _ := fields["http"].(string)
	d.engines = append(d.engines, demoEngine{process: p, http: addr})
	return nil
}

// reference computes what the right tokens are, in this process and without
// any cache.
func (d *demo) reference(ctx context.Context, prompt []uint32) ([]uint32, error) {
	kv := d.model.NewKV(demoPage)
	logits, err := d.model.Prefill(ctx, kv, prompt)
	if err != nil {
		return nil, err
	}
	var tokens []uint32
	err = d.model.Greedy(ctx, kv, logits, demoMaxTokens, func(t uint32) bool { tokens = append(tokens, t); return true })
	return tokens, err
}

func demoTokens(n int, seed uint32) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = (uint32(i)*37 + uint32(i*i)%251 + seed*101) % 1000
	}
	return tokens
}

// handOver computes a prompt at the first engine, asks for it there again and
// at the second engine.
func (d *demo) handOver(ctx context.Context) error {
	prompt := demoTokens(d.opts.shape.prompt, 1)
	d.result.PromptTokens = len(prompt)
	for i := range d.engines { // an engine's first request warms it up
		if _, err := complete(ctx, d.client, d.engines[i].http, demoTokens(8, uint32(900+i)), 2); err != nil {
			return err
		}
	}
	d.opts.Progress(fmt.Sprintf("prefill of %d tokens at e1, nothing cached", len(prompt)))
	cold, err := complete(ctx, d.client, d.engines[0].http, prompt, demoMaxTokens)
	if err != nil {
		return err
	}
	d.opts.Progress("the same prompt at e1, from its own sidecar")
	local, reusedLocal, err := d.reuse(ctx, 0, func() (float64, error) { return metric(d.sidecars[0].http, leasedBytes, "local") }, prompt)
	if err != nil {
		return err
	}
	d.opts.Progress("the same prompt at e2, from e1's KV through both sidecars")
	if err := d.waitForDirectory(ctx); err != nil {
		return err
	}
	peer, reusedPeer, err := d.reuse(ctx, 1, func() (float64, error) { return metric(d.sidecars[0].http, servedBytes, "") }, prompt)
	if err != nil {
		return err
	}
	want, err := d.reference(ctx, prompt)
	if err != nil {
		return err
	}
	r := &d.result
	r.TokensEqual = slices.Equal(cold.tokens, want) && slices.Equal(local.tokens, want) && slices.Equal(peer.tokens, want)
	r.TokensReusedLocal, r.TokensReusedPeer = reusedLocal, reusedPeer
	r.TTFTColdMS, r.TTFTLocalMS, r.TTFTPeerMS = millis(cold.firstToken), millis(local.firstToken), millis(peer.firstToken)
	switch {
	case !r.TokensEqual:
		return fmt.Errorf("tokens differ: cold %v, local %v, peer %v, without a cache %v", cold.tokens, local.tokens, peer.tokens, want)
	case reusedLocal*10 < len(prompt)*9:
		return fmt.Errorf("e1 reused %d of %d tokens of its own sidecar (%s)", reusedLocal, len(prompt), local.reason)
	case reusedPeer*10 < len(prompt)*9:
		return fmt.Errorf("e2 reused %d of %d tokens of e1's sidecar (%s)", reusedPeer, len(prompt), peer.reason)
	}
	return nil
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// waitForDirectory returns when every sidecar knows what the others hold.
func (d *demo) waitForDirectory(ctx context.Context) error {
	return poll(ctx, "the directory", func() (bool, error) {
		held, err := metric(d.sidecars[0].http, residentPages, "")
		if err != nil {
			return false, err
		}
		for _, s := range d.sidecars[1:] {
			known, err := metric(s.http, directoryPages, "")
			if err != nil || known < held {
				return false, err
			}
		}
		return true, nil
	})
}

// reuse completes a prompt and returns how many tokens the counter says that
// it served meanwhile.
func (d *demo) reuse(ctx context.Context, engine int, counter func() (float64, error), prompt []uint32) (answer, int, error) {
	before, err := counter()
	if err != nil {
		return answer{}, 0, err
	}
	a, err := complete(ctx, d.client, d.engines[engine].http, prompt, demoMaxTokens)
	if err != nil {
		return a, 0, err
	}
	after, err := counter()
	if err != nil {
		return a, 0, err
	}
	perToken := float64(d.model.PageBytes(demoPage)) / demoPage
	return a, int((after - before) / perToken), nil
}

// demoCase is a prompt of the workload and its right answer.
type demoCase struct{ prompt, want []uint32 }

// makeCases computes the workload's prompts and their answers.
func (d *demo) makeCases(ctx context.Context) error {
	for family := range demoFamilies {
		prefix := demoTokens(d.opts.shape.prefix, uint32(50+family))
		for i := range demoPrompts {
			c := demoCase{prompt: append(slices.Clone(prefix), demoTokens(d.opts.shape.suffix, uint32(100+family*demoPrompts+i))...)}
			var err error
			if c.want, err = d.reference(ctx, c.prompt); err != nil {
				return err
			}
			d.cases = append(d.cases, c)
		}
	}
	return nil
}

// workload sends prompts with shared prefixes to all engines.
func (d *demo) workload(ctx context.Context) error {
	d.opts.Progress(fmt.Sprintf("%d prompts that share %d prefixes, at all engines in turn", demoFamilies*demoPrompts, demoFamilies))
	if err := d.makeCases(ctx); err != nil {
		return err
	}
	prompt, reused := 0, 0
	for round := range 2 {
		for i, c := range d.cases {
			a, err := complete(ctx, d.client, d.engines[(i+round)%demoNodes].http, c.prompt, demoMaxTokens)
			if err != nil {
				return err
			}
			if !slices.Equal(a.tokens, c.want) {
				d.result.TokensEqual = false
				return fmt.Errorf("tokens differ in the workload: %v instead of %v", a.tokens, c.want)
			}
			prompt, reused = prompt+len(c.prompt), reused+a.reused
			d.result.Requests++
		}
		d.opts.Progress(fmt.Sprintf("%d requests, %.0f %% of their tokens reused", d.result.Requests, 100*float64(reused)/float64(prompt)))
	}
	d.result.ReusedShare = float64(reused) / float64(prompt)
	return nil
}

// killOne kills the first sidecar while requests run at every engine.
func (d *demo) killOne(ctx context.Context) error {
	var sent, right, wrong atomic.Int64
	var killed atomic.Bool
	var wg sync.WaitGroup
	errs := make([]error, demoNodes)
	running := make(chan struct{}, demoNodes)
	for e := range demoNodes {
		wg.Go(func() {
			for i := 0; i < len(d.cases); i++ {
				c := d.cases[(i+e)%len(d.cases)]
				if i == 1 {
					running <- struct{}{}
				}
				before := killed.Load()
				a, err := complete(ctx, d.client, d.engines[e].http, c.prompt, demoMaxTokens)
				if after := killed.Load(); !after && !before {
					continue // ended before the kill
				}
				sent.Add(1)
				switch {
				case err != nil:
					errs[e] = errors.Join(errs[e], err)
				case slices.Equal(a.tokens, c.want):
					right.Add(1)
				default:
					wrong.Add(1)
				}
			}
		})
	}
	for range demoNodes {
		<-running
	}
	d.opts.Progress("kill -9 of n1 while requests run at all three engines")
	killed.Store(true)
	d.sidecars[0].kill()
	wg.Wait()
	d.result.RequestsDuringKill, d.result.AnsweredDuringKill = int(sent.Load()), int(right.Load())
	if sent.Load() == 0 {
		return errors.New("no request was under way when the sidecar was killed")
	}
	if right.Load() != sent.Load() {
		d.result.TokensEqual = d.result.TokensEqual && wrong.Load() == 0
		return fmt.Errorf("%d of %d requests during the kill were answered, %d with wrong tokens: %w", right.Load()+wrong.Load(), sent.Load(), wrong.Load(), errors.Join(errs...))
	}
	return nil
}

// stop ends every process, engines first, and reports those that did not end
// as asked.
func (d *demo) stop() error {
	d.opts.Progress("stopping")
	var errs []error
	for _, e := range d.engines {
		errs = append(errs, e.stop(10*time.Second))
	}
	for i, s := range d.sidecars {
		if i == 0 {
			select {
			case <-s.exited: // the one that was killed
				continue
			default:
			}
		}
		errs = append(errs, s.stop(15*time.Second))
	}
	return errors.Join(errs...)
}
