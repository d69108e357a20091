package bench

import (
	"slices"
	"time"
)

// ServeTargets are the latencies that make an answer a good one. They count
// from when its request was due.
type ServeTargets struct {
	// TTFT bounds the time to the first token, ITL the mean time between
	// tokens.
	TTFT time.Duration
	ITL  time.Duration
}

// Percentiles of a latency, in milliseconds.
type Percentiles struct {
	P50  float64 `json:"p50_ms"`
	P90  float64 `json:"p90_ms"`
	P99  float64 `json:"p99_ms"`
	Max  float64 `json:"max_ms"`
	Mean float64 `json:"mean_ms"`
}

func percentiles(s samples) Percentiles {
	if len(s) == 0 {
		return Percentiles{}
	}
	sum := 0.0
	for _, v := range s {
		sum += v
	}
	return Percentiles{P50: s.quantile(0.5), P90: s.quantile(0.9), P99: s.quantile(0.99), Max: slices.Max(s), Mean: sum / float64(len(s))}
}

// ServeArm is what one system under test did with the schedule.
type ServeArm struct {
	Name string `json:"name"`
	// Why is why the arm was not run; then there are no figures.
	Why      string `json:"why,omitempty"`
	Requests int    `json:"requests"`
	Failed   int    `json:"failed"`
	// FirstError is what the first request that failed said.
	FirstError string `json:"first_error,omitempty"`
	// Differ is how many answers have other tokens than those of the first arm
	// that was run, -1 where the servers give no ids.
	Differ int `json:"differ"`
	// TTFT, ITL and EndToEnd count from when a request was due. A request that
	// failed before its first token is in TTFT with the time until it failed.
	TTFT     Percentiles `json:"ttft"`
	ITL      Percentiles `json:"itl"`
	EndToEnd Percentiles `json:"end_to_end"`
	// HeldBack is how long requests waited in the generator, beyond the most
	// that may be in flight.
	HeldBack Percentiles `json:"held_back"`
	// RequestsS and TokensS are answers and their tokens a second, GoodS answers
	// a second that met the targets, GoodShare their share of all requests.
	RequestsS float64 `json:"requests_s"`
	TokensS   float64 `json:"tokens_s"`
	GoodS     float64 `json:"goodput_s"`
	GoodShare float64 `json:"good_share"`
	// CachedShare is the share of prompt tokens that the server says it did not
	// compute, from its own cache or another.
	CachedShare float64 `json:"cached_share"`
}

func (o outcome) good(t ServeTargets) bool {
	mean := time.Duration(0)
	if o.count > 1 {
		mean = (o.end - o.first) / time.Duration(o.count-1)
	}
	return o.err == nil && o.first <= t.TTFT && mean <= t.ITL
}

// summarize returns the figures of one arm. Each element of rounds is one run
// of the schedule.
func summarize(name string, rounds [][]outcome, targets ServeTargets) ServeArm {
	arm := ServeArm{Name: name}
	var ttft, itl, whole, held samples
	var length time.Duration
	tokens, good, prompt, cached := 0, 0, 0, 0
	for _, round := range rounds {
		var last time.Duration
		for _, o := range round {
			arm.Requests++
			last = max(last, o.due+o.end)
			held = append(held, millis(o.sent))
			tokens, prompt, cached = tokens+o.count, prompt+o.prompt, cached+o.cached
			for _, g := range o.gaps {
				itl = append(itl, millis(g))
			}
			if o.good(targets) {
				good++
			}
			first := o.first
			if o.err != nil {
				arm.Failed++
				if arm.FirstError == "" {
					arm.FirstError = o.err.Error()
				}
				if o.count == 0 {
					first = o.end
				}
			} else {
				whole = append(whole, millis(o.end))
			}
			ttft = append(ttft, millis(first))
		}
		length += last
	}
	arm.TTFT, arm.ITL, arm.EndToEnd, arm.HeldBack = percentiles(ttft), percentiles(itl), percentiles(whole), percentiles(held)
	if s := length.Seconds(); s > 0 {
		arm.RequestsS, arm.TokensS, arm.GoodS = float64(arm.Requests-arm.Failed)/s, float64(tokens)/s, float64(good)/s
	}
	arm.GoodShare = share(good, arm.Requests)
	arm.CachedShare = share(cached, prompt)
	return arm
}

func share(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// differ returns how many answers of a round have other tokens than those of
// the reference, -1 when there are no ids to compare.
func differ(round, reference []outcome) int {
	n, compared := 0, false
	for i, o := range round {
		if o.err != nil || reference[i].err != nil || len(o.tokens) == 0 || len(reference[i].tokens) == 0 {
			continue
		}
		compared = true
		if !slices.Equal(o.tokens, reference[i].tokens) {
			n++
		}
	}
	if !compared {
		return -1
	}
	return n
}
