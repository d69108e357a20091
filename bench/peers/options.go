package peers

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Options tune [Run]. The zero value measures the default grid.
type Options struct {
	// Binary is the membrane binary that is measured; "" is this one.
	Binary string
	// Version is what the report says of it.
	Version string
	// Dir is the folder with the peers' programs; "" is [DefaultDir].
	Dir string
	// Systems are parts of the names of the systems that are measured; none:
	// all.
	Systems []string
	// Cells is an expression that names of measured cells match; "": all.
	Cells string
	// Full measures the whole grid and not only the cells of the targets.
	Full bool
	// Quick measures with little memory and for an instant, to see that all
	// rows work.
	Quick bool
	// Rounds is how often every cell is measured, all in turn; 0 is three.
	Rounds int
	// Duration is how long a cell is measured in one round; 0 is 2.5 s, 1.5 s with
	// Full, or 50 ms with Quick.
	Duration time.Duration
	// Seed fixes the order of the keys; 0 is one.
	Seed uint64
	// Progress is called with a line for a person now and then.
	Progress func(string)
}

// sizing is how much memory a run uses.
type sizing struct {
	budget  int64       // what each system may keep
	set     map[int]int // bytes that read cells ask for, by size of a value
	written int         // bytes of one pass of a write cell
	full    int64       // budget of the memory cell
}

func (o Options) sizing() sizing {
	if o.Quick {
		return sizing{budget: 256 * mib, set: map[int]int{small: 8 * mib, half: 32 * mib, big: 64 * mib}, written: 32 * mib, full: 128 * mib}
	}
	return sizing{budget: gib, set: map[int]int{small: 128 * mib, half: 256 * mib, big: 256 * mib}, written: 512 * mib, full: 2 * gib}
}

// DefaultDir returns the folder that tools/bench-peers-setup.sh fills.
func DefaultDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cannot find the cache folder: %w", err)
	}
	return filepath.Join(cache, "membrane", "peers"), nil
}

func (o *Options) defaults() error {
	if o.Rounds == 0 {
		o.Rounds = 3
	}
	if o.Duration == 0 {
		o.Duration = 2500 * time.Millisecond
		if o.Full {
			o.Duration = 1500 * time.Millisecond
		}
		if o.Quick {
			o.Duration = 50 * time.Millisecond
		}
	}
	if o.Rounds < 1 || o.Duration < 0 {
		return fmt.Errorf("%d rounds of %s cannot be measured", o.Rounds, o.Duration)
	}
	if o.Seed == 0 {
		o.Seed = 1
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	var err error
	if o.Dir == "" {
		if o.Dir, err = DefaultDir(); err != nil {
			return err
		}
	}
	if o.Binary == "" {
		if o.Binary, err = os.Executable(); err != nil {
			return fmt.Errorf("cannot find this binary: %w", err)
		}
	}
	return nil
}
