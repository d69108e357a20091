package capacity

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// Report is what the measurements found. Its JSON form is kept stable.
type Report struct {
	InProcess []InProcess `json:"in_process"`
	Cluster   *Cluster    `json:"cluster"`
	// Predecessor is its published reads a second, in process, four threads.
	Predecessor float64 `json:"predecessor_per_s"`
}

// Missed names the rows that are below their target, of those that are judged.
func (r Report) Missed() []string {
	var out []string
	for _, row := range r.InProcess {
		if row.Got >= LeastGot && row.Scaling < ScalingTarget {
			out = append(out, row.Name)
		}
	}
	if c := r.Cluster; c != nil && c.Why == "" && c.Got >= LeastGot && c.Scaling < ClusterTarget {
		out = append(out, "clusters")
	}
	return out
}

func (r Report) lines() [][]string {
	met := func(got float64, ok bool) string {
		if got < LeastGot {
			return fmt.Sprintf("not judged: it had %.0f %% of its processors", 100*got)
		}
		if ok {
			return "met"
		}
		return "**missed**"
	}
	out := [][]string{{"figure", "with less", "with more", "times", "target", ""}}
	for _, row := range r.InProcess {
		out = append(out, []string{
			row.Name + ": " + row.About, fmt.Sprintf("%.2f M/s, 1 processor", row.One/1e6), fmt.Sprintf("%.2f M/s, 2 processors", row.Two/1e6),
			fmt.Sprintf("%.2f", row.Scaling), fmt.Sprintf(">= %g", ScalingTarget), met(row.Got, row.Scaling >= ScalingTarget),
		})
	}
	if c := r.Cluster; c != nil {
		name := fmt.Sprintf("pages of %d KiB leased, checked, at nodes with %g %% of a core each", readPage>>10, 100*c.Share)
		if c.Why != "" {
			return append(out, []string{name, "", "", "", fmt.Sprintf(">= %g", ClusterTarget), "not run: " + c.Why})
		}
		out = append(out, []string{
			name, fmt.Sprintf("%.0f/s, 3 nodes", c.Small), fmt.Sprintf("%.0f/s, 5 nodes", c.Large),
			fmt.Sprintf("%.2f", c.Scaling), fmt.Sprintf(">= %g", ClusterTarget), met(c.Got, c.Scaling >= ClusterTarget),
		})
	}
	return out
}

func (r Report) beside() string {
	return fmt.Sprintf("The predecessor published %.1f million reads a second in its process, on four threads.", r.Predecessor/1e6)
}

// WriteText writes a table for a terminal.
func (r Report) WriteText(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	for _, line := range r.lines() {
		fmt.Fprintln(tw, strings.ReplaceAll(strings.Join(line, "\t"), "**", ""))
	}
	fmt.Fprintln(tw, r.beside())
	return tw.Flush()
}

// WriteMarkdown writes a table for a document.
func (r Report) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	for i, line := range r.lines() {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(line, " | "))
		if i == 0 {
			fmt.Fprintf(&b, "|%s\n", strings.Repeat("---|", len(line)))
		}
	}
	fmt.Fprintf(&b, "\n%s\n", r.beside())
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes one JSON object.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}
