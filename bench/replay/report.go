package replay

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Report is what a replay prints. Its JSON form is kept stable.
type Report struct {
	PrefillRate float64       `json:"prefill_tokens_s"`
	LoadRate    float64       `json:"load_tokens_s"`
	TokenBytes  int64         `json:"token_bytes"`
	Policies    []PolicyAbout `json:"policies"`
	Traces      []TraceReport `json:"traces"`
	// Target compares membrane with plain LRU and ristretto; nil where one of
	// them was not run.
	Target *Target `json:"target"`
}

// PolicyAbout says what a policy is.
type PolicyAbout struct {
	Name  string `json:"name"`
	About string `json:"about"`
}

// Target is the comparison with the policies that membrane has to beat: lru
// (the stronger of the two orders) and ristretto.
type Target struct {
	// Mean hit ratios over all traces and sizes.
	Mean map[string]float64 `json:"mean"`
	// Worst is the cell in which membrane is farthest below the better of the
	// others, as a part of that one's hit ratio: -0.01 is 1 % less.
	Worst         float64 `json:"worst"`
	WorstTrace    string  `json:"worst_trace"`
	WorstFraction float64 `json:"worst_fraction"`
	// Below lists the cells that are more than 1 % below.
	Below []string `json:"below"`
	OK    bool     `json:"ok"`
}

// tolerance is how far below the better of the others one cell may be.
const tolerance = 0.01

// judge computes the target.
func (r *Report) judge() {
	t := Target{Mean: make(map[string]float64)}
	cells := 0
	for _, tr := range r.Traces {
		by := tr.ByFraction()
		for _, f := range tr.Fractions() {
			own, ok := by[f][Membrane]
			better := max(by[f][LRU].HitRatio, by[f][Ristretto].HitRatio)
			if _, ok2 := by[f][LRU]; !ok || !ok2 {
				return
			}
			if _, ok := by[f][Ristretto]; !ok {
				return
			}
			cells++
			for name, c := range by[f] {
				t.Mean[name] += c.HitRatio
			}
			if better == 0 {
				continue
			}
			rel := own.HitRatio/better - 1
			if rel < t.Worst || cells == 1 {
				t.Worst, t.WorstTrace, t.WorstFraction = rel, tr.Name, f
			}
			if rel < -tolerance {
				t.Below = append(t.Below, fmt.Sprintf("%s at %g %%: %.4f, %.1f %% below %.4f", tr.Name, 100*f, own.HitRatio, -100*rel, better))
			}
		}
	}
	if cells == 0 {
		return
	}
	for name := range t.Mean {
		t.Mean[name] /= float64(cells)
	}
	t.OK = t.Mean[Membrane] > t.Mean[LRU] && t.Mean[Membrane] > t.Mean[Ristretto] && len(t.Below) == 0
	r.Target = &t
}

// Fractions returns the cache sizes that were played, in their order.
func (t *TraceReport) Fractions() []float64 {
	var out []float64
	for _, c := range t.Cells {
		if !slices.Contains(out, c.Fraction) {
			out = append(out, c.Fraction)
		}
	}
	return out
}

// ByFraction returns the cells by cache size and policy.
func (t *TraceReport) ByFraction() map[float64]map[string]Cell {
	out := make(map[float64]map[string]Cell)
	for _, c := range t.Cells {
		if out[c.Fraction] == nil {
			out[c.Fraction] = make(map[string]Cell)
		}
		out[c.Fraction][c.Policy] = c
	}
	return out
}

// WriteJSON writes the report as one JSON object.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// table is what text and Markdown have in common.
type table struct {
	head []string
	rows [][]string
}

func (t *TraceReport) ratios(policies []PolicyAbout) table {
	out := table{head: []string{"memory"}}
	for _, p := range policies {
		out.head = append(out.head, p.Name)
	}
	by := t.ByFraction()
	for _, f := range t.Fractions() {
		row := []string{fmt.Sprintf("%g %%", 100*f)}
		for _, p := range policies {
			row = append(row, fmt.Sprintf("%.4f", by[f][p.Name].HitRatio))
		}
		out.rows = append(out.rows, row)
	}
	return out
}

func (t *TraceReport) details() table {
	out := table{head: []string{"memory", "policy", "hit ratio", "loaded GB", "stored GB", "evictions", "first token mean s", "p50", "p99"}}
	for _, c := range t.Cells {
		out.rows = append(out.rows, []string{
			fmt.Sprintf("%g %% (%d blocks)", 100*c.Fraction, c.Blocks), c.Policy, fmt.Sprintf("%.4f", c.HitRatio),
			fmt.Sprintf("%.0f", float64(c.Loaded)/1e9), fmt.Sprintf("%.0f", float64(c.Stored)/1e9), fmt.Sprint(c.Evictions),
			fmt.Sprintf("%.3f", c.TTFTMean), fmt.Sprintf("%.3f", c.TTFTP50), fmt.Sprintf("%.3f", c.TTFTP99),
		})
	}
	return out
}

func (t *TraceReport) facts() string {
	f := t.Facts
	return fmt.Sprintf("%d requests of %d sessions in %.0f s, mean input %.0f and output %.0f tokens, %d blocks of %d tokens, %d distinct; without bounds %.4f of the tokens are hits",
		f.Requests, f.Sessions, f.Span.Seconds(), float64(f.Input)/float64(max(f.Requests, 1)), float64(f.Output)/float64(max(f.Requests, 1)), f.Blocks, t.BlockTokens, f.Distinct, f.Reusable)
}

func (r Report) verdict() []string {
	t := r.Target
	if t == nil {
		return nil
	}
	var means []string
	for _, p := range r.Policies {
		means = append(means, fmt.Sprintf("%s %.4f", p.Name, t.Mean[p.Name]))
	}
	out := []string{
		"Mean hit ratio over traces and sizes: " + strings.Join(means, ", ") + ".",
		fmt.Sprintf("Worst cell against the better of lru and ristretto: %+.2f %% (%s at %g %%).", 100*t.Worst, t.WorstTrace, 100*t.WorstFraction),
	}
	verdict := "Target (above both on the mean, nowhere more than 1 % below the better one): met."
	if !t.OK {
		verdict = "Target (above both on the mean, nowhere more than 1 % below the better one): missed."
		if len(t.Below) > 0 {
			verdict = strings.TrimSuffix(verdict, ".") + "; below: " + strings.Join(t.Below, "; ") + "."
		}
	}
	return append(out, verdict)
}

// WriteText writes the report as tables for a terminal.
func (r Report) WriteText(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	for _, p := range r.Policies {
		fmt.Fprintf(tw, "%s\t%s\n", p.Name, p.About)
	}
	fmt.Fprintf(tw, "\nfirst token: loaded tokens / %g + other tokens / %g; bytes: %d a token\n", r.LoadRate, r.PrefillRate, r.TokenBytes)
	for i := range r.Traces {
		t := &r.Traces[i]
		fmt.Fprintf(tw, "\n%s: %s\n%s\n\n", t.Name, t.facts(), t.About)
		for _, tab := range []table{t.ratios(r.Policies), t.details()} {
			fmt.Fprintln(tw, strings.Join(tab.head, "\t"))
			for _, row := range tab.rows {
				fmt.Fprintln(tw, strings.Join(row, "\t"))
			}
			fmt.Fprintln(tw)
		}
	}
	for _, line := range r.verdict() {
		fmt.Fprintln(tw, line)
	}
	return tw.Flush()
}

// WriteMarkdown writes the report as tables for a document.
func (r Report) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	for _, p := range r.Policies {
		fmt.Fprintf(&b, "- **%s**: %s\n", p.Name, p.About)
	}
	fmt.Fprintf(&b, "\nFirst token: loaded tokens / %g + other tokens / %g. Bytes: %d a token.\n", r.LoadRate, r.PrefillRate, r.TokenBytes)
	for i := range r.Traces {
		t := &r.Traces[i]
		fmt.Fprintf(&b, "\n### %s\n\n%s. %s.\n", t.Name, t.facts(), t.About)
		for _, tab := range []table{t.ratios(r.Policies), t.details()} {
			fmt.Fprintf(&b, "\n| %s |\n|%s\n", strings.Join(tab.head, " | "), strings.Repeat("---|", len(tab.head)))
			for _, row := range tab.rows {
				fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			}
		}
	}
	fmt.Fprintf(&b, "\n%s\n", strings.Join(r.verdict(), "\n"))
	_, err := io.WriteString(w, b.String())
	return err
}
