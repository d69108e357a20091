package proxy

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"membrane/sidecar/roles"
)

const (
	breakAfter = 3               // failures in a row
	breakFor   = 5 * time.Second // then one attempt shows whether it is over
	maxPods    = 1024
	loadHeader = "X-Membrane-In-Flight"
	maxLoad    = 1 << 20
)

// pod is what this node knows of another that may prefill.
type pod struct {
	Pod
	breaker  *gobreaker.TwoStepCircuitBreaker[struct{}]
	mine     atomic.Int64 // requests of this node under way there
	reported atomic.Int64 // requests under way there, as it said last
	busyTil  atomic.Int64 // Unix nanoseconds
	suspect  atomic.Bool
}

// errExcluded ends an attempt that says nothing about the pod.
var errExcluded = errors.New("this says nothing about the pod")

func newPod(p Pod) *pod {
	return &pod{Pod: p, breaker: gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name: p.Addr, MaxRequests: 1, Timeout: breakFor,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= breakAfter },
		IsExcluded:  func(err error) bool { return errors.Is(err, errExcluded) },
	})}
}

func (p *pod) load() int64 { return max(p.mine.Load(), p.reported.Load()) }

func (p *pod) out(now time.Time) bool {
	return p.suspect.Load() || p.breaker.State() == gobreaker.StateOpen || now.UnixNano() < p.busyTil.Load()
}

// pods remembers how the others did.
type pods struct {
	list func() []Pod

	mu sync.Mutex
	by map[string]*pod // by address
}

func newPods(list func() []Pod) *pods { return &pods{list: list, by: make(map[string]*pod)} }

// prefilling returns the pods that may prefill for a node of that role: those
// that do nothing else, and if there are none and the node does not prefill
// itself, those that do both. named is everybody, to look up a pod that a router
// names.
func (p *pods) prefilling(role roles.Role) (best, named []*pod) {
	list := p.list()
	p.mu.Lock()
	defer p.mu.Unlock()
	alive := make(map[string]*pod, len(list))
	var both []*pod
	for _, one := range list[:min(len(list), maxPods)] {
		known := p.by[one.Addr]
		if known == nil || known.Name != one.Name {
			known = newPod(one)
		}
		known.suspect.Store(one.Suspect)
		alive[one.Addr] = known
		if !one.Role.Serves(roles.Prefill) {
			continue
		}
		named = append(named, known)
		if one.Role.Serves(roles.Decode) {
			both = append(both, known)
		} else {
			best = append(best, known)
		}
	}
	p.by = alive
	if len(best) == 0 && !role.Serves(roles.Prefill) {
		best = both
	}
	return best, named
}

// alive reports whether the mesh still has the pod.
func (p *pods) alive(one *pod) bool {
	for _, o := range p.list() {
		if o.Name == one.Name && o.Addr == one.Addr {
			return true
		}
	}
	return false
}

// broken returns how many breakers are open.
func (p *pods) broken() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.by {
		if one.breaker.State() == gobreaker.StateOpen {
			n++
		}
	}
	return n
}

// choose returns the pod that is done first by a guess: it computes what it does
// not hold, after the requests that are under way there, each taken to be like
// this one. nil when all have been tried or are out.
func choose(list []*pod, tried map[*pod]bool, prefix Prefix, prompt int) (best *pod) {
	now := time.Now()
	least := 0.0
	for _, p := range list {
		if tried[p] || p.out(now) {
			continue
		}
		held := 0
		if prefix != nil && p.Name != "" {
			held = min(prefix.At(p.Name), prompt)
		}
		// Never quite nothing, so that load counts between pods that hold all.
		cost := float64(prompt-held) + float64(p.load())*float64(prompt) + 1
		if best == nil || cost < least {
			best, least = p, cost
		}
	}
	return best
}
