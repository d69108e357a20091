package main

import (
	"fmt"
	"regexp"

	"github.com/spf13/cobra"

	"membrane/bench"
	"membrane/bench/peers"
)

func newBenchPeersCommand() *cobra.Command {
	var opts peers.Options
	var asJSON, asMarkdown, strict bool
	var out string
	cmd := &cobra.Command{
		Use:   "peers",
		Short: "Membrane beside Redis, Valkey, LMCache, Mooncake and kvblockd, in one run",
		Long: `Start every system that is on this machine, each as a process on its own
loopback port, and measure them in turn with one client: the same loop, keys and
payloads, every payload checked. While one is measured, all others are stopped
(SIGSTOP). Every round takes every cell; a ratio is the median of the ratios
round by round. The ceilings of the run (memcpy, a bare TCP copy of the same
messages, an empty HTTP server) are measured beside them.

A system that is not on this machine has a row that says so. "make
bench-peers-setup" fills the folder of --peers-dir with those that can be had.

The default grid is the cells of the targets: about 12 minutes and 12 GiB of
memory. --full measures three sizes of values, 1 to 64 streams, batches, writes,
mixed loads and a working set of four times the budget: about an hour. Leave the
machine alone meanwhile.`,
		Example: `  membrane bench peers
  membrane bench peers --systems redis,membrane --cells 'get 2MiB streams'
  membrane bench peers --full --out build/peers`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON && asMarkdown {
				return usageError{fmt.Errorf("--json and --markdown: choose one")}
			}
			if _, err := regexp.Compile(opts.Cells); err != nil {
				return usageError{fmt.Errorf("--cells %q: %w", opts.Cells, err)}
			}
			if opts.Rounds < 1 {
				return usageError{fmt.Errorf("--rounds %d: is not above 0", opts.Rounds)}
			}
			if opts.Duration < 0 {
				return usageError{fmt.Errorf("--duration %v: is negative", opts.Duration)}
			}
			opts.Version = version
			opts.Progress = progress(cmd.ErrOrStderr())
			report, err := peers.Run(cmd.Context(), opts)
			if err != nil {
				return err
			}
			if err := writeReport(cmd.OutOrStdout(), report, asJSON, asMarkdown); err != nil {
				return err
			}
			if out != "" {
				if err := bench.Save(report, out, "peers"); err != nil {
					return err
				}
			}
			if missed := report.Missed(); strict && len(missed) > 0 {
				return fmt.Errorf("targets missed: %q", missed)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.Dir, "peers-dir", "", "folder with the peers' programs (default membrane/peers in the cache folder)")
	flags.StringSliceVar(&opts.Systems, "systems", nil, "measure only systems whose names contain one of these")
	flags.StringVar(&opts.Cells, "cells", "", "measure only cells whose names match this expression, as 'get 2MiB streams=8'")
	flags.BoolVar(&opts.Full, "full", false, "the whole grid, about an hour")
	flags.BoolVar(&opts.Quick, "quick", false, "little memory and an instant a cell, to see that all rows work")
	flags.IntVar(&opts.Rounds, "rounds", 3, "how often every cell is measured")
	flags.DurationVar(&opts.Duration, "duration", 0, "how long a cell is measured in a round (default 2.5s, with --full 1.5s, with --quick 50ms)")
	flags.Uint64Var(&opts.Seed, "seed", 1, "order of the keys")
	flags.BoolVar(&asJSON, "json", false, "print one JSON object instead of tables")
	flags.BoolVar(&asMarkdown, "markdown", false, "print Markdown instead of text tables")
	flags.StringVar(&out, "out", "", "also write peers.txt, peers.json and peers.md into this folder (make bench draws plots from them)")
	flags.BoolVar(&strict, "strict", false, "exit 1 when a target is missed")
	return cmd
}

// newPeersSourceCommands return the ceilings of bench peers, which it starts as
// processes of their own.
func newPeersSourceCommands() []*cobra.Command {
	return []*cobra.Command{
		{
			Use: "peers-source", Hidden: true, Args: refuseArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return peers.ServeBare(cmd.InOrStdin(), cmd.OutOrStdout())
			},
		},
		{
			Use: "peers-empty", Hidden: true, Args: refuseArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return peers.ServeEmpty(cmd.InOrStdin(), cmd.OutOrStdout())
			},
		},
	}
}
