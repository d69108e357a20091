package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Report is what a benchmark prints. Its JSON form is kept stable.
type Report struct {
	Machine Machine `json:"machine"`
	// Ceilings are what the machine itself can do, measured in the same run.
	Ceilings []Row `json:"ceilings"`
	Rows     []Row `json:"rows"`
}

// Machine describes where a report was made.
type Machine struct {
	CPU       string  `json:"cpu"`
	Cores     int     `json:"cores"`
	MemoryGiB float64 `json:"memory_gib"`
	Kernel    string  `json:"kernel"`
	Go        string  `json:"go"`
	Version   string  `json:"version"`
}

// String describes the machine in one line.
func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, %.0f GiB, Linux %s, %s, membrane %s", m.CPU, m.Cores, m.MemoryGiB, m.Kernel, m.Go, m.Version)
}

// Row is one figure. Ratio, Target and OK are nil where there is nothing to
// compare with, OK also where the row was not run, with Why.
type Row struct {
	Name    string   `json:"name"`
	Value   float64  `json:"value"`
	Min     float64  `json:"min"`
	Max     float64  `json:"max"`
	Unit    string   `json:"unit"`
	Ratio   *float64 `json:"ratio"`
	RatioTo *string  `json:"ratio_to"`
	// Target is a bound on the ratio, or on the value where there is no ratio:
	// "<= 2.5" or ">= 0.9".
	Target *string `json:"target"`
	OK     *bool   `json:"ok"`
	Why    string  `json:"why,omitempty"`
	*Throughput
}

// Throughput has the further columns of a throughput cell.
type Throughput struct {
	System      string  `json:"system"`
	Path        string  `json:"path"`
	Op          string  `json:"op"`
	Size        int64   `json:"size"`
	Batch       int     `json:"batch"`
	Streams     int     `json:"streams"`
	GBs         float64 `json:"gb_s"`
	OpsS        float64 `json:"ops_s"`
	P50US       float64 `json:"p50_us"`
	P99US       float64 `json:"p99_us"`
	RSSMB       float64 `json:"rss_mb"`
	CPUSecPerGB float64 `json:"cpu_s_per_gb"`
	Verified    bool    `json:"verified"`
}

// samples are the values of one figure, one a round.
type samples []float64

func (s samples) sorted() []float64 { out := slices.Clone(s); slices.Sort(out); return out }

func (s samples) median() float64 { return Median(s) }

// Median returns the middle value, or the mean of the two in the middle; 0
// without values.
func Median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return 0
	}
	sorted := samples(values).sorted()
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// quantile returns the value below which a share q of the samples lies, the
// nearest sample, 0 without samples.
func (s samples) quantile(q float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := s.sorted()
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// row returns the row of a figure's samples.
func (s samples) row(name, unit string) Row {
	sorted := s.sorted()
	if len(sorted) == 0 {
		return Row{Name: name, Unit: unit, Why: "no round was run"}
	}
	return Row{Name: name, Unit: unit, Value: s.median(), Min: sorted[0], Max: sorted[len(sorted)-1]}
}

// against completes a row with its ratio to a figure of the same rounds: the
// median of the ratios round by round, so that a machine whose speed drifts
// moves both sides alike.
func (s samples) against(row Row, other samples, otherName, target string) (Row, error) {
	if len(s) != len(other) || len(s) == 0 {
		return row, fmt.Errorf("cannot compare %s with %s: %d and %d rounds", row.Name, otherName, len(s), len(other))
	}
	var ratios samples
	for i := range s {
		ratios = append(ratios, s[i]/other[i])
	}
	ratio := ratios.median()
	row.Ratio, row.RatioTo = &ratio, &otherName
	return row.judge(ratio, target)
}

// judge completes a row with its target, if there is one.
func (r Row) judge(value float64, target string) (Row, error) {
	if target == "" {
		return r, nil
	}
	number, least := strings.CutPrefix(target, ">=")
	number, most := strings.CutPrefix(number, "<=")
	bound, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	switch {
	case err != nil:
		return r, fmt.Errorf("cannot read target %q of %s: %w", target, r.Name, err)
	case least == most || math.IsNaN(bound) || math.IsInf(bound, 0):
		return r, fmt.Errorf("cannot read target %q of %s: neither >= nor <= and a number", target, r.Name)
	}
	ok := value <= bound
	if least {
		ok = value >= bound
	}
	r.Target, r.OK = &target, &ok
	return r, nil
}

// WriteJSON writes the report as one JSON object.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes the report as a table.
func (r Report) WriteText(w io.Writer) error {
	fmt.Fprintf(w, "%s\n\n", r.Machine)
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "figure\tmedian\tmin\tmax\tunit\tratio\tto\ttarget\t \t")
	for _, row := range append(slices.Clone(r.Ceilings), r.Rows...) {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", row.Name, figure(row.Value), figure(row.Min), figure(row.Max), row.Unit,
			optional(row.Ratio, func(v float64) string { return fmt.Sprintf("%.2f", v) }), optional(row.RatioTo, keep), optional(row.Target, keep), verdict(row))
	}
	return t.Flush()
}

func keep(s string) string { return s }

func optional[T any](v *T, show func(T) string) string {
	if v == nil {
		return ""
	}
	return show(*v)
}

func figure(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }

func verdict(r Row) string {
	switch {
	case r.OK == nil && r.Why != "":
		return "not run: " + r.Why
	case r.OK == nil:
		return ""
	case *r.OK:
		return "ok"
	}
	return "MISSED"
}

// Missed returns the names of the rows that missed their target.
func (r Report) Missed() []string {
	var names []string
	for _, row := range r.Rows {
		if row.OK != nil && !*row.OK {
			names = append(names, row.Name)
		}
	}
	return names
}

// thisMachine reads what the kernel says of the machine; what it does not say
// stays empty.
func thisMachine(version string) Machine {
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version(), Version: version}
	m.CPU = field("/proc/cpuinfo", "model name")
	kib, _ := strconv.ParseFloat(strings.TrimSuffix(field("/proc/meminfo", "MemTotal"), " kB"), 64)
	m.MemoryGiB = kib / (1 << 20)
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	m.Kernel = strings.TrimSpace(string(kernel))
	return m
}

// field returns the first value of a "name : value" line.
func field(path, name string) string {
	b, _ := os.ReadFile(path)
	for line := range strings.Lines(string(b)) {
		k, v, ok := strings.Cut(line, ":")
		if ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
