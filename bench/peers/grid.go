package peers

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Operations of a cell.
const (
	opGet      = "get"      // reads
	opSet      = "set"      // writes of new keys, acknowledged
	opMixed    = "mixed"    // nine reads in ten
	opAside    = "aside"    // reads of four times the budget, stored when missed
	opRetrieve = "retrieve" // metadata over HTTP
	opMemory   = "memory"   // what a full cache takes
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30

	small = 64 * kib
	half  = 512 * kib
	big   = 2 * mib
)

// Keys. Below residentKeys × 2 are those that read cells ask for: the first
// half is there. The others are written.
const (
	writeKeys = 1 << 24
	asideKeys = 1 << 25
)

// cell is one figure that every system is asked for.
type cell struct {
	Op      string
	Size    int
	Batch   int
	Streams int
	// HitPercent is how many of the keys that are asked for are there.
	HitPercent int
	// Zipf is the exponent of the keys' popularity, 0: all alike.
	Zipf float64
	// systems that take part; nil: all that can.
	systems []string
}

// String names the cell as filters and tables do: "get 2MiB x8 streams=8".
func (c cell) String() string {
	b := strings.Builder{}
	b.WriteString(c.Op)
	if c.Size > 0 {
		b.WriteString(" " + sizeName(c.Size))
	}
	if c.Batch > 1 {
		fmt.Fprintf(&b, " x%d", c.Batch)
	}
	if c.Op != opMemory {
		fmt.Fprintf(&b, " streams=%d", c.Streams)
	}
	if c.Op == opGet && c.HitPercent < 100 {
		fmt.Fprintf(&b, " hit=%d%%", c.HitPercent)
	}
	return b.String()
}

func sizeName(n int) string {
	switch {
	case n >= mib && n%mib == 0:
		return fmt.Sprintf("%dMiB", n/mib)
	case n >= kib && n%kib == 0:
		return fmt.Sprintf("%dKiB", n/kib)
	}
	return fmt.Sprintf("%dB", n)
}

// Names of systems in rows.
const (
	sysShm      = "membrane (shared memory)"
	sysRESP     = "membrane (RESP)"
	sysData     = "membrane (kvwire, data port)"
	sysEngine   = "membrane (kvwire, engine port)"
	sysHTTP     = "membrane (HTTP)"
	sysRedis    = "Redis"
	sysValkey   = "Valkey"
	sysKVB      = "kvblockd"
	sysLM       = "LMCache (lm://)"
	sysMP       = "LMCache (multiprocess)"
	sysMooncake = "Mooncake (TCP)"
	sysPred     = "predecessor"
	sysBare     = "bare TCP copy"
	sysEmpty    = "empty fasthttp server"
)

var (
	overSockets = []string{sysRESP, sysRedis, sysValkey, sysKVB, sysLM}
	batched     = []string{sysData, sysEngine, sysKVB, sysBare}
)

// defaultGrid is what the targets are judged by.
func defaultGrid() []cell {
	var cells []cell
	get := func(size, batch int, streams []int, systems ...string) {
		for _, n := range streams {
			cells = append(cells, cell{Op: opGet, Size: size, Batch: batch, Streams: n, HitPercent: 100, systems: systems})
		}
	}
	get(big, 1, []int{1}, append([]string{sysShm, sysMP, sysMooncake}, overSockets...)...)
	get(big, 1, []int{8}, append([]string{sysShm, sysMooncake}, overSockets...)...)
	get(big, 1, []int{64}, overSockets...)
	get(big, 8, []int{1}, append([]string{sysMP}, batched...)...)
	get(big, 8, []int{8, 64}, batched...)
	cells = append(cells, cell{Op: opSet, Size: big, Batch: 1, Streams: 8, systems: append([]string{sysShm, sysEngine}, overSockets...)})
	get(small, 1, []int{1, 8}, overSockets...)
	get(small, 32, []int{1, 8, 64}, batched...)
	return append(cells,
		cell{Op: opRetrieve, Batch: 1, Streams: 8, systems: []string{sysHTTP, sysPred, sysEmpty}},
		cell{Op: opMemory, Size: small, Batch: 1, Streams: 1, systems: append([]string{sysShm}, overSockets...)},
	)
}

// fullGrid is everything: about an hour.
func fullGrid() []cell {
	var cells []cell
	for _, size := range []int{small, half, big} {
		for _, batch := range []int{1, 32} {
			for _, streams := range []int{1, 8, 32, 64} {
				if batch*size*streams > gib {
					continue // measures the client's buffers
				}
				for _, hit := range []int{100, 50} {
					if hit < 100 && streams != 8 {
						continue
					}
					cells = append(cells, cell{Op: opGet, Size: size, Batch: batch, Streams: streams, HitPercent: hit})
				}
			}
		}
		for _, streams := range []int{1, 8, 32, 64} {
			cells = append(cells, cell{Op: opSet, Size: size, Batch: 1, Streams: streams})
		}
		cells = append(cells,
			cell{Op: opMixed, Size: size, Batch: 1, Streams: 8, Zipf: 0.99},
			cell{Op: opAside, Size: size, Batch: 1, Streams: 8, Zipf: 0.99},
		)
	}
	// The target cells once more, where they are not among these.
	for _, c := range defaultGrid() {
		same := func(o cell) bool { return o.String() == c.String() }
		if !slices.ContainsFunc(cells, same) {
			cells = append(cells, c)
		}
	}
	slices.SortStableFunc(cells, func(a, b cell) int { return order(a) - order(b) })
	return cells
}

// order keeps the cells of one size together, those that write last: they drop
// what the others read.
func order(c cell) int {
	rank := map[string]int{opGet: 0, opMixed: 1, opSet: 2, opAside: 3, opRetrieve: 4, opMemory: 5}[c.Op]
	if rank >= 4 {
		return rank << 40
	}
	return c.Size<<4 | rank
}

// filter keeps the cells whose name contains a match of the expression.
func filter(cells []cell, expression string) ([]cell, error) {
	if expression == "" {
		return cells, nil
	}
	re, err := regexp.Compile(expression)
	if err != nil {
		return nil, fmt.Errorf("cannot read the cells' expression %q: %w", expression, err)
	}
	var kept []cell
	for _, c := range cells {
		if re.MatchString(c.String()) {
			kept = append(kept, c)
		}
	}
	if len(kept) == 0 {
		return nil, fmt.Errorf("no cell has a name like %q; they are named like %q", expression, cells[0])
	}
	return kept, nil
}

// choose keeps the systems whose name contains one of the texts, and all
// ceilings.
func choose(systems []*system, texts []string) ([]*system, error) {
	if len(texts) == 0 {
		return systems, nil
	}
	var kept []*system
	for _, text := range texts {
		found := false
		for _, s := range systems {
			if strings.Contains(strings.ToLower(s.name), strings.ToLower(text)) {
				found = true
				if !slices.Contains(kept, s) {
					kept = append(kept, s)
				}
			}
		}
		if !found {
			var names []string
			for _, s := range systems {
				names = append(names, s.name)
			}
			return nil, fmt.Errorf("no system has a name like %q; there are %q", text, names)
		}
	}
	for _, s := range systems {
		if s.ceiling && !slices.Contains(kept, s) {
			kept = append(kept, s)
		}
	}
	return kept, nil
}
