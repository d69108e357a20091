package bench

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"
)

// load is an open-loop load: requests are sent when they are due, whether or
// not earlier ones have been answered.
type load struct {
	client *http.Client
	base   string // http://HOST:PORT
	key    string // API key, or ""
	model  string
	// answer is how many tokens are generated.
	answer int
	// inFlight is the most requests that are under way at a time. One that is
	// due beyond them waits, and its wait is part of its latency.
	inFlight int
	// timeout ends a request, counted from when it was due.
	timeout time.Duration
}

// outcome is what became of one request. Times count from when it was due, not
// from when it was sent: a server that stalls holds back what comes after it,
// and leaving out that wait (coordinated omission) would hide the stall.
type outcome struct {
	due    time.Duration // since the schedule's begin
	sent   time.Duration
	first  time.Duration // the first token
	end    time.Duration // the last token, or the failure
	gaps   []time.Duration
	tokens []uint32
	count  int // of tokens
	prompt int
	cached int
	err    error
}

// run sends a schedule and returns what became of every request, in its order.
// It returns an error only when ctx ends.
func (l load) run(ctx context.Context, schedule []arrival) ([]outcome, error) {
	begin := time.Now()
	out := make([]outcome, len(schedule))
	slots := make(chan struct{}, l.inFlight)
	var under sync.WaitGroup
	defer under.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i, a := range schedule {
		timer.Reset(time.Until(begin.Add(a.at)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		under.Go(func() {
			defer func() { <-slots }()
			out[i] = l.one(ctx, begin.Add(a.at), a)
		})
	}
	under.Wait()
	return out, ctx.Err()
}

var errNoToken = errors.New("the answer has no token")

func (l load) one(ctx context.Context, due time.Time, a arrival) outcome {
	o := outcome{due: a.at, sent: time.Since(due)}
	ctx, cancel := context.WithDeadline(ctx, due.Add(l.timeout))
	defer cancel()
	got, err := streamCompletion(ctx, l.client, l.base, l.key, newCompletion(l.model, a.prompt, l.answer))
	o.end, o.err = time.Since(due), err
	o.tokens, o.count, o.prompt, o.cached = got.tokens, len(got.arrivals), got.prompt, got.cached
	for i, at := range got.arrivals {
		if i == 0 {
			o.first = at.Sub(due)
		} else {
			o.gaps = append(o.gaps, at.Sub(got.arrivals[i-1]))
		}
		if err == nil {
			o.end = at.Sub(due)
		}
	}
	if err == nil && o.count == 0 {
		o.err = errNoToken
	}
	return o
}
