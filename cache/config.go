package cache

import (
	"fmt"
	"time"
)

// Limits on what callers may ask for.
const (
	// MaxSpaces is the most (tenant, namespace) pairs that one cache knows in
	// its life, MaxTenantSpaces the most of one tenant: callers choose the
	// names, and one tenant's must not use up the others'.
	MaxSpaces       = 1 << 16
	MaxTenantSpaces = MaxSpaces / 8
	// MaxTTL is the longest life of a lease or pin.
	MaxTTL = time.Hour
)

// Config says how large a cache is and how its bytes are divided. A zero
// fraction or duration means the default.
type Config struct {
	// Budget is the size of the arena in bytes, rounded up to 4 KiB and at
	// least [MinBudget].
	Budget int64
	// WindowFraction is the least part of the budget in which new pages are
	// safe from the admission policy; the cache makes it larger where that
	// keeps more of what comes back. Default 0.20.
	WindowFraction float64
	// ReserveFraction is the part that is kept free for the next stores.
	// Default 0.01.
	ReserveFraction float64
	// PinFraction is the most that leases and pins together may hold.
	// Default 0.5.
	PinFraction float64
	// ClientPinFraction is the most that the leases of one client may hold.
	// Default 0.25.
	ClientPinFraction float64
	// QuarantineFraction is the most that corrupt objects may occupy while
	// they are kept for inspection. Default 0.01.
	QuarantineFraction float64
	// AllocWait is how long a store waits for a free slot before it is
	// refused as over budget. Default 5 ms.
	AllocWait time.Duration
	// ExpectedPages is about how many pages the full cache holds; it sizes
	// the policy's frequency sketch (some 3 bytes × 10 per page). Default:
	// one page per 256 KiB of budget, between 1024 and 524288.
	ExpectedPages int64
	// ClusterKey is the key of the authenticators that stores get. It may be
	// empty where no other node is.
	ClusterKey []byte
}

// fill returns the configuration with defaults in place of zeros.
func (g Config) fill() (Config, error) {
	if g.Budget < MinBudget {
		return g, fmt.Errorf("cannot make cache with Budget %d: below %d bytes", g.Budget, MinBudget)
	}
	g.Budget = roundUp(g.Budget, pageSize)
	for _, f := range []struct {
		name  string
		value *float64
		def   float64
	}{
		{"WindowFraction", &g.WindowFraction, 0.20},
		{"ReserveFraction", &g.ReserveFraction, 0.01},
		{"PinFraction", &g.PinFraction, 0.5},
		{"ClientPinFraction", &g.ClientPinFraction, 0.25},
		{"QuarantineFraction", &g.QuarantineFraction, 0.01},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if !(*f.value > 0 && *f.value < 1) {
			return g, fmt.Errorf("cannot make cache with %s %v: not between 0 and 1", f.name, *f.value)
		}
	}
	if sum := g.WindowFraction + g.ReserveFraction; sum >= 1 {
		return g, fmt.Errorf("cannot make cache with WindowFraction + ReserveFraction %v: not below 1", sum)
	}
	if g.AllocWait == 0 {
		g.AllocWait = 5 * time.Millisecond
	}
	if g.AllocWait < 0 {
		return g, fmt.Errorf("cannot make cache with AllocWait %v: negative", g.AllocWait)
	}
	if g.ExpectedPages == 0 {
		g.ExpectedPages = min(max(g.Budget/(256<<10), 1<<10), 1<<19)
	}
	if g.ExpectedPages < 1 || g.ExpectedPages > 1<<28 {
		return g, fmt.Errorf("cannot make cache with ExpectedPages %d: not between 1 and %d", g.ExpectedPages, 1<<28)
	}
	return g, nil
}

func (g Config) part(fraction float64) int64 { return int64(float64(g.Budget) * fraction) }
