package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"membrane/bench/capacity"
)

// newBenchCapacityCommand returns `membrane bench capacity`.
func newBenchCapacityCommand() *cobra.Command {
	var inProcess, cluster, strict bool
	var rounds int
	var each time.Duration
	output := "text"
	cmd := &cobra.Command{
		Use:   "capacity",
		Short: "How reads grow with processors and with nodes",
		Long: `Measure how what is read a second grows with what there is to read from:

  in process  lookups and views of resident pages in this process, on one
              processor (GOMAXPROCS 1, one goroutine) and on two; target 1.8 times
  cluster     pages read from a mesh of three and of five sidecars of this
              binary, each with a fifth of one core (control groups, so it needs
              root, or a writable group); target 1.6 times, 1.67 is linear

Where processes cannot be limited, the row says why it was not run.`,
		Example: "  membrane bench capacity\n  membrane bench capacity --in-process --json",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 || rounds > 1000 {
				return usageError{fmt.Errorf("--rounds %d: not between 1 and 1000", rounds)}
			}
			if each < time.Millisecond || each > time.Minute {
				return usageError{fmt.Errorf("--each %v: not between 1ms and 1m", each)}
			}
			if !inProcess && !cluster {
				inProcess, cluster = true, true
			}
			say := progress(cmd.ErrOrStderr())
			report := capacity.Report{Predecessor: capacity.Predecessor}
			if inProcess {
				rows, err := capacity.RunInProcess(cmd.Context(), rounds, each, say)
				if err != nil {
					return err
				}
				report.InProcess = rows
			}
			if cluster {
				binary, err := os.Executable()
				if err != nil {
					return fmt.Errorf("cannot find the binary of sidecars: %w", err)
				}
				row, err := capacity.RunCluster(cmd.Context(), binary, rounds, each, say)
				if err != nil {
					return err
				}
				report.Cluster = &row
			}
			if err := writeReport(cmd.OutOrStdout(), report, output == "json", output == "markdown"); err != nil {
				return err
			}
			if missed := report.Missed(); strict && len(missed) > 0 {
				return fmt.Errorf("targets missed: %q", missed)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&inProcess, "in-process", false, "only lookups in this process")
	flags.BoolVar(&cluster, "cluster", false, "only the clusters of sidecars")
	flags.IntVar(&rounds, "rounds", 15, "how often every figure is taken")
	flags.DurationVar(&each, "each", time.Second, "how long each figure is measured a round; clusters three times as long")
	flags.BoolVar(&strict, "strict", false, "exit 1 when a target is missed")
	for _, short := range []string{"json", "markdown"} {
		flags.BoolFunc(short, "print as "+short, func(string) error { output = short; return nil })
	}
	return cmd
}
