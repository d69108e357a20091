package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"membrane/bench"
)

// run is one run.
type run struct {
	opts     Options
	sizing   sizing
	dir      string
	systems  []*system
	cells    []cell
	products map[string]*product
	running  map[*product]*running
	absent   map[*product]string // why it is not there
	payloads *Payloads           // of the size that is measured
	filled   map[string]bool     // stores that hold them
	results  map[rowKey]*result
	memcpy   []float64
	copied   []float64 // shared memory, copied and not checked
	done     int
	began    time.Time
}

type rowKey struct {
	cell   string
	system string
}

// result is what a system gave in a cell, round by round.
type result struct {
	rounds []measurement
	held   int64 // memory cell: bytes that it returned
	pss    int64
	why    string
}

// Run measures every system in every cell and returns the report.
func Run(ctx context.Context, opts Options) (Report, error) {
	if err := opts.defaults(); err != nil {
		return Report{}, err
	}
	dir, err := os.MkdirTemp("", "membrane-peers-")
	if err != nil {
		return Report{}, fmt.Errorf("cannot make a folder for sockets: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	r := &run{
		opts: opts, sizing: opts.sizing(), dir: dir, products: allProducts(), running: map[*product]*running{},
		absent: map[*product]string{}, results: map[rowKey]*result{},
	}
	defer r.close()
	if r.systems, err = choose(allSystems(r.products), opts.Systems); err != nil {
		return Report{}, err
	}
	grid := defaultGrid()
	if opts.Full {
		grid = fullGrid()
	}
	if r.cells, err = filter(grid, opts.Cells); err != nil {
		return Report{}, err
	}
	slices.SortStableFunc(r.cells, func(a, b cell) int { return order(a) - order(b) })
	if err := r.measure(ctx); err != nil {
		return Report{}, err
	}
	return r.report(bench.ThisMachine(opts.Version))
}

func (r *run) close() {
	for _, s := range r.running {
		s.close()
	}
	if r.payloads != nil {
		_ = r.payloads.Close()
	}
}

// takes reports whether a system takes part in a cell.
func (s *system) takes(c cell) bool {
	if c.systems != nil && !slices.Contains(c.systems, s.name) {
		return false
	}
	if s.ceiling && c.Op == opGet && c.HitPercent < 100 {
		return false // it copies every value
	}
	return slices.Contains(s.ops, c.Op)
}

func (r *run) measure(ctx context.Context) error {
	if err := r.touch(); err != nil {
		return err
	}
	if err := r.startAll(ctx); err != nil {
		return err
	}
	r.began = time.Now()
	timed := slices.DeleteFunc(slices.Clone(r.cells), func(c cell) bool { return c.Op == opMemory })
	for round := range r.opts.Rounds {
		if err := r.round(ctx, round, timed); err != nil {
			return fmt.Errorf("cannot finish round %d: %w", round+1, err)
		}
	}
	// The memory cells have the machine to themselves.
	for _, s := range r.running {
		s.close()
	}
	clear(r.running)
	for _, c := range r.cells {
		if c.Op == opMemory {
			if err := r.fullCaches(ctx, c); err != nil {
				return err
			}
		}
	}
	return nil
}

// startAll starts every product that takes part in some cell and stops it
// until its turn.
func (r *run) startAll(ctx context.Context) error {
	for _, s := range r.systems {
		p := s.product
		takes := func(c cell) bool { return s.takes(c) }
		if r.running[p] != nil || r.absent[p] != "" || !slices.ContainsFunc(r.cells, takes) {
			continue
		}
		r.opts.Progress("starting " + p.name)
		started, err := r.start(ctx, p, r.sizing.budget)
		if err == nil {
			if err = started.rest(ctx); err != nil {
				started.close()
			}
		}
		if ctx.Err() != nil {
			if err == nil {
				started.close()
			}
			return ctx.Err()
		}
		if err != nil {
			if s.ours && p.name == "membrane" || s.ceiling {
				return err
			}
			r.absent[p] = reason(err)
			r.opts.Progress(p.name + ": " + err.Error())
			continue
		}
		r.running[p] = started
	}
	return nil
}

// start starts a product in a folder of its own.
func (r *run) start(ctx context.Context, p *product, memory int64) (*running, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	dir, err := os.MkdirTemp(r.dir, "system-")
	if err != nil {
		return nil, fmt.Errorf("cannot make a folder for %s: %w", p.name, err)
	}
	at := place{binary: r.opts.Binary, peers: r.opts.Dir, dir: dir, memory: memory}
	if err := p.find(at); err != nil {
		return nil, err
	}
	return p.start(ctx, at)
}

// findFragments has a product with a metadata route make what it finds. Ours
// does so before each of its cells: values of others may have pushed it out.
func (r *run) findFragments(ctx context.Context, s *system, on *running) (err error) {
	if s.ceiling || on.fragments != nil && !s.ours {
		return nil
	}
	on.fragments, err = prefill(ctx, on.addrs["http"])
	return err
}

// round measures every cell once, each by all systems in turn.
func (r *run) round(ctx context.Context, round int, cells []cell) error {
	size := -1
	for _, c := range cells {
		if c.Size != size {
			if err := r.changeSize(ctx, size, c); err != nil {
				return err
			}
			size = c.Size
		}
		for _, s := range r.systems {
			if !s.takes(c) {
				continue
			}
			r.progress(round, c, s)
			if err := r.one(ctx, round, c, s); err != nil {
				return fmt.Errorf("cannot measure %q of %s: %w", c, s.name, err)
			}
		}
	}
	return r.changeSize(ctx, size, cell{})
}

func (r *run) progress(round int, c cell, s *system) {
	total := 0
	for _, c := range r.cells {
		for _, s := range r.systems {
			if c.Op != opMemory && s.takes(c) && r.absent[s.product] == "" {
				total += r.opts.Rounds
			}
		}
	}
	left := "?"
	if r.done > 3 {
		left = (time.Since(r.began) / time.Duration(r.done) * time.Duration(total-r.done)).Round(time.Second).String()
	}
	if r.absent[s.product] == "" {
		r.done++
	}
	r.opts.Progress(fmt.Sprintf("round %d, %s: %s (%d of %d, %s left)", round+1, c, s.name, r.done, total, left))
}

// result returns where a system's figures of a cell go.
func (r *run) result(c cell, s *system) *result {
	key := rowKey{c.String(), s.name}
	if r.results[key] == nil {
		r.results[key] = &result{}
	}
	return r.results[key]
}

// one measures one cell of one system.
func (r *run) one(ctx context.Context, round int, c cell, s *system) error {
	res := r.result(c, s)
	if why := s.unable[c.Op]; why != "" {
		res.why = why
		return nil
	}
	if why := r.absent[s.product]; why != "" {
		res.why = why
		return nil
	}
	if res.why != "" {
		return nil // it failed in a round before
	}
	on := r.running[s.product]
	m, err := r.awake(ctx, round, c, s, on)
	var wrong *MixedUpError
	switch {
	case err == nil:
		res.rounds = append(res.rounds, m)
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case s.ceiling, s.ours && errors.As(err, &wrong):
		return err
	}
	// A system that fails has a row that says so.
	r.opts.Progress(fmt.Sprintf("%s, %s: %v", s.name, c, err))
	res.why = reason(err)
	// It may have lost some of its values, which other cells ask for.
	if err := r.unfill(ctx, s); err != nil {
		delete(r.filled, s.store)
	}
	return nil
}

// awake measures a cell of a system that is resumed for it.
func (r *run) awake(ctx context.Context, round int, c cell, s *system, on *running) (measurement, error) {
	var m measurement
	err := on.while(ctx, func() (err error) {
		m, err = r.timed(ctx, round, c, s, on)
		return err
	})
	return m, err
}

// timed loads what the cell needs and measures it.
func (r *run) timed(ctx context.Context, round int, c cell, s *system, on *running) (measurement, error) {
	if on.helper != nil {
		return r.helped(ctx, c, on)
	}
	if c.Op == opGet || c.Op == opMixed {
		if err := r.fill(ctx, s, on); err != nil {
			return measurement{}, err
		}
	}
	if c.Op == opRetrieve {
		if err := r.findFragments(ctx, s, on); err != nil {
			return measurement{}, err
		}
	}
	streams, err := r.openStreams(ctx, round, c, s, on)
	defer closeStreams(streams)
	if err != nil {
		return measurement{}, err
	}
	if c.Op == opSet {
		return r.passes(ctx, c, s, on, streams)
	}
	if err := r.warm(ctx, c, streams); err != nil {
		return measurement{}, err
	}
	before, err := on.cpu()
	if err != nil {
		return measurement{}, err
	}
	m, err := until(ctx, streams, r.opts.Duration)
	if err != nil {
		return m, err
	}
	if err := on.took(&m, before); err != nil {
		return m, err
	}
	switch c.Op {
	case opMixed:
		err = errors.Join(dropWritten(streams), r.empty(s, streams[0].conn))
	case opAside:
		err = errors.Join(drop(streams[0].conn, asideKeys, streams[0].keys.resident), r.empty(s, streams[0].conn))
	}
	if s.name == sysShm && c.Op == opGet && c.Streams == 1 {
		return m, errors.Join(err, r.copyLeased(ctx, streams[0]))
	}
	return m, err
}

// warm runs what is not timed: what a first request costs (handles, memory of
// the server) and, where a working set is larger than the budget, the time until
// as much as the budget was stored: before it all misses are of an empty cache,
// and the hit ratio says how long the cell was measured.
func (r *run) warm(ctx context.Context, c cell, streams []*stream) error {
	if c.Op == opAside {
		share := r.sizing.budget / int64(len(streams))
		_, err := together(streams, func(s *stream, m *measurement) error {
			// Who holds it all misses no more.
			most := int64(4 * s.keys.resident / len(streams))
			for ctx.Err() == nil && (m.asked-m.hits)*int64(c.Size) < share && m.asked < most {
				if err := s.step(m); err != nil {
					return err
				}
			}
			return ctx.Err()
		})
		if err != nil {
			return err
		}
	}
	_, err := until(ctx, streams, r.opts.Duration/10)
	return err
}

// took completes a measurement with what the server used for it.
func (r *running) took(m *measurement, before time.Duration) error {
	after, err := r.cpu()
	if err != nil {
		return err
	}
	m.cpu = after - before
	m.resident, err = r.resident()
	return err
}

// openStreams connects the streams of a cell.
func (r *run) openStreams(ctx context.Context, round int, c cell, s *system, on *running) ([]*stream, error) {
	aside := int(4*r.sizing.budget) / max(c.Size, 1)
	var keys *keyspace
	if c.Op == opRetrieve {
		keys = &keyspace{resident: fragmentCount}
	} else {
		keys = newKeyspace(c, r.payloads, aside)
	}
	ctx, cancel := context.WithTimeout(ctx, ioTime)
	defer cancel()
	var streams []*stream
	for i := range c.Streams {
		conn, err := s.open(ctx, on, r.opening(fmt.Sprintf("stream-%d", i), c.Size, c.Op != opGet))
		if err != nil {
			return streams, err
		}
		check := !s.ceiling && c.Op != opRetrieve
		streams = append(streams, newStream(i, conn, c, keys, check, r.opts.Seed+uint64(round)))
	}
	return streams, nil
}

func (r *run) opening(name string, size int, writes bool) opening {
	return opening{name: name, size: size, writes: writes, ring: max(1, r.sizing.written/max(size, 1))}
}

func closeStreams(streams []*stream) {
	for _, s := range streams {
		_ = s.conn.Close()
	}
}

// reason shortens an error with a log behind it to one line: what failed, and
// the last thing that was said.
func reason(err error) string {
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	if len(lines) == 1 {
		return lines[0]
	}
	return lines[0] + " " + lines[len(lines)-1]
}
