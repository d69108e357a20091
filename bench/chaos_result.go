package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// ChaosRequests counts the requests of a run of [Chaos].
type ChaosRequests struct {
	Sent  int `json:"sent"`
	Right int `json:"right"`
	Wrong int `json:"wrong"`
	// Failed got no answer although their engine lived.
	Failed int `json:"failed"`
	// Late were answered after the bound.
	Late int `json:"late"`
	// Aborted were given up by their client, on purpose.
	Aborted int `json:"aborted"`
	// SentAgain: their engine was killed, and they were sent again to the next
	// one of that name.
	SentAgain int `json:"sent_again"`
	// EngineStopped were answered after their engine had been stopped; the time
	// that it was does not count.
	EngineStopped int `json:"engine_stopped"`

	PromptTokens int `json:"prompt_tokens"`
	ReusedTokens int `json:"reused_tokens"`
	// LocalHits reused pages of their sidecar only, PeerHits of others, too.
	LocalHits int `json:"local_hits"`
	PeerHits  int `json:"peer_hits"`
	// MissReasons says of answers that did not reuse all, why not.
	MissReasons     map[string]int `json:"miss_reasons"`
	MaxLoadMS       float64        `json:"max_load_ms"` // wait for the sidecar
	MaxFirstTokenMS float64        `json:"max_first_token_ms"`
	MaxMS           float64        `json:"max_ms"`
}

// ReusedShare is the share of prompt tokens that were not computed.
func (r ChaosRequests) ReusedShare() float64 {
	return float64(r.ReusedTokens) / float64(max(r.PromptTokens, 1))
}

// ChaosResult is what a run of [Chaos] saw. Its JSON form is kept stable.
type ChaosResult struct {
	OK       bool     `json:"ok"`
	Problems []string `json:"problems"`
	Seed     uint64   `json:"seed"`
	// DurationS is how long requests ran; the faults began after WarmUpS.
	DurationS float64 `json:"duration_s"`
	WarmUpS   float64 `json:"warm_up_s"`

	BudgetBytes     int64          `json:"budget_bytes"` // of each sidecar
	InboxBytes      int64          `json:"inbox_bytes"`
	WorkingSetBytes int64          `json:"working_set_bytes"`
	Prompts         int            `json:"prompts"`
	Requests        ChaosRequests  `json:"requests"`
	Faults          map[string]int `json:"faults"`

	// Quiet moments: after the warm-up and after everything, all faults healed.
	EarlySidecars []ChaosSidecar `json:"early_sidecars"`
	EarlyEngines  []ChaosEngine  `json:"early_engines"`
	Sidecars      []ChaosSidecar `json:"sidecars"`
	Engines       []ChaosEngine  `json:"engines"`
	// Left of the run's processes and shared memory after the stop.
	LeftProcesses []string `json:"left_processes"`
	LeftMemfds    []string `json:"left_memfds"`
}

const (
	chaosMaxTokens = 8
	chaosDeadline  = 500 * time.Millisecond
	// chaosLoadBound is the longest wait for the sidecar before an engine
	// computes. The engine allows its deadline and a tenth for a release; the
	// rest is for waking up on a machine whose cores are all taken.
	chaosLoadBound = chaosDeadline + chaosDeadline/10 + 250*time.Millisecond
	// chaosFirstBound leaves time to compute, and for what an aborted request
	// before this one still computes, with six engines at work.
	chaosFirstBound = chaosLoadBound + 6*time.Second
	// chaosBound is the longest until the end of the stream: storing may take
	// two seconds, extending and dropping a deadline each.
	chaosBound = chaosFirstBound + 2*time.Second + 2*chaosDeadline

	// What a sidecar may have beside arena and inbox (see invariant 4).
	chaosBeside  = 96 << 20
	chaosPerPage = 512
	// How much more a quiet member may have at the end than at the beginning.
	chaosMoreGoroutines = 8
	chaosMoreFiles      = 8
	chaosMoreMemory     = 16 << 20
	// An engine has mapped one arena and one inbox.
	chaosMemfds = 2
)

// verdict returns everything that is not as promised. Problems that were
// noted during the run are in r already.
func (r *ChaosResult) verdict() []string {
	var bad []string
	check := func(ok bool, format string, args ...any) {
		if !ok {
			bad = append(bad, fmt.Sprintf(format, args...))
		}
	}
	q := r.Requests
	check(q.Wrong == 0, "%d answers have wrong tokens", q.Wrong)
	check(q.Failed == 0, "%d requests failed although their engine lived", q.Failed)
	check(q.Late == 0, "%d requests were answered too late: wait for the sidecar up to %.0f ms, first token %.0f ms, all %.0f ms", q.Late, q.MaxLoadMS, q.MaxFirstTokenMS, q.MaxMS)
	check(q.Right+q.Wrong+q.Failed+q.Aborted == q.Sent, "%d requests were sent, but %d right, %d wrong, %d failed and %d aborted", q.Sent, q.Right, q.Wrong, q.Failed, q.Aborted)
	// A run in which nothing happened proves nothing.
	check(q.LocalHits > 0, "no request reused pages of its own sidecar")
	check(q.PeerHits > 0, "no request reused pages of a peer")
	for kind := range faultKinds {
		check(r.Faults[kind.String()] > 0, "no fault %s happened", kind)
	}
	check(len(r.EarlySidecars) == chaosNodes && len(r.Sidecars) == chaosNodes, "not every sidecar could be looked at")
	check(len(r.EarlyEngines) == chaosEngines && len(r.Engines) == chaosEngines, "not every engine could be looked at")
	for i, s := range r.Sidecars {
		check(s.busy() == "", "at the end %s", s.busy())
		check(s.Evictions > 0, "%s evicted nothing", s.Name)
		check(s.Corrupt == 0, "%s found %d corrupt pages", s.Name, s.Corrupt)
		check(s.ResidentBytes <= r.BudgetBytes, "%s holds %d bytes of pages, more than its budget of %d", s.Name, s.ResidentBytes, r.BudgetBytes)
		most := s.ArenaBytes + r.InboxBytes + chaosBeside + chaosPerPage*s.Pages
		check(s.PSSBytes <= most, "%s has %d bytes of memory, more than %d", s.Name, s.PSSBytes, most)
		if i >= len(r.EarlySidecars) {
			continue
		}
		early := r.EarlySidecars[i]
		check(s.Goroutines <= early.Goroutines+chaosMoreGoroutines, "%s has %d goroutines, %d before", s.Name, s.Goroutines, early.Goroutines)
		check(s.OpenFiles <= early.OpenFiles+chaosMoreFiles, "%s has %d open files, %d before", s.Name, s.OpenFiles, early.OpenFiles)
		check(s.PSSBytes <= early.PSSBytes+chaosMoreMemory, "%s has %d bytes of memory, %d before", s.Name, s.PSSBytes, early.PSSBytes)
	}
	for i, e := range r.Engines {
		check(e.Memfds <= chaosMemfds, "%s has %d pieces of shared memory instead of %d", e.Name, e.Memfds, chaosMemfds)
		if i < len(r.EarlyEngines) {
			early := r.EarlyEngines[i]
			check(e.PSSBytes <= early.PSSBytes+chaosMoreMemory, "%s has %d bytes of memory, %d before", e.Name, e.PSSBytes, early.PSSBytes)
		}
	}
	for _, left := range append(r.LeftProcesses, r.LeftMemfds...) {
		check(false, "left after the stop: %s", left)
	}
	return bad
}

// WriteJSON writes the result as one JSON object.
func (r ChaosResult) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes the result for a person.
func (r ChaosResult) WriteText(w io.Writer) error {
	q := r.Requests
	_, err := fmt.Fprintf(w, `
seed:                %d
requests:            %d in %.0f s: %d right, %d wrong, %d failed, %d late, %d aborted on purpose
tokens reused:       %.0f %%, %d requests from their own sidecar, %d from peers, too
slowest:             wait for the sidecar %.0f ms, first token %.0f ms, whole answer %.0f ms
engine lost:         %d requests sent again after a kill, %d answered after a stop
working set:         %d MiB in %d prompts, %d MiB of cache in each sidecar
faults:             `,
		r.Seed, q.Sent, r.DurationS, q.Right, q.Wrong, q.Failed, q.Late, q.Aborted, 100*q.ReusedShare(), q.LocalHits, q.PeerHits,
		q.MaxLoadMS, q.MaxFirstTokenMS, q.MaxMS, q.SentAgain, q.EngineStopped, r.WorkingSetBytes>>20, r.Prompts, r.BudgetBytes>>20)
	if err != nil {
		return fmt.Errorf("cannot write the result: %w", err)
	}
	for kind := range faultKinds {
		fmt.Fprintf(w, " %s %d", kind, r.Faults[kind.String()])
	}
	fmt.Fprintln(w)
	for i, s := range r.Sidecars {
		if i < len(r.EarlySidecars) {
			early := r.EarlySidecars[i]
			fmt.Fprintf(w, "%-20s %d goroutines (%d before), %d MiB (%d), %d files (%d), %d pages, %d evictions\n", s.Name+":",
				s.Goroutines, early.Goroutines, s.PSSBytes>>20, early.PSSBytes>>20, s.OpenFiles, early.OpenFiles, s.Pages, s.Evictions)
		}
	}
	return nil
}
