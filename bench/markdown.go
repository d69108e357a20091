package bench

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
)

// WriteMarkdown writes the report as a table for docs/benchmarks.md.
func (r Report) WriteMarkdown(w io.Writer) error {
	var b bytes.Buffer
	m := r.Machine
	fmt.Fprintf(&b, "%s, %d cores, %.0f GiB, Linux %s, %s, membrane %s.\n\n", m.CPU, m.Cores, m.MemoryGiB, m.Kernel, m.Go, m.Version)
	b.WriteString("| figure | median | min | max | unit | ratio | to | target | |\n|---|---:|---:|---:|---|---:|---|---|---|\n")
	for _, row := range append(slices.Clone(r.Ceilings), r.Rows...) {
		v := strings.NewReplacer("ok", "met", "MISSED", "**missed**").Replace(verdict(row))
		target := strings.NewReplacer(">=", "≥", "<=", "≤").Replace(optional(row.Target, keep))
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", row.Name, figure(row.Value), figure(row.Min), figure(row.Max), row.Unit,
			optional(row.Ratio, func(v float64) string { return fmt.Sprintf("%.2f", v) }), optional(row.RatioTo, keep), target, v)
	}
	_, err := w.Write(b.Bytes())
	return err
}
