package capacity

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"membrane/bench"
	"membrane/cache"
	"membrane/kvwire"
)

// Operation is what one read in this process is.
type Operation struct {
	Name  string `json:"name"`
	About string `json:"about"`
	run   func(s *cache.Space, h []kvwire.Hash) error
}

var (
	whole = kvwire.Shard{Index: 0, Count: 1}
	form  = kvwire.Form{1}
)

func operations() []Operation {
	return []Operation{
		{"has", "whether a page is held", func(s *cache.Space, h []kvwire.Hash) error {
			if !s.Has(form, h[0]) {
				return errMissing
			}
			return nil
		}},
		{"lookup", "a match of one page, which the policy learns of", func(s *cache.Space, h []kvwire.Hash) error {
			if n, _ := s.Match(form, h); n != 1 {
				return errMissing
			}
			return nil
		}},
		{"view", "a page pinned in place, its first byte read, and let go", func(s *cache.Space, h []kvwire.Hash) error {
			v, why := s.View(whole, form, h[0], false)
			if v == nil {
				return fmt.Errorf("cannot view a resident page: %s", why)
			}
			sink.Store(uint32(v.Bytes()[0]))
			v.Close()
			return nil
		}},
	}
}

// sink keeps the compiler from leaving reads out. Each goroutine would share
// it, so it is written only where an operation has a lock anyway.
var sink atomic.Uint32

var errMissing = fmt.Errorf("a resident page is missing")

// InProcess is one row: an operation on one and on two processors.
type InProcess struct {
	Operation
	// One and Two are operations a second, medians over the rounds.
	One float64 `json:"one_per_s"`
	Two float64 `json:"two_per_s"`
	// Scaling is the median of Two / One round by round.
	Scaling float64 `json:"scaling"`
	// Got is the least part of its processors that the measurement had, median
	// over the rounds: the rest went to others, and below [LeastGot] the row
	// says nothing.
	Got float64 `json:"got"`
}

const (
	pages     = 4096
	pageBytes = 4096
	// Predecessor is what the predecessor published: reads a second in its
	// process on four threads.
	Predecessor = 8.1e6
	// ScalingTarget is the least that two processors must do of one.
	ScalingTarget = 1.8
	// turns is in how many pieces a round measures each of both, in turn: a
	// processor's speed on a shared machine changes within a second.
	turns = 10
	// LeastGot is the part of its processors that a row needs to be judged.
	LeastGot = 0.9
)

// RunInProcess measures lookups in this process, each for the given time a
// round, with GOMAXPROCS 1 and one goroutine beside 2 and two. It changes
// GOMAXPROCS of the whole process while it runs.
func RunInProcess(ctx context.Context, rounds int, each time.Duration, say func(string)) ([]InProcess, error) {
	c, err := cache.New(cache.Config{Budget: 2 * pages * pageBytes, ExpectedPages: pages})
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	s, err := c.Space("capacity", kvwire.Namespace{1})
	if err != nil {
		return nil, err
	}
	hashes := make([]kvwire.Hash, pages)
	body := make([]byte, pageBytes)
	for i := range hashes {
		binary.LittleEndian.PutUint64(hashes[i][:], uint64(i)*0x9e3779b97f4a7c15)
		if _, err := s.Put(whole, form, hashes[i], body); err != nil {
			return nil, err
		}
	}
	before := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(before)
	var out []InProcess
	for _, op := range operations() {
		var one, two, ratio, share []float64
		for range rounds {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			var rate, had [3]float64
			for i := range 2 * turns {
				n := 1 + i%2
				r, h, err := reads(s, hashes, op, n, each/turns)
				if err != nil {
					return nil, fmt.Errorf("cannot measure %s: %w", op.Name, err)
				}
				rate[n] += r / turns
				had[n] += h / turns
			}
			one, two, ratio = append(one, rate[1]), append(two, rate[2]), append(ratio, rate[2]/rate[1])
			share = append(share, min(had[1], had[2]))
		}
		row := InProcess{op, bench.Median(one), bench.Median(two), bench.Median(ratio), bench.Median(share)}
		say(fmt.Sprintf("%s: %.2f M/s on one processor, %.2f M/s on two, %.2f times, with %.0f %% of the processors", op.Name, row.One/1e6, row.Two/1e6, row.Scaling, 100*row.Got))
		out = append(out, row)
	}
	return out, nil
}

// reads returns operations a second of n goroutines on n processors, and which
// part of the processors this process had.
func reads(s *cache.Space, hashes []kvwire.Hash, op Operation, n int, each time.Duration) (rate, had float64, err error) {
	runtime.GOMAXPROCS(n)
	var group sync.WaitGroup
	var stop atomic.Bool
	counts, errs := make([]int, n), make([]error, n)
	cpu := used()
	began := time.Now()
	for g := range n {
		group.Go(func() {
			done, at := 0, g*len(hashes)/n
			for done == 0 || !stop.Load() { // a rate is never 0
				for range 256 {
					if err := op.run(s, hashes[at:at+1]); err != nil {
						errs[g] = err
						return
					}
					if at++; at == len(hashes) {
						at = 0
					}
				}
				done += 256
			}
			counts[g] = done
		})
	}
	timer := time.NewTimer(each)
	<-timer.C
	stop.Store(true)
	group.Wait()
	elapsed := time.Since(began).Seconds()
	had = (used() - cpu).Seconds() / elapsed / float64(n)
	total := 0
	for g := range n {
		if errs[g] != nil {
			return 0, 0, errs[g]
		}
		total += counts[g]
	}
	return float64(total) / elapsed, had, nil
}

// used returns the processor time of this process.
func used() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
