package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// WriteJSON writes the report as one JSON object.
func (r ServeReport) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

var serveColumns = []string{
	"arm", "answered", "failed", "differ", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "held back p99", "requests/s", "good/s", "good", "cached",
}

// cells are an arm's figures in the order of serveColumns; times in
// milliseconds.
func (a ServeArm) cells() []string {
	ms := func(v float64) string { return fmt.Sprintf("%.0f", v) }
	tenth := func(v float64) string { return fmt.Sprintf("%.1f", v) }
	rate := func(v float64) string { return fmt.Sprintf("%.3f", v) }
	percent := func(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }
	differ := fmt.Sprint(a.Differ)
	if a.Differ < 0 {
		differ = "?"
	}
	return []string{
		a.Name, fmt.Sprint(a.Requests - a.Failed), fmt.Sprint(a.Failed), differ, ms(a.TTFT.P50), ms(a.TTFT.P90), ms(a.TTFT.P99),
		tenth(a.ITL.P50), tenth(a.ITL.P90), tenth(a.ITL.P99), ms(a.HeldBack.P99), rate(a.RequestsS), rate(a.GoodS), percent(a.GoodShare), percent(a.CachedShare),
	}
}

// lines say what was sent, for a person.
func (w ServeWorkload) lines() []string {
	lines := []string{
		fmt.Sprintf("%d requests, Poisson with %.3g a second, seed %d, at most %d in flight, %d rounds; %d prompt tokens a round",
			w.Requests, w.Rate, w.Seed, w.InFlight, w.Rounds, w.PromptTokens),
		fmt.Sprintf("%d conversations at a time of %d turns of %d tokens and answers of %d, on %d shared prefixes of %d tokens",
			w.Conversations, w.Turns, w.TurnTokens, w.AnswerTokens, w.Prefixes, w.PrefixTokens),
	}
	if w.EngineMiB > 0 {
		lines = append(lines, fmt.Sprintf("the engine's own KV pool %d MiB, the cache beside it %d MiB (the baseline's files have no limit)", w.EngineMiB, w.CacheMiB))
	}
	return append(lines, fmt.Sprintf("good: first token within %.0f ms and tokens %.0f ms apart on the mean, counted from when the request was due", w.TTFTTargetMS, w.ITLTargetMS))
}

// WriteText writes the report as a table. Times are in milliseconds.
func (r ServeReport) WriteText(w io.Writer) error {
	fmt.Fprintln(w, r.Machine)
	for _, line := range r.Workload.lines() {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, strings.Join(serveColumns, "\t")+"\t")
	var notes []string
	for _, a := range r.Arms {
		if a.Why != "" {
			notes = append(notes, fmt.Sprintf("%s: not run: %s", a.Name, a.Why))
			continue
		}
		fmt.Fprintln(t, strings.Join(a.cells(), "\t")+"\t")
		if a.FirstError != "" {
			notes = append(notes, fmt.Sprintf("%s: the first that failed: %s", a.Name, firstLine(a.FirstError)))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, n := range notes {
		fmt.Fprintln(w, n)
	}
	return nil
}

// WriteMarkdown writes the report as a Markdown table. Times are in
// milliseconds.
func (r ServeReport) WriteMarkdown(w io.Writer) error {
	fmt.Fprintf(w, "%s\n\n", r.Machine)
	for _, line := range r.Workload.lines() {
		fmt.Fprintf(w, "* %s\n", line)
	}
	fmt.Fprintf(w, "\n| %s |\n|%s\n", strings.Join(serveColumns, " | "), strings.Repeat("---|", len(serveColumns)))
	for _, a := range r.Arms {
		cells := a.cells()
		if a.Why != "" {
			cells = append([]string{a.Name, "not run: " + strings.ReplaceAll(a.Why, "|", "/")}, make([]string, len(serveColumns)-2)...)
		}
		if _, err := fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | ")); err != nil {
			return err
		}
	}
	return nil
}
