package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// PDArm is what one placement of the two phases did with the schedule. Times
// count from when a request was due.
type PDArm struct {
	Name     string      `json:"name"`
	Why      string      `json:"why,omitempty"`
	Requests int         `json:"requests"`
	Failed   int         `json:"failed"`
	TTFT     Percentiles `json:"ttft"`
	ITL      Percentiles `json:"itl"`
	// LongestGap is the longest wait between two tokens of each request.
	LongestGap Percentiles `json:"longest_gap"`
	// Recomputed is how many prompt tokens decodes had to compute.
	Recomputed int `json:"recomputed_tokens"`
}

// placements runs one schedule against two nodes that both do both phases, and
// against one that prefills and one that decodes.
func (b *pd) placements(ctx context.Context) error {
	for _, arm := range []struct{ name, p, d string }{{"colocated", "both", "both"}, {"disaggregated", "prefill", "decode"}} {
		nodes, err := b.pair(ctx, arm.p, arm.d)
		if err != nil {
			return err
		}
		b.opts.Progress(fmt.Sprintf("%s: %d requests", arm.name, b.opts.Requests))
		got, err := b.load(ctx, nodes, arm.name == "colocated")
		nodes.close()
		if err != nil {
			return err
		}
		got.Name = arm.name
		b.report.Arms = append(b.report.Arms, got)
	}
	b.report.Rows = append(b.report.Rows, comparePlacements(b.report.Arms[0], b.report.Arms[1])...)
	return nil
}

// comparePlacements returns the rows that compare two placements. The times are
// of the requests that were answered: where some were not, they are of others
// than those of the other placement, and are not compared.
func comparePlacements(colocated, apart PDArm) []Row {
	var rows []Row
	for _, f := range []struct {
		name          string
		value, beside float64
	}{
		{"first token, disaggregated, p50", apart.TTFT.P50, colocated.TTFT.P50},
		{"between tokens, disaggregated, p99", apart.ITL.P99, colocated.ITL.P99},
		{"longest gap of an answer, disaggregated, p50", apart.LongestGap.P50, colocated.LongestGap.P50},
	} {
		row := Row{Name: f.name, Unit: "ms"}
		if colocated.Failed+apart.Failed > 0 {
			row.Why = fmt.Sprintf("%d colocated and %d disaggregated requests failed", colocated.Failed, apart.Failed)
		} else {
			ratio, to := f.value/max(f.beside, 0.001), "colocated"
			row.Value, row.Min, row.Max, row.Ratio, row.RatioTo = f.value, f.value, f.value, &ratio, &to
		}
		rows = append(rows, row)
	}
	return rows
}

// load sends the schedule to two nodes: each request to one of them in turn, or
// the prefill to the one and the decode to the other.
func (b *pd) load(ctx context.Context, nodes *pair, colocated bool) (PDArm, error) {
	client := newPDClient()
	defer client.close()
	warm := [][2]string{{nodes.p.http, nodes.d.http}}
	if colocated {
		warm = [][2]string{{nodes.p.http, nodes.p.http}, {nodes.d.http, nodes.d.http}}
	}
	for _, at := range warm { // the model is made
		if _, _, err := client.both(ctx, at[0], at[1], b.prompt(200), 1, false); err != nil {
			return PDArm{}, err
		}
	}
	random := rand.New(rand.NewPCG(b.opts.Seed, 3))
	type result struct {
		first      time.Duration
		gaps       samples
		recomputed int
		err        error
	}
	results := make([]result, b.opts.Requests)
	begin, at := time.Now(), 0.0
	var under sync.WaitGroup
	defer under.Wait()
	for i := range results {
		at += random.ExpFloat64() / b.opts.Rate
		due := begin.Add(time.Duration(at * float64(time.Second)))
		prompt := b.prompt(b.opts.Prompt)
		p, d := nodes.p.http, nodes.d.http
		if colocated {
			p = []string{p, d}[i%2]
			d = p
		}
		timer := time.NewTimer(time.Until(due))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return PDArm{}, ctx.Err()
		}
		under.Go(func() {
			_, got, err := client.both(ctx, p, d, prompt, b.opts.Answer, true)
			r := result{err: err, recomputed: got.recomputed}
			for k, when := range got.arrivals {
				if k == 0 {
					r.first = when.Sub(due)
				} else {
					r.gaps = append(r.gaps, millis(when.Sub(got.arrivals[k-1])))
				}
			}
			results[i] = r
		})
	}
	under.Wait()
	arm := PDArm{Requests: len(results)}
	var ttft, itl, longest samples
	for _, r := range results {
		if r.err != nil {
			b.opts.Progress(fmt.Sprintf("a request failed: %v", r.err))
			arm.Failed++
			continue
		}
		arm.Recomputed += r.recomputed
		ttft = append(ttft, millis(r.first))
		itl = append(itl, r.gaps...)
		longest = append(longest, r.gaps.quantile(1))
	}
	arm.TTFT, arm.ITL, arm.LongestGap = percentiles(ttft), percentiles(itl), percentiles(longest)
	return arm, ctx.Err()
}
