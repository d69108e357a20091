package peers

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"membrane/bench"
)

// Group is the cells of one table and one plot.
type Group struct {
	Title string
	// File is the name of the plot's file, without its extension.
	File string
	// Unit is that of the figures: GB/s, requests/s or MiB.
	Unit string

	in func(bench.Throughput) bool
}

// Groups returns the groups in the order of the tables.
func Groups() []Group { return groups }

var groups = []Group{
	{"Reads, one value a request", "peers-reads", "GB/s", func(t bench.Throughput) bool { return t.Op == opGet && t.Batch == 1 }},
	{"Batched reads", "peers-batches", "GB/s", func(t bench.Throughput) bool { return t.Op == opGet && t.Batch > 1 }},
	{"Writes and mixed loads", "peers-writes", "GB/s", func(t bench.Throughput) bool { return t.Op == opSet || t.Op == opMixed || t.Op == opAside }},
	{"Metadata over HTTP", "peers-metadata", "requests/s", func(t bench.Throughput) bool { return t.Op == opRetrieve }},
	{"Memory when full", "peers-memory", "MiB", func(t bench.Throughput) bool { return t.Op == opMemory }},
}

// Table is the rows of a group as cells by systems.
type Table struct {
	Cells   []string
	Systems []string

	rows map[rowKey]bench.Row
}

// Row returns the row of a system in a cell, if it was asked for.
func (t Table) Row(cell, system string) (bench.Row, bool) {
	row, ok := t.rows[rowKey{cell, system}]
	return row, ok
}

// Table returns the group's rows of a report.
func (g Group) Table(r Report) Table {
	out := Table{rows: map[rowKey]bench.Row{}}
	for _, row := range append(slices.Clone(r.Rows), r.Ceilings...) {
		if row.Throughput == nil || !g.in(*row.Throughput) {
			continue
		}
		name := strings.TrimSuffix(row.Name, ": "+row.System)
		if !slices.Contains(out.Cells, name) {
			out.Cells = append(out.Cells, name)
		}
		if !slices.Contains(out.Systems, row.System) {
			out.Systems = append(out.Systems, row.System)
		}
		out.rows[rowKey{name, row.System}] = row
	}
	order := SystemNames()
	slices.SortStableFunc(out.Systems, func(a, b string) int { return slices.Index(order, a) - slices.Index(order, b) })
	return out
}

// Kinds of systems.
const (
	Ours    = "ours"
	Peer    = "peer"
	Ceiling = "ceiling"
)

// Kind says whose a system is.
func Kind(system string) string {
	switch system {
	case sysBare, sysEmpty:
		return Ceiling
	case sysShm, sysRESP, sysData, sysEngine, sysHTTP:
		return Ours
	}
	return Peer
}

// SystemNames returns the names of all systems in the order of the tables.
func SystemNames() []string {
	var names []string
	for _, s := range allSystems(allProducts()) {
		names = append(names, s.name)
	}
	return names
}

// better compares two rows of one cell.
func better(a, b bench.Row) bool {
	if a.Op == opMemory {
		return a.Ratio != nil && b.Ratio != nil && *a.Ratio < *b.Ratio
	}
	return a.Value > b.Value
}

// wins reports whether a peer's row is better than all of ours in its cell.
func (t Table) wins(cell, system string) bool {
	row := t.rows[rowKey{cell, system}]
	if Kind(system) != Peer || row.Why != "" || row.Value == 0 {
		return false
	}
	met := false
	for _, other := range t.Systems {
		ours, ok := t.rows[rowKey{cell, other}]
		if !ok || Kind(other) != Ours || ours.Why != "" {
			continue
		}
		met = true
		if !better(row, ours) {
			return false
		}
	}
	return met
}

// WriteMarkdown writes the report as tables for docs/benchmarks.md. Where a
// peer is better than every way into membrane, its figure is bold.
func (r Report) WriteMarkdown(w io.Writer) error {
	var b bytes.Buffer
	m := r.Machine
	fmt.Fprintf(&b, "%s, %d cores, %.0f GiB, Linux %s, %s, membrane %s; %s grid, %d rounds of %.3g s a cell.\n\n",
		m.CPU, m.Cores, m.MemoryGiB, m.Kernel, m.Go, m.Version, r.Grid, r.Rounds, r.CellSeconds)
	b.WriteString("#### Targets\n\n| target | ratio | to | bound | |\n|---|---:|---|---|---|\n")
	for _, row := range r.Targets {
		ratio, to := "", ""
		if row.Ratio != nil {
			ratio, to = fmt.Sprintf("%.2f", *row.Ratio), *row.RatioTo
		}
		v := verdict(row)
		if v == "MISSED" {
			v = "**missed**"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", row.Name, ratio, to, sign(bound(row)), v)
	}
	b.WriteString("\n")
	for _, row := range append(slices.Clone(r.Ceilings), r.Rows...) {
		if row.Throughput == nil {
			fmt.Fprintf(&b, "%s: %s %s (%s to %s).\n", row.Name, figure(row.Value), row.Unit, figure(row.Min), figure(row.Max))
		}
	}
	for _, g := range groups {
		g.write(&b, g.Table(r))
	}
	r.writeDetails(&b)
	r.writeSystems(&b)
	_, err := w.Write(b.Bytes())
	return err
}

// sign writes bounds as the rest of the documentation does.
func sign(bound string) string {
	return strings.NewReplacer(">=", "≥", "<=", "≤").Replace(bound)
}

// write writes one group: cells down, systems across.
func (g Group) write(b *bytes.Buffer, t Table) {
	if len(t.Cells) == 0 {
		return
	}
	fmt.Fprintf(b, "\n#### %s\n\n![%s](plots/%s.svg)\n\n%s, median (min to max). Bold: a peer is ahead of every way into membrane.\n\n", g.Title, g.Title, g.File, g.Unit)
	b.WriteString("| cell |")
	for _, s := range t.Systems {
		fmt.Fprintf(b, " %s |", s)
	}
	b.WriteString("\n|---|" + strings.Repeat("---:|", len(t.Systems)) + "\n")
	for _, c := range t.Cells {
		fmt.Fprintf(b, "| %s |", c)
		for _, s := range t.Systems {
			row, ok := t.rows[rowKey{c, s}]
			text := ""
			switch {
			case !ok:
			case row.Why != "":
				text = "not run"
			case row.Op == opMemory:
				text = fmt.Sprintf("%.0f", row.Value)
				if row.Ratio != nil {
					text += fmt.Sprintf(" (%.2f × %s)", *row.Ratio, *row.RatioTo)
				}
			default:
				text = figure(row.Value)
			}
			if t.wins(c, s) {
				text = "**" + text + "**"
			}
			if ok && row.Why == "" && row.Op != opMemory {
				text += fmt.Sprintf(" (%s to %s)", figure(row.Min), figure(row.Max))
			}
			fmt.Fprintf(b, " %s |", text)
		}
		b.WriteString("\n")
	}
}

func (r Report) writeDetails(b *bytes.Buffer) {
	b.WriteString("\n#### Every cell\n\nLatencies over all operations of all rounds; a batch is one operation. RSS and processor time are the server's.\n\n")
	b.WriteString("| cell | system | ops/s | p50 µs | p99 µs | RSS MiB | CPU s/GB | checked | |\n|---|---|---:|---:|---:|---:|---:|---|---|\n")
	for _, row := range append(slices.Clone(r.Ceilings), r.Rows...) {
		t := row.Throughput
		if t == nil || t.Op == opMemory {
			continue
		}
		name := strings.TrimSuffix(row.Name, ": "+row.System)
		if row.Why != "" {
			fmt.Fprintf(b, "| %s | %s | | | | | | | not run: %s |\n", name, t.System, cellText(row.Why))
			continue
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %.0f | %s | %s | %s |\n",
			name, t.System, figure(t.OpsS), figure(t.P50US), figure(t.P99US), t.RSSMB, figure(t.CPUSecPerGB), yes(t.Verified), beside(row))
	}
}

func (r Report) writeSystems(b *bytes.Buffer) {
	b.WriteString("\n#### Systems\n\n| system | protocol | set up | |\n|---|---|---|---|\n")
	for _, s := range r.Systems {
		note := s.Note
		if s.Why != "" {
			note = "not here: " + s.Why
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", s.System, s.Path, cellText(s.Setup), cellText(note))
	}
}

// cellText keeps a text within one cell of a table.
func cellText(s string) string {
	return strings.NewReplacer("|", "\\|", "\n", " ").Replace(s)
}
