package roles

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// The times that an auto node keeps.
const (
	// DefaultHold is how long the decision must have been the same before the
	// node follows it.
	DefaultHold = 30 * time.Second
	// DefaultPause is the least time between two changes.
	DefaultPause = time.Minute

	defaultEvery = time.Second
	defaultDrain = 30 * time.Second
)

// Config says what a node's role is or how it is found.
type Config struct {
	// Setting is prefill, decode, both or auto.
	Setting string
	// Self and Live are what an auto node decides by: itself, and the auto
	// nodes that it believes alive. Live is asked at each look.
	Self func() Node
	Live func() []Node
	// Ratio is the part of the auto nodes that should prefill, 0 to 1. It is
	// asked at each look, so that it may follow a measurement; whoever supplies
	// one sees to it that it does not swing.
	Ratio func() float64
	// RatioWhy says what Ratio follows, at most 32 bytes, or "". May be nil.
	RatioWhy func() string
	// Publish tells others of a change. May be nil.
	Publish func(State)
	// Hold and Pause default to DefaultHold and DefaultPause, Every (between
	// looks) to 1 s, Drain (for requests of a phase that is given up) to 30 s.
	Hold, Pause, Every, Drain time.Duration
	Log                       zerolog.Logger
}

// State is a node's role as people are shown it.
type State struct {
	Role Role
	// Auto: the node chose it by itself.
	Auto bool
	// Since is when it took the role.
	Since time.Time
	Why   string
	// Next is the role that it changes to while the phase that it gives up
	// drains; "" else.
	Next Role
	// Changes counts the changes so far.
	Changes uint64
}

// Keeper holds a node's role. Run follows the decision of an auto node; a fixed
// role needs no Run.
type Keeper struct {
	cfg Config

	mu       sync.Mutex
	state    State
	inFlight [phases]int

	// Of an auto node.
	want       Decision
	wantSince  time.Time
	changed    time.Time // zero before the first change
	drainSince time.Time
}

// NotServedError says that this node does not serve a phase.
type NotServedError struct {
	Phase Phase
	Role  Role
	Next  Role // "" unless the role changes just now
}

// Error says which nodes to ask instead.
func (e *NotServedError) Error() string {
	if e.Next != "" {
		return fmt.Sprintf("this node's role changes from %s to %s: send %s to a node with the role %s or both", e.Role, e.Next, e.Phase, e.Phase)
	}
	return fmt.Sprintf("this node's role is %s: send %s to a node with the role %s or both", e.Role, e.Phase, e.Phase)
}

// New returns a keeper with the fixed role, or with the role both for auto:
// whoever has just started has nobody to share the work with yet.
func New(cfg Config) (*Keeper, error) {
	if err := Check(cfg.Setting); err != nil {
		return nil, fmt.Errorf("cannot keep role %q: %w", cfg.Setting, err)
	}
	auto := cfg.Setting == Auto
	if auto && (cfg.Self == nil || cfg.Live == nil || cfg.Ratio == nil) {
		return nil, errors.New("cannot keep role auto: Self, Live and Ratio are needed")
	}
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{{&cfg.Hold, DefaultHold}, {&cfg.Pause, DefaultPause}, {&cfg.Every, defaultEvery}, {&cfg.Drain, defaultDrain}} {
		if *d.value == 0 {
			*d.value = d.def
		}
	}
	k := &Keeper{cfg: cfg, state: State{Role: Role(cfg.Setting), Since: time.Now(), Why: "set with --role"}}
	if auto {
		k.state = State{Role: RoleBoth, Auto: true, Since: time.Now(), Why: "no other auto node is alive"}
	}
	return k, nil
}

// Run looks at the members until ctx ends. It returns at once for a fixed role.
func (k *Keeper) Run(ctx context.Context) {
	if k.cfg.Setting != Auto {
		return
	}
	ticker := time.NewTicker(k.cfg.Every)
	defer ticker.Stop()
	for {
		k.look(time.Now())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// State returns the role of now.
func (k *Keeper) State() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state
}

// InFlight returns how many requests of a phase are under way.
func (k *Keeper) InFlight(p Phase) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.inFlight[p]
}

// Begin notes that a request of a phase is under way until end is called, or
// returns a [*NotServedError]. While a phase drains, its new requests are
// refused and those of the next role are taken already.
func (k *Keeper) Begin(p Phase) (end func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	serving := k.state.Role
	if k.state.Next != "" {
		serving = k.state.Next
	}
	if !serving.Serves(p) {
		return nil, &NotServedError{Phase: p, Role: k.state.Role, Next: k.state.Next}
	}
	k.inFlight[p]++
	return sync.OnceFunc(func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.inFlight[p]--
	}), nil
}

// look takes one look at the members and follows an answer that has held.
func (k *Keeper) look(now time.Time) {
	d := Decide(k.cfg.Self(), k.cfg.Live(), k.cfg.Ratio())
	if k.cfg.RatioWhy != nil {
		if why := k.cfg.RatioWhy(); why != "" && d.Role != RoleBoth {
			d.Why = cut(d.Why+", "+why, maxWhy)
		}
	}
	k.mu.Lock()
	changed := k.step(d, now)
	state := k.state
	k.mu.Unlock()
	if !changed {
		return
	}
	k.cfg.Log.Info().Str("role", string(state.Role)).Str("why", state.Why).Msg("this node's role has changed")
	if k.cfg.Publish != nil {
		k.cfg.Publish(state)
	}
}

// maxWhy is the longest reason, in bytes: it is a tag of the mesh.
const maxWhy = 64

func cut(s string, most int) string { return s[:min(len(s), most)] }

// step moves on to now and reports whether the role has changed. It needs k.mu.
func (k *Keeper) step(d Decision, now time.Time) bool {
	if d.Role != k.want.Role {
		k.wantSince = now
	}
	k.want = d
	if k.state.Next != "" && d.Role != k.state.Next {
		k.state.Next = "" // the answer changed while the old phase drained: it goes on
	}
	switch {
	case d.Role == k.state.Role:
		k.state.Why = d.Why
		return false
	case now.Sub(k.wantSince) < k.cfg.Hold, !k.changed.IsZero() && now.Sub(k.changed) < k.cfg.Pause:
		return false
	case k.state.Next == "":
		k.state.Next, k.drainSince = d.Role, now
	}
	for p := range phases {
		if !d.Role.Serves(p) && k.inFlight[p] > 0 && now.Sub(k.drainSince) < k.cfg.Drain {
			return false
		}
	}
	k.state = State{Role: d.Role, Auto: true, Since: now, Why: d.Why, Changes: k.state.Changes + 1}
	k.changed = now
	return true
}
