package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"membrane/bench"
)

// newBenchPDCommand returns `membrane bench pd`.
func newBenchPDCommand() *cobra.Command {
	var opts bench.PDOptions
	var asJSON, asMarkdown, strict bool
	var out string
	cmd := &cobra.Command{
		Use:   "pd",
		Short: "Prefill and decode on different nodes beside both on one, and the hand-over between them",
		Long: `Measure prefill and decode on different nodes, on sidecars of this binary that run
as processes of their own with the embedded engine:

  placements    one schedule of requests against two nodes that do both phases,
                and against one that prefills and one that decodes: time to first
                token, time between tokens
  hand-over     from the end of a prefill to the first token on the other node,
                against the prompt's length, with and without overlap
  64 MiB        the hand-over of as much KV to an engine, beside a bare copy over
                the loopback interface
  aborts        what requests leave behind that are given up at any moment:
                goroutines, pins, bytes in the arena

Each node of the placements and the hand-over has one processor (GOMAXPROCS=1).
Needs about 2 GiB of memory and eight minutes; with --quick some seconds.`,
		Example: "  make bench-pd\n  membrane bench pd --quick\n  membrane bench pd --out build/bench   # pd.txt, pd.json, pd.md\n  membrane bench pd --lengths 1024,8192 --rounds 9",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON && asMarkdown {
				return usageError{errors.New("--json and --markdown are two forms of one report: give one of them")}
			}
			if err := opts.Check(); err != nil {
				return usageError{err}
			}
			opts.Version = version
			opts.Progress = progress(cmd.ErrOrStderr())
			report, err := bench.PD(cmd.Context(), opts)
			if err != nil {
				return err
			}
			if out != "" {
				if err := bench.Save(report, out, "pd"); err != nil {
					return err
				}
			}
			if err := writeReport(cmd.OutOrStdout(), report, asJSON, asMarkdown); err != nil {
				return err
			}
			if missed := report.Missed(); strict && len(missed) > 0 {
				return fmt.Errorf("targets missed: %q", missed)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&opts.Quick, "quick", false, "few, short prompts and few requests, to see that all rows work")
	flags.IntSliceVar(&opts.Lengths, "lengths", nil, "prompts of the hand-over, in tokens (default 512,1024,2048,4096)")
	flags.IntVar(&opts.Rounds, "rounds", 0, "how often every hand-over is taken (default 5)")
	flags.IntVar(&opts.Requests, "requests", 0, "requests to each placement (default 60)")
	flags.Float64Var(&opts.Rate, "rate", 0, "of them a second, on the mean (default 1)")
	flags.IntVar(&opts.Prompt, "prompt-tokens", 0, "tokens of their prompts (default 1024)")
	flags.IntVar(&opts.Answer, "answer-tokens", 0, "tokens of their answers (default 32)")
	flags.IntVar(&opts.Aborts, "aborts", 0, "requests that are given up (default 10000)")
	flags.Uint64Var(&opts.Seed, "seed", 1, "what arrivals follow from")
	flags.StringVar(&out, "out", "", "folder for the report in every form, too")
	flags.BoolVar(&asJSON, "json", false, "print one JSON object instead of tables")
	flags.BoolVar(&asMarkdown, "markdown", false, "print Markdown instead of text tables")
	flags.BoolVar(&strict, "strict", false, "exit 1 when a target is missed")
	return cmd
}
