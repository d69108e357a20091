package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// WriteJSON writes the result as one JSON object.
func (r DemoResult) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes the result as tables for a person.
func (r DemoResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 2, 0, 3, ' ', 0)
	fmt.Fprintln(t, "\tprefilled by\theld by\ttokens reused\tfirst token\ttimes sooner")
	row := func(what, by, at string, reused int, ms float64) {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d of %d\t%.1f ms\t%.1f×\n", what, by, at, reused, r.PromptTokens, ms, r.TTFTColdMS/ms)
	}
	row("cold, at e1", "e1", "nobody", 0, r.TTFTColdMS)
	row("again, at e1", "e1", "n1", r.TokensReusedLocal, r.TTFTLocalMS)
	row("from a peer, at e2", "e1", "n1 → n2", r.TokensReusedPeer, r.TTFTPeerMS)
	if err := t.Flush(); err != nil {
		return fmt.Errorf("cannot write the table: %w", err)
	}
	equal := "yes"
	if !r.TokensEqual {
		equal = "NO"
	}
	_, err := fmt.Fprintf(w, `
tokens equal to those without a cache: %s
members seen by every sidecar:         %d
shared-prefix workload:                %d requests, %.0f %% of their tokens reused
requests while n1 was killed:          %d, answered %d
`, equal, r.MembersSeen, r.Requests, 100*r.ReusedShare, r.RequestsDuringKill, r.AnsweredDuringKill)
	return err
}
