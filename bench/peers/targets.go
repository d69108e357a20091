package peers

import (
	"fmt"

	"membrane/bench"
)

// target is one ratio that membrane is held against.
type target struct {
	name  string
	bound string
	cell  cell
	ours  string
	// to are the systems that we are compared with: the best of those that are
	// there.
	to []string
	// toCell is the cell of theirs, if not the same.
	toCell *cell
	figure func(*measurement) float64
	// lower: less is better.
	lower bool
	// lesser compares with the lesser of to's figure and this part of the bare
	// TCP copy.
	lesser float64
}

func getCell(size, batch, streams int) cell {
	return cell{Op: opGet, Size: size, Batch: batch, Streams: streams, HitPercent: 100}
}

// allTargets returns what is judged from cells.
func allTargets() []target {
	get, resp := getCell, []string{sysRedis}
	others := []string{sysValkey, sysLM, sysKVB}
	eight := get(big, 1, 8)
	list := []target{
		{name: "RESP GET 2 MiB, 1 stream", bound: ">= 1.0", cell: get(big, 1, 1), ours: sysRESP, to: resp},
		{name: "RESP GET 2 MiB, 8 streams", bound: ">= 1.2", cell: eight, ours: sysRESP, to: resp},
		{name: "RESP GET 2 MiB, 8 streams", bound: ">= 1.0", cell: eight, ours: sysRESP, to: others},
		{name: "RESP GET 2 MiB, 64 streams", bound: ">= 2.0", cell: get(big, 1, 64), ours: sysRESP, to: resp},
		{name: "RESP GET 2 MiB, 64 streams beside our 8", bound: ">= 0.85", cell: get(big, 1, 64), ours: sysRESP, to: []string{sysRESP}, toCell: &eight},
		{name: "RESP GET 64 KiB, 1 stream", bound: ">= 0.9", cell: get(small, 1, 1), ours: sysRESP, to: resp},
		{name: "RESP GET 64 KiB, 8 streams", bound: ">= 1.05", cell: get(small, 1, 8), ours: sysRESP, to: resp},
		{name: "RESP GET 64 KiB, 1 stream, p99", bound: "<= 2.0", cell: get(small, 1, 1), ours: sysRESP, to: resp, figure: figureP99, lower: true},
		{name: "RESP GET 64 KiB, 8 streams, p99", bound: "<= 2.0", cell: get(small, 1, 8), ours: sysRESP, to: resp, figure: figureP99, lower: true},
		{name: "RESP SET 2 MiB, 8 streams", bound: ">= 1.0", cell: cell{Op: opSet, Size: big, Batch: 1, Streams: 8}, ours: sysRESP, to: resp},
	}
	// The engine port is no batched read: it leases, and so pins and checks, first.
	for _, c := range []cell{get(small, 32, 1), get(small, 32, 8), get(small, 32, 64), get(big, 8, 1), get(big, 8, 8), get(big, 8, 64)} {
		list = append(list, target{
			name: fmt.Sprintf("%s, batched read, %d × %s, streams: %d", sysData, c.Batch, sizeName(c.Size), c.Streams), bound: ">= 1.0",
			cell: c, ours: sysData, to: []string{sysKVB}, lesser: 0.9,
		})
	}
	sockets := []string{sysRedis, sysValkey, sysKVB, sysLM, sysMooncake}
	batch := get(big, 8, 8)
	return append(list,
		target{name: "shared memory read, 2 MiB, 1 stream, checked", bound: ">= 2.5", cell: get(big, 1, 1), ours: sysShm, to: sockets},
		target{name: "shared memory read, 2 MiB, 8 streams, checked", bound: ">= 2.5", cell: eight, ours: sysShm, to: sockets},
		target{name: "HTTP /retrieve, 8 connections", bound: ">= 0.6", cell: cell{Op: opRetrieve, Batch: 1, Streams: 8}, ours: sysHTTP, to: []string{sysEmpty}, figure: figureOps},
		target{name: "HTTP /retrieve, 8 connections", bound: ">= 15", cell: cell{Op: opRetrieve, Batch: 1, Streams: 8}, ours: sysHTTP, to: []string{sysPred}, figure: figureOps},
		target{name: "server's CPU seconds per GB, RESP GET 2 MiB, 8 streams", bound: "<= 1.0", cell: eight, ours: sysRESP, to: resp, figure: figureCPU, lower: true},
		target{name: "server's CPU seconds per GB, RESP GET 64 KiB, 8 streams", bound: "<= 1.0", cell: get(small, 1, 8), ours: sysRESP, to: resp, figure: figureCPU, lower: true},
		target{name: "server's CPU seconds per GB, data port 8 × 2 MiB, 8 streams", bound: "<= 1.0", cell: batch, ours: sysData, to: resp, toCell: &eight, figure: figureCPU, lower: true},
	)
}

// targets judges what was measured. What was not is a row that says why.
func (r *run) targets() ([]bench.Row, error) {
	var rows []bench.Row
	add := func(row bench.Row, err error) error {
		rows = append(rows, row)
		return err
	}
	for _, t := range allTargets() {
		if err := add(r.judge(t)); err != nil {
			return nil, err
		}
	}
	if err := add(r.judgeCopy()); err != nil {
		return nil, err
	}
	memory, err := r.judgeMemory()
	if err != nil {
		return nil, err
	}
	rows = append(rows, memory...)
	return append(rows,
		bench.Row{Name: "hit ratio in tokens on replayed traces", Why: "see membrane bench replay"},
		bench.Row{Name: "vLLM first token, 2,001 tokens, loaded", Why: "see make bench-vllm"},
	), nil
}

// judge compares round by round, so that a machine whose speed drifts moves
// both sides alike.
func (r *run) judge(t target) (bench.Row, error) {
	row := bench.Row{Name: t.name}
	if t.figure == nil {
		t.figure = figureGBs
	}
	theirCell := t.cell
	if t.toCell != nil {
		theirCell = *t.toCell
	}
	ours, why := r.figures(t.cell, t.ours, t.figure)
	if why != "" {
		row.Why = fmt.Sprintf("%s: %s", t.ours, why)
		return row, nil
	}
	theirs, name, why := r.best(theirCell, t)
	if why != "" {
		row.Why = why
		return row, nil
	}
	if t.lesser > 0 {
		bare, why := r.figures(t.cell, sysBare, t.figure)
		if why != "" {
			row.Why = fmt.Sprintf("%s: %s", sysBare, why)
			return row, nil
		}
		lesser := make(spread, min(len(theirs), len(bare)))
		for i := range lesser {
			lesser[i] = min(theirs[i], t.lesser*bare[i])
		}
		theirs, name = lesser, fmt.Sprintf("the lesser of %s and %.1f × %s", name, t.lesser, sysBare)
	}
	return compare(row, ours, theirs, name, t.bound)
}

func compare(row bench.Row, ours, theirs spread, to, bound string) (bench.Row, error) {
	var ratios spread
	for i := range min(len(ours), len(theirs)) {
		if theirs[i] > 0 {
			ratios = append(ratios, ours[i]/theirs[i])
		}
	}
	if len(ratios) == 0 {
		row.Why = to + " gave nothing to compare with"
		return row, nil
	}
	filled := ratios.row(row.Name, "×")
	ratio := filled.Value
	filled.Ratio, filled.RatioTo = &ratio, &to
	return filled.Judge(ratio, bound)
}

// figures returns what a system gave in a cell, or why it gave nothing. A way
// into membrane that failed in any round gave nothing; a peer's rounds before
// it failed still count, or a target would be met by its failure.
func (r *run) figures(c cell, system string, f func(*measurement) float64) (spread, string) {
	res, ok := r.results[rowKey{c.String(), system}]
	switch {
	case !ok:
		return nil, "not measured in this run"
	case len(res.rounds) == 0, res.why != "" && Kind(system) == Ours:
		return nil, res.why
	}
	return res.over(f), ""
}

// best returns the figures of the best of the systems that a target compares
// with.
func (r *run) best(c cell, t target) (figures spread, name, why string) {
	for _, system := range t.to {
		s, reason := r.figures(c, system, t.figure)
		switch {
		case reason != "":
			why = fmt.Sprintf("%s: %s", system, reason)
		case figures == nil || !t.lower && s.median() > figures.median() || t.lower && s.median() < figures.median():
			figures, name = s, system
		}
	}
	if figures != nil {
		why = ""
	}
	return figures, name, why
}

func (r *run) judgeCopy() (bench.Row, error) {
	row := bench.Row{Name: "shared memory read, 2 MiB, copied from leased pages"}
	if len(r.copied) == 0 {
		row.Why = "not measured in this run"
		return row, nil
	}
	return compare(row, r.copied, r.memcpy, "memcpy", ">= 0.9")
}

// judgeMemory compares memory for each byte held, and with the bound of
// docs/architecture.md.
func (r *run) judgeMemory() ([]bench.Row, error) {
	c := cell{Op: opMemory, Size: small, Batch: 1, Streams: 1}
	bytes := func(system string) (perByte float64, res *result) {
		res = r.results[rowKey{c.String(), system}]
		if res == nil || res.held == 0 {
			return 0, nil
		}
		return float64(res.pss) / float64(res.held), res
	}
	least, name := 0.0, ""
	for _, system := range []string{sysRedis, sysValkey, sysKVB, sysLM} {
		if v, res := bytes(system); res != nil && (name == "" || v < least) {
			least, name = v, system
		}
	}
	var rows []bench.Row
	for _, system := range []string{sysShm, sysRESP} {
		row := bench.Row{Name: "memory for each byte held, full: " + system}
		v, res := bytes(system)
		switch {
		case res == nil:
			row.Why = system + " was not filled in this run"
		case name == "":
			row.Why = "no peer was filled in this run"
		default:
			var err error
			if row, err = compare(row, spread{v}, spread{least}, name, "<= 1.0"); err != nil {
				return nil, err
			}
		}
		rows = append(rows, row)
		row = bench.Row{Name: "memory when full, invariant 4: " + system}
		if res == nil {
			row.Why = system + " was not filled in this run"
			rows = append(rows, row)
			continue
		}
		allowed := float64(r.sizing.full) + 96*mib + 512*float64(res.held/int64(c.Size))
		row, err := compare(row, spread{float64(res.pss)}, spread{allowed}, "arena + 96 MiB + 512 B a page", "<= 1.0")
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
		full := bench.Row{Name: "full: bytes held of the budget: " + system}
		if row, err = compare(full, spread{float64(res.held)}, spread{float64(r.sizing.full)}, "budget", ">= 0.95"); err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}
