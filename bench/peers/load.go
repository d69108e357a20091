package peers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"sync"
	"time"

	"membrane/kvwire"
)

// measurement is what one cell of one system gave in one round.
type measurement struct {
	bytes     int64
	ops       int64
	hits      int64
	asked     int64
	elapsed   time.Duration
	latencies []time.Duration
	cpu       time.Duration
	resident  int64
}

func (m *measurement) add(o measurement) {
	m.bytes += o.bytes
	m.ops += o.ops
	m.hits += o.hits
	m.asked += o.asked
	m.latencies = append(m.latencies, o.latencies...)
}

func (m *measurement) gbs() float64 { return float64(m.bytes) / m.elapsed.Seconds() / 1e9 }

func (m *measurement) opsPerSecond() float64 { return float64(m.ops) / m.elapsed.Seconds() }

// keyspace is what a cell's keys are drawn from.
type keyspace struct {
	payloads *Payloads
	resident int // keys that are there, from 0 on
	// popularity of the keys, cumulated; nil: all alike.
	popularity []float64
	shuffle    []int
	base       int
}

// newKeyspace returns the keys of a cell. aside is how many keys an aside cell
// has.
func newKeyspace(c cell, p *Payloads, aside int) *keyspace {
	k := &keyspace{payloads: p, resident: p.Len()}
	if c.Op == opAside {
		k.resident, k.base = aside, asideKeys
	}
	if c.Zipf > 0 {
		n := k.resident / c.Batch
		k.popularity = make([]float64, n)
		sum := 0.0
		for i := range n {
			sum += math.Pow(float64(i+1), -c.Zipf)
			k.popularity[i] = sum
		}
		k.shuffle = rand.New(rand.NewPCG(1, 2)).Perm(n)
	}
	return k
}

// draw returns the first key of a batch: batches are runs that begin at a
// multiple of their length. A miss asks for keys that nobody has stored.
func (k *keyspace) draw(rng *rand.Rand, c cell) int {
	runs := k.resident / c.Batch
	run := 0
	if k.popularity != nil {
		x := rng.Float64() * k.popularity[len(k.popularity)-1]
		run = k.shuffle[min(sort.SearchFloat64s(k.popularity, x), runs-1)]
	} else {
		run = rng.IntN(runs)
	}
	key := k.base + run*c.Batch
	if c.Op == opGet && c.HitPercent < 100 && rng.IntN(100) >= c.HitPercent {
		key += (k.resident + chainPages - 1) / chainPages * chainPages // of another chain
	}
	return key
}

// stream is one goroutine of the load with its connection.
type stream struct {
	conn   Conn
	cell   cell
	keys   *keyspace
	rng    *rand.Rand
	dst    [][]byte
	got    []bool
	values [][]byte
	check  bool
	id     int
	next   int // new keys so far
}

func newStream(id int, conn Conn, c cell, keys *keyspace, check bool, seed uint64) *stream {
	s := &stream{conn: conn, cell: c, keys: keys, check: check, id: id, rng: rand.New(rand.NewPCG(seed, uint64(id))), got: make([]bool, c.Batch)}
	memory := make([]byte, c.Batch*c.Size)
	for i := range memory { // all present
		memory[i] = 1
	}
	for i := range c.Batch {
		s.dst = append(s.dst, memory[i*c.Size:(i+1)*c.Size:(i+1)*c.Size])
	}
	return s
}

// get reads one batch, checks it and counts it.
func (s *stream) get(m *measurement, first int) (missed bool, err error) {
	if err := s.conn.Get(first, s.dst, s.got); err != nil {
		return false, err
	}
	for i, ok := range s.got {
		m.asked++
		if !ok {
			missed = true
			continue
		}
		m.hits++
		m.bytes += int64(len(s.dst[i]))
		if s.check {
			if err := verify(s.dst[i], first+i, s.keys.payloads); err != nil {
				return false, err
			}
		}
	}
	return missed, nil
}

// verify compares a payload with what its key stands for.
func verify(b []byte, key int, p *Payloads) error {
	if got, want := uint64(kvwire.Sum(b)), p.Sum(key); got != want {
		return &MixedUpError{Key: key, Got: got, Want: want}
	}
	return nil
}

// set writes one batch and counts it.
func (s *stream) set(m *measurement, first int) error {
	s.values = s.values[:0]
	for i := range s.cell.Batch {
		s.values = append(s.values, s.keys.payloads.Value(first+i))
	}
	if err := s.conn.Set(first, s.values); err != nil {
		return err
	}
	m.bytes += int64(s.cell.Batch) * int64(s.cell.Size)
	return nil
}

// step does one operation of a read, mixed or aside cell.
func (s *stream) step(m *measurement) error {
	begin := time.Now()
	defer func() {
		m.latencies = append(m.latencies, time.Since(begin))
		m.ops++
	}()
	if s.cell.Op == opMixed && s.rng.IntN(10) == 0 {
		return s.set(m, s.newKey())
	}
	first := s.keys.draw(s.rng, s.cell)
	missed, err := s.get(m, first)
	if err == nil && missed && s.cell.Op == opAside {
		err = s.set(m, first)
	}
	if err == nil && missed && (s.cell.Op == opMixed || s.cell.Op == opGet && s.cell.HitPercent == 100) {
		err = fmt.Errorf("key %d is gone", first)
	}
	return err
}

// newKey returns a key that no stream has written before.
func (s *stream) newKey() int {
	s.next++
	return newKeyOf(s.id, s.next-1)
}

// newKeyOf keeps each stream to prompts of its own.
func newKeyOf(id, n int) int {
	const streams = 64
	return writeKeys + (n/chainPages*streams+id)*chainPages + n%chainPages
}

// until runs all streams for a while and returns what they did together.
func until(ctx context.Context, streams []*stream, d time.Duration) (measurement, error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return together(streams, func(s *stream, m *measurement) error {
		for ctx.Err() == nil {
			if err := s.step(m); err != nil {
				return err
			}
		}
		return nil
	})
}

// together lets every stream do the work at once, and times it.
func together(streams []*stream, work func(*stream, *measurement) error) (measurement, error) {
	parts := make([]measurement, len(streams))
	errs := make([]error, len(streams))
	var wg sync.WaitGroup
	begin := time.Now()
	for i, s := range streams {
		wg.Go(func() { errs[i] = work(s, &parts[i]) })
	}
	wg.Wait()
	total := measurement{elapsed: time.Since(begin)}
	for _, p := range parts {
		total.add(p)
	}
	return total, errors.Join(errs...)
}

// percentile returns the p-th percentile; it sorts.
func percentile(ds []time.Duration, p float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	slices.Sort(ds)
	return ds[min(len(ds)-1, int(float64(len(ds))*p/100))]
}
