package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	abortWorkers = 16
	abortPrompts = 16
	abortTokens  = 512
	// abortPatience is how long what a request leaves may take to go: keep-alive
	// connections and their goroutines end by then.
	abortPatience = time.Minute
)

var errEnough = errors.New("the client has seen enough")

// aborts abandons many requests: decodes at once, after their first token and
// while they follow a prefill, and prefills. Afterwards goroutines, pins and
// bytes must be what they were. All are of the same few prompts, whose pages
// are here before, so that bytes can be compared.
func (b *pd) aborts(ctx context.Context) error {
	nodes, err := b.pair(ctx, "prefill", "decode")
	if err != nil {
		return err
	}
	defer nodes.close()
	prompts := make([][]int, abortPrompts)
	handles := make([]string, abortPrompts)
	client := newPDClient()
	warm := func() error { // and all pins go, since every handle is pulled
		defer client.close()
		for i := range prompts {
			if prompts[i] == nil {
				prompts[i] = b.prompt(abortTokens)
			}
			var err error
			if handles[i], _, err = client.prefill(ctx, nodes.p.http, prompts[i], nil); err != nil {
				return err
			}
			if d := client.decode(ctx, nodes.d.http, handles[i], 1); d.err != nil {
				return d.err
			}
		}
		return nil
	}
	if err := warm(); err != nil {
		return err
	}
	kinds := []struct {
		metric, what, unit string
	}{
		{"go_goroutines", "goroutines", "goroutines"},
		{"membrane_cache_pins", "pins", "pins"},
		{"membrane_cache_resident_bytes", "bytes in the arena", "bytes"},
	}
	sides := []*sidecar{nodes.p, nodes.d}
	before := make(map[string]float64)
	for _, s := range sides {
		// The connections that warmed it up are to be gone.
		if _, err := settle(ctx, s.http, "membrane_requests_in_flight", 1, abortPatience); err != nil {
			return err
		}
		for _, k := range kinds {
			v, err := lowest(ctx, s.http, k.metric)
			if err != nil {
				return err
			}
			before[s.name+k.metric] = v
		}
	}
	b.opts.Progress(fmt.Sprintf("%d aborted requests", b.opts.Aborts))
	began := time.Now()
	b.abandon(ctx, nodes, prompts, handles)
	took := time.Since(began)
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := warm(); err != nil {
		return fmt.Errorf("after %d aborted requests: %w", b.opts.Aborts, err)
	}
	for _, k := range kinds {
		var was, is []float64
		for _, s := range sides {
			v, err := settle(ctx, s.http, k.metric, before[s.name+k.metric], abortPatience)
			if err != nil {
				return err
			}
			was, is = append(was, before[s.name+k.metric]), append(is, v)
		}
		left := leaked(was, is)
		row, err := (Row{Name: fmt.Sprintf("%s left by %d aborted requests", k.what, b.opts.Aborts), Unit: k.unit, Value: left, Min: left, Max: left}).judge(left, "<= 0")
		if err != nil {
			return err
		}
		b.report.Rows = append(b.report.Rows, row)
	}
	rate := float64(b.opts.Aborts) / took.Seconds()
	b.report.Rows = append(b.report.Rows, Row{Name: "aborted requests", Unit: "a second", Value: rate, Min: rate, Max: rate})
	return nil
}

// leaked returns what nodes have more than before. What one has less does not
// make up for another.
func leaked(before, after []float64) (sum float64) {
	for i := range before {
		sum += max(after[i]-before[i], 0)
	}
	return sum
}

// lowest returns the least of a gauge's values over some seconds, in which the
// connections of those who ask come and go.
func lowest(ctx context.Context, http, name string) (float64, error) {
	least, err := metric(http, name, "")
	for range 10 {
		if err != nil || ctx.Err() != nil {
			break
		}
		var v float64
		if v, err = settle(ctx, http, name, least-1, 50*time.Millisecond); err == nil {
			least = min(least, v)
		}
	}
	return least, errors.Join(err, ctx.Err())
}

// abandon sends the requests and gives each up at another moment.
func (b *pd) abandon(ctx context.Context, nodes *pair, prompts [][]int, handles []string) {
	var next atomic.Int64
	var workers sync.WaitGroup
	for range abortWorkers {
		workers.Go(func() {
			client := newPDClient()
			defer client.close()
			for i := int(next.Add(1)) - 1; i < b.opts.Aborts && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				one := func(patience time.Duration, f func(context.Context) error) {
					ctx, cancel := context.WithTimeout(ctx, patience)
					defer cancel()
					_ = f(ctx) // it fails, as it is to
				}
				prompt, handle := prompts[i%abortPrompts], handles[i%abortPrompts]
				decode := map[string]any{"request_id": "abort", "model_id": pdModel, "kv_handle": handle, "max_tokens": 64, "stream": true}
				prefill := map[string]any{"request_id": "abort", "model_id": pdModel, "token_ids": prompt, "stream": true}
				stop := func(pdEvent) error { return errEnough }
				at := time.Duration(i/4%10) * time.Millisecond
				switch i % 4 {
				case 0: // after the first token
					one(rigTimeout, func(ctx context.Context) error {
						return client.stream(ctx, nodes.d.http, "/disagg/decode", decode, stop)
					})
				case 1: // before any, or after some
					one(at, func(ctx context.Context) error {
						return client.stream(ctx, nodes.d.http, "/disagg/decode", decode, func(pdEvent) error { return nil })
					})
				case 2: // when the handle is known
					one(rigTimeout, func(ctx context.Context) error {
						return client.stream(ctx, nodes.p.http, "/disagg/prefill", prefill, stop)
					})
				case 3: // both halves, at any moment
					one(at, func(ctx context.Context) error {
						_, _, err := client.both(ctx, nodes.p.http, nodes.d.http, prompt, 64, true)
						return err
					})
				}
			}
		})
	}
	workers.Wait()
}
