package replay

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// Options are what a replay is about. Zero fields mean the defaults.
type Options struct {
	// Fractions are the cache sizes as parts of the distinct blocks of a
	// trace. Default 0.05, 0.1, 0.2, 0.4.
	Fractions []float64
	// Policies names which to replay. Default: all.
	Policies []string
	// PrefillRate is how many tokens a second are computed (default 8000),
	// LoadRate how many are loaded from the cache (default 200,000: 128 KiB a
	// token at 26 GB/s). The first token of a request comes after its loaded
	// tokens over the one plus its other tokens over the other.
	PrefillRate, LoadRate float64
	// TokenBytes is the KV of one token in bytes, for bytes moved. Default
	// 131,072 (32 layers, 8 KV heads of 128, 16 bits).
	TokenBytes int64
	// Progress is told of each finished cell; nil tells nobody.
	Progress func(string)
}

// Limits of Options.
const (
	minFraction = 0.0001
	maxRate     = 1e12
)

func (o Options) fill() (Options, error) {
	if len(o.Fractions) == 0 {
		o.Fractions = []float64{0.05, 0.1, 0.2, 0.4}
	}
	for _, f := range o.Fractions {
		if !(f >= minFraction && f <= 1) {
			return o, fmt.Errorf("cannot replay with a cache of %v of the footprint: not between %v and 1", f, minFraction)
		}
	}
	for _, r := range []struct {
		name  string
		value *float64
		def   float64
	}{{"PrefillRate", &o.PrefillRate, 8000}, {"LoadRate", &o.LoadRate, 200_000}} {
		if *r.value == 0 {
			*r.value = r.def
		}
		if !(*r.value > 0 && *r.value <= maxRate) {
			return o, fmt.Errorf("cannot replay with %s %v tokens a second: not between 0 and %g", r.name, *r.value, maxRate)
		}
	}
	if o.TokenBytes == 0 {
		o.TokenBytes = 128 << 10
	}
	if o.TokenBytes < 1 || o.TokenBytes > 1<<30 {
		return o, fmt.Errorf("cannot replay with TokenBytes %d: not between 1 and %d", o.TokenBytes, 1<<30)
	}
	var known []string
	for _, m := range policies() {
		known = append(known, m.name)
	}
	if len(o.Policies) == 0 {
		o.Policies = known
	}
	for _, p := range o.Policies {
		if !slices.Contains(known, p) {
			return o, fmt.Errorf("cannot replay with policy %q: not one of %v", p, known)
		}
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	return o, nil
}

// Cell is one trace played against one policy of one size.
type Cell struct {
	Trace    string  `json:"trace"`
	Fraction float64 `json:"fraction"` // of the distinct blocks
	Blocks   int     `json:"blocks"`   // what the cache may hold
	Policy   string  `json:"policy"`
	// HitRatio is loaded tokens over all input tokens.
	HitRatio  float64 `json:"hit_ratio"`
	HitTokens int64   `json:"hit_tokens"`
	// Loaded and Stored are bytes of KV moved out of and into the cache.
	Loaded int64 `json:"loaded_bytes"`
	Stored int64 `json:"stored_bytes"`
	// Evictions counts blocks that left or were refused.
	Evictions uint64 `json:"evictions"`
	// Refused counts stores that membrane refused, for want of room.
	Refused uint64 `json:"refused,omitempty"`
	// First tokens, modelled, in seconds.
	TTFTMean float64 `json:"ttft_mean_s"`
	TTFTP50  float64 `json:"ttft_p50_s"`
	TTFTP99  float64 `json:"ttft_p99_s"`
	// Elapsed is how long the replay took.
	Elapsed time.Duration `json:"elapsed_ns"`
}

// TraceReport is a trace with its cells.
type TraceReport struct {
	Name        string `json:"name"`
	About       string `json:"about"`
	BlockTokens int    `json:"block_tokens"`
	Facts       Facts  `json:"facts"`
	Cells       []Cell `json:"cells"`
}

// Run plays every trace against every policy at every size, one after the
// other, as fast as it goes.
func Run(ctx context.Context, traces []*Trace, opts Options) (Report, error) {
	opts, err := opts.fill()
	if err != nil {
		return Report{}, err
	}
	r := Report{PrefillRate: opts.PrefillRate, LoadRate: opts.LoadRate, TokenBytes: opts.TokenBytes}
	for _, m := range policies() {
		if slices.Contains(opts.Policies, m.name) {
			r.Policies = append(r.Policies, PolicyAbout{m.name, m.about})
		}
	}
	for _, t := range traces {
		out := TraceReport{Name: t.Name, About: t.About, BlockTokens: t.BlockTokens, Facts: t.Facts()}
		for _, f := range opts.Fractions {
			capacity := max(1, int(f*float64(out.Facts.Distinct)))
			for _, m := range policies() {
				if !slices.Contains(opts.Policies, m.name) {
					continue
				}
				cell, err := play(ctx, t, m, capacity, opts)
				if err != nil {
					return r, fmt.Errorf("cannot replay %q against %s: %w", t.Name, m.name, err)
				}
				cell.Trace, cell.Fraction = t.Name, f
				out.Cells = append(out.Cells, cell)
				opts.Progress(fmt.Sprintf("%s, %g %% of %d blocks, %s: %.4f", t.Name, 100*f, out.Facts.Distinct, m.name, cell.HitRatio))
			}
		}
		r.Traces = append(r.Traces, out)
	}
	r.judge()
	return r, nil
}

func play(ctx context.Context, t *Trace, m maker, capacity int, opts Options) (cell Cell, err error) {
	p, err := m.make(t, capacity)
	if err != nil {
		return cell, err
	}
	defer func() {
		if closeErr := p.close(); err == nil {
			err = closeErr
		}
	}()
	cell = Cell{Policy: m.name, Blocks: capacity}
	began := time.Now()
	first := make([]float64, 0, len(t.Requests))
	blockBytes := int64(t.BlockTokens) * opts.TokenBytes
	var input int64
	for i := range t.Requests {
		if i%256 == 0 && ctx.Err() != nil {
			return cell, ctx.Err()
		}
		req := &t.Requests[i]
		held, err := p.request(req.Blocks)
		if err != nil {
			return cell, err
		}
		hit := held * t.BlockTokens
		input += int64(req.Input)
		cell.HitTokens += int64(hit)
		cell.Loaded += int64(held) * blockBytes
		cell.Stored += int64(len(req.Blocks)-held) * blockBytes
		first = append(first, float64(hit)/opts.LoadRate+float64(req.Input-hit)/opts.PrefillRate)
	}
	cell.Elapsed = time.Since(began)
	cell.Evictions = p.evictions()
	if n, ok := p.(*node); ok {
		cell.Refused = n.refused
	}
	cell.HitRatio = float64(cell.HitTokens) / float64(max(input, 1))
	for _, f := range first {
		cell.TTFTMean += f / float64(len(first))
	}
	slices.Sort(first)
	cell.TTFTP50, cell.TTFTP99 = quantile(first, 0.5), quantile(first, 0.99)
	return cell, nil
}

// quantile returns the nearest sample of a sorted list.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
