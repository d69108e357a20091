package main

import (
	"errors"
	"math/rand/v2"
	"time"

	"github.com/spf13/cobra"

	"membrane/bench"
)

// newBenchChaosCommand returns `membrane bench chaos`.
func newBenchChaosCommand() *cobra.Command {
	var opts bench.ChaosOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "chaos",
		Short: "Kill, stop and restart members while every token is compared",
		Long: `Start three sidecars and six embedded engines, every one a process of its own, and
send random prompts that share prefixes, with a working set of four times the
cache of a sidecar. Meanwhile sidecars and engines are killed, stopped, continued
and restarted. Every token of every answer is compared with a computation without
any cache; at the end no lease, pin, handle, reservation, process or shared memory
may be left, and memory and goroutines must be level.

The seed is printed; the same seed gives the same prompts and the same faults at
the same times. The exit status is 0 only if everything was as promised.`,
		Example: "  membrane bench chaos\n  membrane bench chaos --duration 1h --seed 7 --json > chaos.json",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if opts.Duration < bench.MinChaos {
				return usageError{errors.New("--duration: " + opts.Duration.String() + " is shorter than " + bench.MinChaos.String())}
			}
			if !cmd.Flags().Changed("seed") {
				opts.Seed = rand.Uint64()
			}
			opts.Progress = progress(cmd.ErrOrStderr())
			result, err := bench.Chaos(cmd.Context(), opts)
			write := result.WriteText
			if asJSON {
				write = result.WriteJSON
			}
			if e := write(cmd.OutOrStdout()); e != nil {
				return e
			}
			for _, p := range result.Problems {
				opts.Progress("problem: " + p)
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&opts.Duration, "duration", 10*time.Minute, "how long requests run")
	flags.Uint64Var(&opts.Seed, "seed", 0, "repeats a run (default: a random one)")
	flags.BoolVar(&asJSON, "json", false, "print one JSON object instead of text")
	return cmd
}
