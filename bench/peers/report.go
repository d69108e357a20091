package peers

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"membrane/bench"
)

// Report is what a run prints. Its JSON form is kept stable.
type Report struct {
	// Report has a row for every cell of every system, also of those that are
	// not there, and the ceilings of the run.
	bench.Report
	// Targets are the ratios that membrane is held against.
	Targets []bench.Row `json:"targets"`
	// Systems says how each system was set up.
	Systems []SystemNote `json:"systems"`
	Rounds  int          `json:"rounds"`
	// CellSeconds is how long a cell was measured in one round.
	CellSeconds float64 `json:"cell_seconds"`
	Grid        string  `json:"grid"`
}

// SystemNote says how a system was set up, or why it is not there.
type SystemNote struct {
	System string `json:"system"`
	Path   string `json:"path"`
	Setup  string `json:"setup,omitempty"`
	Note   string `json:"note,omitempty"`
	Why    string `json:"why,omitempty"`
}

// Missed returns the names of the targets that are missed.
func (r Report) Missed() []string { return bench.Report{Rows: r.Targets}.Missed() }

// WriteJSON writes the report as one JSON object.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// spread is a figure over the rounds.
type spread []float64

func (s spread) median() float64 { return bench.Median(s) }

func (s spread) row(name, unit string) bench.Row {
	row := bench.Row{Name: name, Unit: unit, Value: s.median()}
	if len(s) > 0 {
		row.Min, row.Max = slices.Min(s), slices.Max(s)
	}
	return row
}

// over returns a figure of every round.
func (r *result) over(f func(*measurement) float64) spread {
	if r == nil {
		return nil
	}
	var s spread
	for i := range r.rounds {
		s = append(s, f(&r.rounds[i]))
	}
	return s
}

func figureGBs(m *measurement) float64 { return m.gbs() }

func figureOps(m *measurement) float64 { return m.opsPerSecond() }

// figureCPU is the server's processor time, in seconds per GB.
func figureCPU(m *measurement) float64 {
	if m.bytes == 0 {
		return 0
	}
	return m.cpu.Seconds() / (float64(m.bytes) / 1e9)
}

func figureP99(m *measurement) float64 { return micros(percentile(m.latencies, 99)) }

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func (r *run) report(machine bench.Machine) (Report, error) {
	rep := Report{
		Report: bench.Report{Machine: machine, Ceilings: []bench.Row{}, Rows: []bench.Row{}},
		Rounds: r.opts.Rounds, CellSeconds: r.opts.Duration.Seconds(), Grid: "default",
	}
	if r.opts.Full {
		rep.Grid = "full"
	}
	if len(r.memcpy) > 0 {
		rep.Ceilings = append(rep.Ceilings, spread(r.memcpy).row("memcpy, 2 MiB pieces, one thread", "GB/s"))
		rep.Rows = append(rep.Rows, spread(r.copied).row("shared memory read, 2MiB, copied from leased pages and not checked", "GB/s"))
	}
	for _, c := range r.cells {
		for _, s := range r.systems {
			if !s.takes(c) {
				continue
			}
			row := r.row(c, s)
			if s.ceiling {
				rep.Ceilings = append(rep.Ceilings, row)
			} else {
				rep.Rows = append(rep.Rows, row)
			}
		}
	}
	for _, s := range r.systems {
		note := SystemNote{System: s.name, Path: s.path, Setup: s.product.config, Note: s.note, Why: r.absent[s.product]}
		rep.Systems = append(rep.Systems, note)
	}
	var err error
	rep.Targets, err = r.targets()
	return rep, err
}

// row is one cell of one system.
func (r *run) row(c cell, s *system) bench.Row {
	res := r.result(c, s)
	name := c.String() + ": " + s.name
	t := &bench.Throughput{System: s.name, Path: s.path, Op: c.Op, Size: int64(c.Size), Batch: c.Batch, Streams: c.Streams, Verified: !s.ceiling}
	if c.Op == opMemory {
		row := spread{float64(res.pss) / mib}.row(name, "MiB")
		row.Throughput, row.Why = t, res.why
		t.RSSMB = float64(res.pss) / mib
		if res.held > 0 {
			ratio, to := float64(res.pss)/float64(res.held), fmt.Sprintf("%d MiB held", res.held/mib)
			row.Ratio, row.RatioTo = &ratio, &to
		}
		return row
	}
	gbs, ops := res.over(figureGBs), res.over(figureOps)
	row := gbs.row(name, "GB/s")
	if c.Op == opRetrieve {
		row = ops.row(name, "requests/s")
	}
	row.Throughput, row.Why = t, res.why
	if len(res.rounds) == 0 {
		t.Verified = false
		return row
	}
	var all []time.Duration
	var hits, asked int64
	for _, m := range res.rounds {
		all = append(all, m.latencies...)
		hits, asked = hits+m.hits, asked+m.asked
	}
	t.GBs, t.OpsS = gbs.median(), ops.median()
	t.P50US, t.P99US = micros(percentile(all, 50)), micros(percentile(all, 99))
	t.RSSMB = res.over(func(m *measurement) float64 { return float64(m.resident) / mib }).median()
	t.CPUSecPerGB = res.over(figureCPU).median()
	if asked > 0 && c.Op != opRetrieve && (c.Op != opGet || c.HitPercent < 100) {
		ratio, to := float64(hits)/float64(asked), "hit ratio"
		row.Ratio, row.RatioTo = &ratio, &to
	}
	return row
}

// WriteText writes the report as tables.
func (r Report) WriteText(w io.Writer) error {
	m := r.Machine
	fmt.Fprintf(w, "%s, %d cores, %.0f GiB, Linux %s, %s, membrane %s\n%d rounds of %.3g s a cell, %s grid\n\n",
		m.CPU, m.Cores, m.MemoryGiB, m.Kernel, m.Go, m.Version, r.Rounds, r.CellSeconds, r.Grid)
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "cell\tmedian\tmin\tmax\tunit\tops/s\tp50 µs\tp99 µs\tRSS MiB\tCPU s/GB\tchecked\t \t")
	for _, row := range append(slices.Clone(r.Ceilings), r.Rows...) {
		if row.Why != "" {
			fmt.Fprintf(t, "%s\t\t\t\t\t\t\t\t\t\t\tnot run: %s\t\n", row.Name, row.Why)
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t", row.Name, figure(row.Value), figure(row.Min), figure(row.Max), row.Unit)
		if row.Throughput == nil {
			fmt.Fprint(t, "\t\t\t\t\t\t\t\n")
			continue
		}
		c := row.Throughput
		fmt.Fprintf(t, "%s\t%s\t%s\t%.0f\t%s\t%s\t%s\t\n", figure(c.OpsS), figure(c.P50US), figure(c.P99US), c.RSSMB, figure(c.CPUSecPerGB), yes(c.Verified), beside(row))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	t = tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "target\tratio\tto\tbound\t \t")
	for _, row := range r.Targets {
		ratio, to := "", ""
		if row.Ratio != nil {
			ratio, to = fmt.Sprintf("%.2f", *row.Ratio), *row.RatioTo
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t\n", row.Name, ratio, to, bound(row), verdict(row))
	}
	return t.Flush()
}

func bound(row bench.Row) string {
	if row.Target == nil {
		return ""
	}
	return *row.Target
}

func verdict(row bench.Row) string {
	switch {
	case row.OK == nil:
		return "not run: " + row.Why
	case *row.OK:
		return "met"
	}
	return "MISSED"
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// beside is the ratio that some rows carry: hits, or memory to what is held.
func beside(row bench.Row) string {
	if row.Ratio == nil {
		return ""
	}
	return fmt.Sprintf("%.2f × %s", *row.Ratio, *row.RatioTo)
}

func figure(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.3g", v)
}
