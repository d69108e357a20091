package replay

import (
	"errors"
	"fmt"
	"iter"
	"time"
)

// Request is one prompt of a trace.
type Request struct {
	// At is when it arrives, from the start of the trace.
	At time.Duration
	// Session groups requests of one conversation or task.
	Session uint64
	// Blocks names the full blocks of the prompt, first to last. Equal names
	// mean equal prompts up to the end of the block.
	Blocks []uint64
	// Input and Output are lengths in tokens. Input is at least that of Blocks.
	Input, Output int
}

// Trace is requests in the order in which they arrive.
type Trace struct {
	Name string
	// About says where the trace is from or with which parameters it was made.
	About string
	// BlockTokens is the length of a block in tokens.
	BlockTokens int
	Requests    []Request
}

// Facts are what a trace is before any cache sees it.
type Facts struct {
	Requests int           `json:"requests"`
	Span     time.Duration `json:"span_ns"`
	// Sessions counts conversations or tasks.
	Sessions int `json:"sessions"`
	// Input and Output are sums over all requests, in tokens.
	Input  int64 `json:"input_tokens"`
	Output int64 `json:"output_tokens"`
	// Blocks counts blocks of all requests, Distinct the different ones: the
	// footprint.
	Blocks   int64 `json:"blocks"`
	Distinct int   `json:"distinct_blocks"`
	// Longest is the most blocks of one request.
	Longest int `json:"longest_blocks"`
	// Reusable is the hit ratio in tokens of a cache without bounds.
	Reusable float64 `json:"reusable"`
}

// ErrNoRequests is returned for a trace without requests.
var ErrNoRequests = errors.New("no requests")

// Facts computes the facts of a trace.
func (t *Trace) Facts() Facts {
	f := Facts{Requests: len(t.Requests)}
	seen := make(map[uint64]struct{})
	sessions := make(map[uint64]struct{})
	var hit int64
	for i := range t.Requests {
		r := &t.Requests[i]
		f.Span = max(f.Span, r.At)
		f.Input += int64(r.Input)
		f.Output += int64(r.Output)
		f.Blocks += int64(len(r.Blocks))
		f.Longest = max(f.Longest, len(r.Blocks))
		sessions[r.Session] = struct{}{}
		prefix := true
		for _, b := range r.Blocks {
			_, ok := seen[b]
			if prefix = prefix && ok; prefix {
				hit++
			}
			seen[b] = struct{}{}
		}
	}
	f.Sessions, f.Distinct = len(sessions), len(seen)
	if f.Input > 0 {
		f.Reusable = float64(hit) * float64(t.BlockTokens) / float64(f.Input)
	}
	return f
}

// Collect makes a trace of the first n requests of a sequence, all when n is
// 0. It fails with [ErrNoRequests] when there are none.
func Collect(name, about string, blockTokens, n int, requests iter.Seq[Request]) (*Trace, error) {
	t := &Trace{Name: name, About: about, BlockTokens: blockTokens}
	for r := range requests {
		t.Requests = append(t.Requests, r)
		if len(t.Requests) == n {
			break
		}
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("cannot use trace %q: %w", name, ErrNoRequests)
	}
	return t, nil
}

// chain names the block that follows the block prev and has the given content.
// It mixes 64 bits, so that among the 10^8 blocks of a large trace two have one
// name with a chance below 0.001.
func chain(prev, content uint64) uint64 { return mix(mix(prev+0x9e3779b97f4a7c15) ^ content) }

// mix is the finaliser of SplitMix64 (Steele, Lea, Flood, 2014), a bijection.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
