package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// chaosTally counts requests. It is guarded by mu.
type chaosTally struct {
	mu sync.Mutex
	ChaosRequests
	problems []string
}

// maxProblems bounds how many problems are told in words; the others are
// counted.
const maxProblems = 20

func (t *chaosTally) problem(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.problems) < maxProblems {
		t.problems = append(t.problems, fmt.Sprintf(format, args...))
	}
}

func (t *chaosTally) count(f func(*ChaosRequests)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(&t.ChaosRequests)
}

func (t *chaosTally) snapshot() ChaosRequests {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ChaosRequests
}

const (
	// chaosGiveUp is when a request that has not ended is given up: it is
	// never reached unless something hangs.
	chaosGiveUp = time.Minute
	chaosPause  = 40 * time.Millisecond // at most, between two requests of a client
	chaosAborts = 40                    // one request in so many is given up by its client
	chaosHaste  = 60 * time.Millisecond // and within this time
)

// load has one client for each engine send requests for the given time, and
// returns when all have ended.
func (c *chaos) load(ctx context.Context, stream int, lasts time.Duration) {
	end := time.Now().Add(lasts)
	var wg sync.WaitGroup
	for e := range chaosEngines {
		pick := newPicker(c.opts.Seed, stream+e, len(c.leaves))
		wg.Go(func() {
			for time.Now().Before(end) && ctx.Err() == nil {
				leaf := c.leaves[pick.next()]
				var abort time.Duration
				if pick.rng.IntN(chaosAborts) == 0 {
					abort = time.Duration(pick.rng.Int64N(int64(chaosHaste)))
				}
				c.request(ctx, c.engines[e], leaf, abort)
				_ = pause(ctx, time.Duration(pick.rng.Int64N(int64(chaosPause))))
			}
		})
	}
	wg.Wait()
}

// replay asks for every prompt once more at one engine of each sidecar.
func (c *chaos) replay(ctx context.Context) {
	var wg sync.WaitGroup
	for n := range chaosNodes {
		wg.Go(func() {
			for _, leaf := range c.leaves {
				if ctx.Err() == nil {
					c.request(ctx, c.engines[n*chaosEnginesPerNode], leaf, 0)
				}
			}
		})
	}
	wg.Wait()
}

// request sends one prompt until it is answered: again when its engine was
// killed meanwhile, and not again after abort, unless that is 0.
func (c *chaos) request(ctx context.Context, engine *member, leaf leafPrompt, abort time.Duration) {
	c.tally.count(func(r *ChaosRequests) { r.Sent++ })
	for {
		again := c.attempt(ctx, engine, leaf, abort)
		if !again || ctx.Err() != nil {
			return
		}
		c.tally.count(func(r *ChaosRequests) { r.SentAgain++ })
	}
}

func (c *chaos) attempt(ctx context.Context, engine *member, leaf leafPrompt, abort time.Duration) (again bool) {
	addr, generation, err := engine.current(ctx)
	if err != nil {
		return false // the run was given up
	}
	patience := chaosGiveUp
	if abort > 0 {
		patience = abort
	}
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	began, stopped := time.Now(), engine.stoppedFor()
	a, err := complete(limited, c.client, addr, leaf.prompt, chaosMaxTokens)
	took := time.Since(began)
	frozen := engine.stoppedFor() - stopped
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return false
	case abort > 0 && errors.Is(limited.Err(), context.DeadlineExceeded):
		c.tally.count(func(r *ChaosRequests) { r.Aborted++ })
		return false
	case engine.gone(generation):
		return true
	default:
		c.tally.count(func(r *ChaosRequests) { r.Failed++ })
		c.tally.problem("%s: %v", engine.name, err)
		return false
	}
	c.judge(engine, leaf, a, took, frozen)
	return false
}

// judge compares an answer with the right one and its time with the bounds.
func (c *chaos) judge(engine *member, leaf leafPrompt, a answer, took, frozen time.Duration) {
	right := slices.Equal(a.tokens, leaf.want)
	// Its engine was stopped: that is the engine's time, not the sidecar's.
	load, first, total := max(a.load-frozen, 0), max(a.firstToken-frozen, 0), max(took-frozen, 0)
	late := load > chaosLoadBound || first > chaosFirstBound || total > chaosBound
	c.tally.count(func(r *ChaosRequests) {
		r.PromptTokens += len(leaf.prompt)
		r.ReusedTokens += a.reused
		switch {
		case a.peerPages > 0:
			r.PeerHits++
		case a.reused > 0:
			r.LocalHits++
		}
		if frozen > 0 {
			r.EngineStopped++
		}
		if a.reason != "" && a.reason != "none" {
			if r.MissReasons == nil {
				r.MissReasons = make(map[string]int)
			}
			r.MissReasons[a.reason]++
		}
		r.MaxLoadMS = max(r.MaxLoadMS, millis(load))
		r.MaxFirstTokenMS = max(r.MaxFirstTokenMS, millis(first))
		r.MaxMS = max(r.MaxMS, millis(total))
		if late {
			r.Late++
		}
		if right {
			r.Right++
		} else {
			r.Wrong++
		}
	})
	if !right {
		c.tally.problem("%s: tokens %v instead of %v, %d of %d reused, %d pages of peers", engine.name, a.tokens, leaf.want, a.reused, len(leaf.prompt), a.peerPages)
	}
	if late {
		c.tally.problem("%s: waited %s for its sidecar, first token after %s, all after %s (stopped for %s of it, %d reused, %q)", engine.name, a.load, a.firstToken, took, frozen, a.reused, a.reason)
	}
}

// newChaosClient returns a client that keeps no connection: an engine that was
// killed and one that took its port would look like one otherwise.
func newChaosClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}
