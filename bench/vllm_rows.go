package bench

import "slices"

// Why rows are there without figures.
const (
	vllmNotRun    = "needs vLLM, run make bench-vllm"
	lmcacheNotRun = "needs LMCache, run make bench-vllm"
)

// vllmRow is one row of vLLM's, with what it is compared with.
type vllmRow struct {
	name, unit string
	s, to      samples
	toName     string
	target     string
	// least compares the least of all prompts instead of prompt by prompt: what
	// a noisy machine allows at its best.
	least bool
	// faster turns the ratio around.
	faster bool
	// needs is why there is no row where there is nothing to compare with.
	needs string
}

func (f vllmFigures) rows() []vllmRow {
	const base, computed, lmcache = "baseline connector", "computed", "LMCache (multiprocess)"
	return []vllmRow{
		{name: "vLLM first token, local sidecar", unit: "ms", s: f.local, to: f.baseline, toName: base, target: "<= 1.3"},
		{name: "vLLM first token, local sidecar, least", unit: "ms", s: f.local, to: f.baseline, toName: base, target: "<= 1.3", least: true},
		{name: "vLLM first token, peer's sidecar", unit: "ms", s: f.peer, to: f.baseline, toName: base, target: "<= 1.8"},
		{name: "vLLM first token, peer's sidecar, least", unit: "ms", s: f.peer, to: f.baseline, toName: base, target: "<= 1.8", least: true},
		{name: "vLLM first token, local sidecar, times sooner", unit: "ms", s: f.local, to: f.cold, toName: computed, target: ">= 8", faster: true},
		{name: "vLLM first token, local sidecar, times sooner, least", unit: "ms", s: f.local, to: f.cold, toName: computed, target: ">= 8", faster: true, least: true},
		{name: "vLLM first token, peer's sidecar, times sooner", unit: "ms", s: f.peer, to: f.cold, toName: computed, target: ">= 8", faster: true},
		{name: "vLLM first token, peer's sidecar, times sooner, least", unit: "ms", s: f.peer, to: f.cold, toName: computed, target: ">= 8", faster: true, least: true},
		{name: "vLLM first token, local sidecar, beside LMCache", unit: "ms", s: f.local, to: f.lmcache, toName: lmcache, target: "<= 0.4", needs: lmcacheNotRun},
		{name: "vLLM first token, local sidecar, beside LMCache, least", unit: "ms", s: f.local, to: f.lmcache, toName: lmcache, target: "<= 0.4", least: true, needs: lmcacheNotRun},
		{name: "vLLM first token, held nowhere", unit: "ms", s: f.missed, to: f.cold, toName: computed},
		{name: "vLLM held nowhere, hooks and waiting in the first token", unit: "%", s: f.overhead, target: "<= 2"},
	}
}

// report adds the rows of vLLM to a report, and what they are compared with to
// its ceilings. Without figures the rows say what to run.
func (f vllmFigures) report(r Report) (Report, error) {
	if len(f.cold) > 0 {
		r.Ceilings = append(r.Ceilings,
			f.cold.row("vLLM first token, computed", "ms"),
			f.filled.row("vLLM first token, computed, baseline connector writing", "ms"),
			f.baseline.row("vLLM first token, baseline connector", "ms"))
	}
	if len(f.lmcache) > 0 {
		r.Ceilings = append(r.Ceilings, f.lmcache.row("vLLM first token, LMCache (multiprocess)", "ms"))
	}
	for _, v := range f.rows() {
		row, err := v.row()
		if err != nil {
			return r, err
		}
		r.Rows = append(r.Rows, row)
	}
	return r, nil
}

func (v vllmRow) row() (Row, error) {
	row := v.s.row(v.name, v.unit)
	why := ""
	switch {
	case len(v.s) == 0:
		why = vllmNotRun
	case v.needs != "" && len(v.to) == 0:
		why = v.needs
	}
	switch {
	case why != "":
		row = samples{}.row(v.name, v.unit)
		row.Why = why
		if v.target != "" {
			row.Target = &v.target
		}
		return row, nil
	case v.to == nil:
		return row.judge(row.Value, v.target)
	}
	s, to := v.s, v.to
	if v.least {
		row.Value = row.Min
		s, to = samples{slices.Min(s)}, samples{slices.Min(to)}
	}
	if !v.faster {
		return s.against(row, to, v.toName, v.target)
	}
	return to.against(row, s, v.toName, v.target)
}
