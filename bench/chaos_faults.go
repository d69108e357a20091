package bench

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// faultKind is one way to hurt a member.
type faultKind int

const (
	killSidecar    faultKind = iota // SIGKILL, started again later
	stopSidecar                     // SIGSTOP, SIGCONT later
	restartSidecar                  // SIGTERM, and started again when it has ended
	killEngine
	stopEngine
	faultKinds
)

var faultNames = [faultKinds]string{"kill_sidecar", "stop_sidecar", "restart_sidecar", "kill_engine", "stop_engine"}

func (k faultKind) String() string { return faultNames[k] }

func (k faultKind) ofEngine() bool { return k == killEngine || k == stopEngine }

// ends reports whether the process does not survive the fault.
func (k faultKind) ends() bool { return k != stopSidecar && k != stopEngine }

// fault hurts a member, healed after lasts: sidecar number target, or engine
// number target.
type fault struct {
	at, lasts time.Duration // from the start of the faults
	kind      faultKind
	target    int
}

func (f fault) String() string {
	letter := "n"
	if f.kind.ofEngine() {
		letter = "e"
	}
	return fmt.Sprintf("%s %s%d for %s", f.kind, letter, f.target+1, f.lasts.Round(time.Millisecond))
}

const (
	chaosNodes          = 3
	chaosEnginesPerNode = 2
	chaosEngines        = chaosNodes * chaosEnginesPerNode

	// faultMargin is how long a member may need to be itself again.
	faultMargin = 2 * time.Second
	// maxSidecarsHurt leaves one sidecar that works at every moment.
	maxSidecarsHurt = 2
)

// longest is the longest that a fault of a kind lasts. Sidecars are stopped
// for longer than gossip needs to miss them, engines for longer than a lease.
var longest = [faultKinds]time.Duration{5 * time.Second, 8 * time.Second, time.Second, 2 * time.Second, 4 * time.Second}

// makeFaults returns the faults of a run of the given length in the order of
// their start, the same for the same seed. Each kind comes once before any
// comes twice. Of the two engines of a sidecar one is always well, and one of
// the sidecars; the last sidecar and the last engine are stopped at most, so
// that their memory can be watched from the beginning to the end.
func makeFaults(seed uint64, length time.Duration) []fault {
	rng := rand.New(rand.NewPCG(seed, 3))
	var all []fault
	first := rng.Perm(int(faultKinds))
	for at := span(rng, 300*time.Millisecond, time.Second); ; at += span(rng, 300*time.Millisecond, 3*time.Second) {
		f := fault{at: at, kind: faultKind(rng.IntN(int(faultKinds)))}
		if len(first) > 0 {
			f.kind = faultKind(first[0])
		}
		f.lasts = span(rng, 100*time.Millisecond, longest[f.kind])
		targets := wellTargets(all, f)
		if f.at+f.lasts+faultMargin > length {
			return all
		}
		if len(targets) == 0 {
			continue // all are hurt already; later
		}
		f.target = targets[rng.IntN(len(targets))]
		if len(first) > 0 {
			first = first[1:]
		}
		all = append(all, f)
	}
}

func span(rng *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(rng.Int64N(int64(high-low)))
}

// wellTargets returns the members that may have fault f at its time.
func wellTargets(before []fault, f fault) []int {
	var sidecarHurt [chaosNodes]bool
	var engineHurt [chaosEngines]bool
	hurt := 0
	for _, b := range before {
		if b.at+b.lasts+faultMargin <= f.at {
			continue
		}
		if b.kind.ofEngine() {
			engineHurt[b.target] = true
		} else {
			sidecarHurt[b.target] = true
			hurt++
		}
	}
	var out []int
	if f.kind.ofEngine() {
		for e := range chaosEngines {
			sibling := e ^ 1
			if !engineHurt[e] && !engineHurt[sibling] && !(f.kind.ends() && e == chaosEngines-1) {
				out = append(out, e)
			}
		}
		return out
	}
	for n := range chaosNodes {
		if !sidecarHurt[n] && hurt < maxSidecarsHurt && !(f.kind.ends() && n == chaosNodes-1) {
			out = append(out, n)
		}
	}
	return out
}
