package roles

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"
)

// Queues are how many requests of each phase wait.
type Queues struct{ Prefill, Decode int }

// Measured is an auto node as the balance sees it.
type Measured struct {
	// Role is what the node serves now, as far as it is known.
	Role   Role
	Queues Queues
}

// The times and the band of a balance.
const (
	// DefaultBalanceHold is how long one phase must have been behind before a
	// node more serves it.
	DefaultBalanceHold = 30 * time.Second
	// DefaultBalancePause is the least time between two steps: a node that
	// changes its role does so after DefaultHold, and others learn of it up to
	// 30 s later.
	DefaultBalancePause = 2 * time.Minute
	// balanceWindow is over what time queue lengths are averaged.
	balanceWindow = 15 * time.Second
	// One phase is behind when its queue for each of its nodes is above
	// balanceTimes the other's and balanceMore.
	balanceTimes = 2
	balanceMore  = 1

	firstRatio = 0.5
)

// BalanceConfig says how a balance measures.
type BalanceConfig struct {
	// Measure returns the live auto nodes with their queues, this one among
	// them, by ctx's deadline. Those that do not answer are left out.
	Measure func(ctx context.Context) []Measured
	// Every is between measurements; default 5 s. Hold and Pause default to
	// DefaultBalanceHold and DefaultBalancePause.
	Every, Hold, Pause time.Duration
}

// Balance makes the ratio of nodes that prefill follow the lengths of the
// queues, one node at a time: each node by itself, as [Decide] works by itself.
// A step is counted from the roles that the nodes have and not from this one's
// last step, so that nodes whose measurements differ do not drift apart.
//
// Ratio and State may be called by several goroutines at once; Run by one.
type Balance struct {
	cfg BalanceConfig

	mu      sync.Mutex
	state   BalanceState
	known   bool // there is a measurement
	looked  time.Time
	lean    int // +1: prefill is behind, -1: decode is
	since   time.Time
	changed time.Time // zero before the first step
}

// BalanceState is a balance as people are shown it.
type BalanceState struct {
	// Ratio is the part of the nodes that should prefill.
	Ratio float64
	// Prefill and Decode are the lengths of the queues, averaged over time, for
	// each node that serves the phase.
	Prefill, Decode float64
	// Steps counts the changes of the ratio.
	Steps uint64
	// Nodes is how many nodes the last measurement was of.
	Nodes int
}

// String says it in a few words, at most 32 bytes.
func (s BalanceState) String() string {
	return fmt.Sprintf("queues %s:%s", short(s.Prefill), short(s.Decode))
}

func short(v float64) string {
	if v >= 9.95 {
		return fmt.Sprintf("%.0f", min(v, 99999))
	}
	return fmt.Sprintf("%.1f", v)
}

// NewBalance returns a balance with half of the nodes in each phase.
func NewBalance(cfg BalanceConfig) *Balance {
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{{&cfg.Every, 5 * time.Second}, {&cfg.Hold, DefaultBalanceHold}, {&cfg.Pause, DefaultBalancePause}} {
		if *d.value == 0 {
			*d.value = d.def
		}
	}
	return &Balance{cfg: cfg, state: BalanceState{Ratio: firstRatio}}
}

// Run measures until ctx ends.
func (b *Balance) Run(ctx context.Context) {
	ticker := time.NewTicker(b.cfg.Every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		measure, cancel := context.WithTimeout(ctx, b.cfg.Every)
		nodes := b.cfg.Measure(measure)
		cancel()
		if ctx.Err() == nil {
			b.look(time.Now(), nodes)
		}
	}
}

// Ratio returns the part of the nodes that should prefill.
func (b *Balance) Ratio() float64 { return b.State().Ratio }

// State returns the last measurement and what follows from it.
func (b *Balance) State() BalanceState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}

// look takes a measurement into account.
func (b *Balance) look(now time.Time, nodes []Measured) {
	b.mu.Lock()
	defer b.mu.Unlock()
	prefill, decode := 0, 0 // nodes
	waiting := Queues{}
	for _, m := range nodes {
		switch m.Role {
		case RolePrefill:
			prefill++
		case RoleDecode:
			decode++
		}
		waiting.Prefill += max(m.Queues.Prefill, 0)
		waiting.Decode += max(m.Queues.Decode, 0)
	}
	n := len(nodes)
	weight := 1.0
	if b.known {
		weight = 1 - math.Exp(-float64(now.Sub(b.looked))/float64(balanceWindow))
	}
	b.known, b.looked, b.state.Nodes = n > 0, now, n
	b.state.Prefill += weight * (float64(waiting.Prefill)/float64(max(prefill, 1)) - b.state.Prefill)
	b.state.Decode += weight * (float64(waiting.Decode)/float64(max(decode, 1)) - b.state.Decode)
	lean := 0
	switch {
	case b.state.Prefill > balanceTimes*b.state.Decode+balanceMore:
		lean = 1
	case b.state.Decode > balanceTimes*b.state.Prefill+balanceMore:
		lean = -1
	}
	if lean != b.lean {
		b.lean, b.since = lean, now
	}
	// A node that has not chosen yet, or changes just now, is waited for.
	settled := prefill > 0 && decode > 0 && prefill+decode == n
	if lean == 0 || !settled || now.Sub(b.since) < b.cfg.Hold || !b.changed.IsZero() && now.Sub(b.changed) < b.cfg.Pause {
		return
	}
	if k := min(max(prefill+lean, 1), n-1); k != prefill {
		b.state.Ratio = float64(k) / float64(n)
		b.state.Steps++
		b.changed = now
	}
}
