package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// PDOptions tune [PD]. The zero value measures in full.
type PDOptions struct {
	// Binary is the membrane binary that is measured; "" is this one.
	Binary string
	// Version is what the report says of it.
	Version string
	// Quick measures with few, short prompts and few requests, to see that all
	// rows work.
	Quick bool
	// Lengths are the prompts' lengths of the hand-over, in tokens.
	Lengths []int
	// Rounds is how often every hand-over is taken.
	Rounds int
	// Requests, Rate (a second), Prompt and Answer (tokens) are the load of the
	// two placements.
	Requests       int
	Rate           float64
	Prompt, Answer int
	// Aborts is how many requests are abandoned.
	Aborts int
	// Seed is what arrivals and prompts follow from.
	Seed uint64
	// Progress is called with a line for a person now and then.
	Progress func(string)
}

// Check reports the first option that cannot be.
func (o PDOptions) Check() error {
	_, err := o.fill()
	return err
}

// fill puts in what is left out.
func (o PDOptions) fill() (PDOptions, error) {
	full := PDOptions{Lengths: []int{512, 1024, 2048, 4096}, Rounds: 5, Requests: 60, Rate: 1, Prompt: 1024, Answer: 32, Aborts: 10_000}
	if o.Quick {
		full = PDOptions{Lengths: []int{256, 512}, Rounds: 2, Requests: 6, Rate: 4, Prompt: 256, Answer: 8, Aborts: 300}
	}
	if len(o.Lengths) == 0 {
		o.Lengths = full.Lengths
	}
	if o.Rate == 0 {
		o.Rate = full.Rate
	}
	for _, f := range []struct {
		name        string
		value       *int
		whole, most int
	}{
		{"rounds", &o.Rounds, full.Rounds, 1000},
		{"requests", &o.Requests, full.Requests, 100_000},
		{"prompt tokens", &o.Prompt, full.Prompt, pdMaxTokens},
		{"answer tokens", &o.Answer, full.Answer, 1024},
		{"aborts", &o.Aborts, full.Aborts, 1_000_000},
	} {
		if *f.value == 0 {
			*f.value = f.whole
		}
		if *f.value < 1 || *f.value > f.most {
			return o, fmt.Errorf("%s: %d is not between 1 and %d", f.name, *f.value, f.most)
		}
	}
	for _, n := range o.Lengths {
		if n < 1 || n > pdMaxTokens {
			return o, fmt.Errorf("lengths: %d is not between 1 and %d tokens", n, pdMaxTokens)
		}
	}
	if !(o.Rate > 0) || o.Rate > 1e6 {
		return o, errors.New("rate: not between 0 and a million requests a second")
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	var err error
	if o.Binary == "" {
		o.Binary, err = executable()
	}
	return o, err
}

// pdMaxTokens is the longest prompt of a prefill.
const pdMaxTokens = 32768

// PDWorkload says what was sent.
type PDWorkload struct {
	Requests     int     `json:"requests"`
	Rate         float64 `json:"rate_s"`
	PromptTokens int     `json:"prompt_tokens"`
	AnswerTokens int     `json:"answer_tokens"`
	Seed         uint64  `json:"seed"`
	Rounds       int     `json:"rounds"`
	Aborts       int     `json:"aborts"`
}

// pd is one run of the benchmark.
type pd struct {
	opts   PDOptions
	dir    string
	report PDReport
	next   int // the first token of the next prompt
}

// PD measures prefill and decode on different nodes beside both on one, all with
// sidecars that run as processes of their own: time to first token and between
// tokens, the hand-over against the prompt's length with and without overlap,
// the hand-over of 64 MiB beside a bare copy, and what abandoned requests leave
// behind.
func PD(ctx context.Context, opts PDOptions) (PDReport, error) {
	opts, err := opts.fill()
	if err != nil {
		return PDReport{}, err
	}
	dir, err := os.MkdirTemp("", "membrane-pd-")
	if err != nil {
		return PDReport{}, fmt.Errorf("cannot make a folder for sockets: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	b := &pd{opts: opts, dir: dir, report: PDReport{
		Report: Report{Machine: thisMachine(opts.Version)},
		Workload: PDWorkload{
			Requests: opts.Requests, Rate: opts.Rate, PromptTokens: opts.Prompt, AnswerTokens: opts.Answer, Seed: opts.Seed,
			Rounds: opts.Rounds, Aborts: opts.Aborts,
		},
	}}
	for _, step := range []func(context.Context) error{b.bulk, b.handover, b.placements, b.aborts, b.proxy} {
		if err := step(ctx); err != nil {
			return PDReport{}, err
		}
	}
	return b.report, nil
}

// prompt returns n token ids that begin as no other prompt does.
func (b *pd) prompt(n int) []int {
	b.next++
	out := make([]int, n)
	for i := range out {
		out[i] = i%500 + 3
	}
	out[0] = 1000 + b.next
	return out
}

// pair is two sidecars that know each other.
type pair struct{ p, d *sidecar }

// pair starts two sidecars, each with one processor, as two machines have
// their own.
func (b *pd) pair(ctx context.Context, roleP, roleD string) (*pair, error) {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	one := []string{"GOMAXPROCS=1"}
	p, err := startSidecarEnv(ctx, one, b.opts.Binary, b.dir, roleP+"-p", "--role="+roleP, "--memory=512MiB")
	if err != nil {
		return nil, err
	}
	d, err := startSidecarEnv(ctx, one, b.opts.Binary, b.dir, roleD+"-d", "--role="+roleD, "--memory=512MiB", "--peer="+p.http)
	if err != nil {
		p.kill()
		return nil, err
	}
	both := &pair{p, d}
	for _, s := range []*sidecar{p, d} {
		if err := waitForPeer(ctx, s.http, "the other"); err != nil {
			both.close()
			return nil, err
		}
	}
	return both, nil
}

func (p *pair) close() {
	p.p.kill()
	p.d.kill()
}

// settle waits until a metric is at most a bound, and returns the last value.
func settle(ctx context.Context, http, name string, bound float64, patience time.Duration) (last float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = poll(ctx, name, func() (bool, error) {
		v, err := metric(http, name, "")
		if err != nil {
			return false, err
		}
		last = v
		return v <= bound, nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return last, nil // the row says what was left
	}
	return last, err
}
