package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// PDReport is what [PD] prints. Its JSON form is kept stable.
type PDReport struct {
	Report                // its rows have the ratios and targets
	Workload PDWorkload   `json:"workload"`
	Arms     []PDArm      `json:"arms"`
	Handover []PDHandover `json:"handover"`
}

// WriteJSON writes the report as one JSON object.
func (r PDReport) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// line says what was sent to the two placements.
func (w PDWorkload) line() string {
	return fmt.Sprintf("two nodes with one processor each; %d requests of %d tokens and answers of %d, Poisson with %.3g a second, seed %d; times in ms from when a request was due",
		w.Requests, w.PromptTokens, w.AnswerTokens, w.Rate, w.Seed)
}

var (
	pdArmColumns      = []string{"placement", "answered", "failed", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "longest gap p50", "p99", "recomputed"}
	pdHandoverColumns = []string{"prompt tokens", "prefill", "hand-over", "min", "max", "with overlap", "min", "max"}
)

func (a PDArm) cells() []string {
	if a.Why != "" {
		return []string{a.Name, "not run: " + a.Why}
	}
	ms := func(v float64) string { return fmt.Sprintf("%.1f", v) }
	fine := func(v float64) string { return fmt.Sprintf("%.2f", v) }
	return []string{
		a.Name, fmt.Sprint(a.Requests - a.Failed), fmt.Sprint(a.Failed), ms(a.TTFT.P50), ms(a.TTFT.P90), ms(a.TTFT.P99),
		fine(a.ITL.P50), fine(a.ITL.P90), ms(a.ITL.P99), ms(a.LongestGap.P50), ms(a.LongestGap.P99), fmt.Sprint(a.Recomputed),
	}
}

func (h PDHandover) cells() []string {
	ms := func(v float64) string { return fmt.Sprintf("%.1f", v) }
	return []string{
		fmt.Sprint(h.Tokens), ms(h.PrefillMS), ms(h.Plain.Median), ms(h.Plain.Min), ms(h.Plain.Max), ms(h.Overlap.Median), ms(h.Overlap.Min), ms(h.Overlap.Max),
	}
}

const pdHandoverLine = "hand-over: from the end of the prefill to the first token on the other node, in ms; with overlap the decode was asked when the prefill began"

// tables returns the tables behind the rows, each with what is said before it.
func (r PDReport) tables() []pdTable {
	arms, handover := pdTable{line: r.Workload.line(), columns: pdArmColumns}, pdTable{line: pdHandoverLine, columns: pdHandoverColumns}
	for _, a := range r.Arms {
		arms.rows = append(arms.rows, a.cells())
	}
	for _, h := range r.Handover {
		handover.rows = append(handover.rows, h.cells())
	}
	return []pdTable{arms, handover}
}

type pdTable struct {
	line    string
	columns []string
	rows    [][]string
}

// WriteText writes the report as tables.
func (r PDReport) WriteText(w io.Writer) error {
	if err := r.Report.WriteText(w); err != nil {
		return err
	}
	for _, table := range r.tables() {
		fmt.Fprintf(w, "\n%s\n\n", table.line)
		t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
		for _, row := range append([][]string{table.columns}, table.rows...) {
			fmt.Fprintln(t, strings.Join(row, "\t")+"\t")
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// WriteMarkdown writes the report as tables for docs/benchmarks.md.
func (r PDReport) WriteMarkdown(w io.Writer) error {
	if err := r.Report.WriteMarkdown(w); err != nil {
		return err
	}
	for _, table := range r.tables() {
		fmt.Fprintf(w, "\n%s.\n\n| %s |\n|---|%s\n", strings.ToUpper(table.line[:1])+table.line[1:], strings.Join(table.columns, " | "), strings.Repeat("---:|", len(table.columns)-1))
		for _, row := range table.rows {
			row = append(row, make([]string, max(len(table.columns)-len(row), 0))...)
			if _, err := fmt.Fprintf(w, "| %s |\n", strings.ReplaceAll(strings.Join(row, " | "), "\n", " ")); err != nil {
				return err
			}
		}
	}
	return nil
}
