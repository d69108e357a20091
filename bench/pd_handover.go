package bench

import (
	"context"
	"fmt"
	"time"
)

// PDHandover is the hand-over of prompts of one length: from the end of the
// prefill to the first token of the decode on another node, in milliseconds,
// seen by the client of both.
type PDHandover struct {
	Tokens int `json:"tokens"`
	// PrefillMS is the prefill before it.
	PrefillMS float64 `json:"prefill_ms"`
	// Plain is with the decode asked when the prefill has ended, Overlap with
	// the decode asked when it began.
	Plain   PDTimes `json:"plain"`
	Overlap PDTimes `json:"overlap"`
}

// PDTimes are the samples of one figure.
type PDTimes struct {
	Median float64 `json:"median_ms"`
	Min    float64 `json:"min_ms"`
	Max    float64 `json:"max_ms"`
}

func timesOf(s samples) PDTimes {
	row := s.row("", "")
	return PDTimes{row.Value, row.Min, row.Max}
}

const bulkBytes = 64 * mib

// bulk times the hand-over of 64 MiB of an engine's KV: the pages are at one
// sidecar, and the match of an engine at the other brings them. Beside it as
// many bytes are copied over a bare loopback connection.
func (b *pd) bulk(ctx context.Context) error {
	c := &core{opts: CoreOptions{Binary: b.opts.Binary, Quick: true, Progress: func(string) {}}, dir: b.dir, ids: 1}
	defer c.close()
	var err error
	memory := "--memory=512MiB" // of which one client may lease a quarter
	if c.near, err = c.rig(ctx, "near", bigPage, 64, 16, memory); err != nil {
		return err
	}
	if c.far, err = c.rig(ctx, "far", bigPage, 64, 0, memory, "--peer="+c.near.sidecar.http); err != nil {
		return err
	}
	if err := waitForPeer(ctx, c.far.sidecar.http, c.near.sidecar.name); err != nil {
		return err
	}
	if c.dst, err = newDestination(c.budget() / 2); err != nil {
		return err
	}
	if err := c.openSource(); err != nil {
		return err
	}
	pages := bulkBytes / bigPage
	var bare samples
	for round := range max(b.opts.Rounds*3, 5) {
		b.opts.Progress(fmt.Sprintf("64 MiB of KV, round %d", round+1))
		tokens := c.prompt(pages * 64)
		if err := c.near.store(ctx, tokens, 64, nil); err != nil {
			return err
		}
		rate, err := c.bare.run(bigPage, pages)
		if err != nil {
			return err
		}
		bare = append(bare, bulkBytes/rate/1e6)
		if err := c.timeFill(ctx, tokens, pages); err != nil {
			return err
		}
	}
	var took samples
	for _, rate := range c.fill {
		took = append(took, bulkBytes/rate/1e6)
	}
	row, err := took.against(took.row("hand-over of 64 MiB of KV", "ms"), bare, "bare TCP copy", "<= 1.6")
	b.report.Ceilings = append(b.report.Ceilings, bare.row("bare TCP copy of 64 MiB", "ms"))
	b.report.Rows = append(b.report.Rows, row)
	return err
}

// handover times the hand-over between two nodes against the prompt's length,
// with and without overlap, in turn.
func (b *pd) handover(ctx context.Context) error {
	nodes, err := b.pair(ctx, "prefill", "decode")
	if err != nil {
		return err
	}
	defer nodes.close()
	client := newPDClient()
	defer client.close()
	if _, _, err := client.both(ctx, nodes.p.http, nodes.d.http, b.prompt(200), 1, false); err != nil { // the model is made
		return err
	}
	for _, n := range b.opts.Lengths {
		var prefill, plain, overlap samples
		for round := range b.opts.Rounds {
			b.opts.Progress(fmt.Sprintf("hand-over of %d tokens, round %d of %d", n, round+1, b.opts.Rounds))
			for _, early := range []bool{round%2 == 0, round%2 != 0} {
				began := time.Now()
				end, d, err := client.both(ctx, nodes.p.http, nodes.d.http, b.prompt(n), 1, early)
				if err != nil {
					return err
				}
				if d.recomputed > 0 {
					return fmt.Errorf("the decode of %d tokens had to compute %d of them", n, d.recomputed)
				}
				ms := max(millis(d.arrivals[0].Sub(end)), 0) // the client may hear of the token first
				if early {
					overlap = append(overlap, ms)
				} else {
					plain = append(plain, ms)
					prefill = append(prefill, millis(end.Sub(began)))
				}
			}
		}
		b.report.Handover = append(b.report.Handover, PDHandover{Tokens: n, PrefillMS: prefill.median(), Plain: timesOf(plain), Overlap: timesOf(overlap)})
	}
	return b.judgeHandover()
}

// judgeHandover adds the rows that say what the overlap is for.
func (b *pd) judgeHandover() error {
	first, last := b.report.Handover[0], b.report.Handover[len(b.report.Handover)-1]
	for _, r := range []struct {
		name, to, target string
		of, beside       PDTimes
	}{
		{"with overlap, longest prompt", "without overlap", "<= 1", last.Overlap, last.Plain},
		{"with overlap, longest prompt", "shortest prompt", "", last.Overlap, first.Overlap},
		{"without overlap, longest prompt", "shortest prompt", "", last.Plain, first.Plain},
	} {
		ratio := r.of.Median / max(r.beside.Median, 0.001)
		row := Row{Name: "hand-over " + r.name + ", beside " + r.to, Unit: "ms", Value: r.of.Median, Min: r.of.Min, Max: r.of.Max, Ratio: &ratio, RatioTo: &r.to}
		row, err := row.judge(ratio, r.target)
		if err != nil {
			return err
		}
		b.report.Rows = append(b.report.Rows, row)
	}
	return nil
}
