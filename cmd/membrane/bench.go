package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"membrane/bench"
)

// newBenchCommand returns `membrane bench`.
func newBenchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure membrane, every figure beside a ceiling of the same run",
		Args:  refuseArgs,
		RunE:  needsCommand,
	}
	cmd.AddCommand(
		newBenchCoreCommand(), newBenchPeersCommand(), newBenchReplayCommand(), newBenchServeCommand(),
		newBenchPDCommand(), newBenchCapacityCommand(), newBenchChaosCommand(), newFrameSourceCommand(), newReverseProxyCommand(), newKeepGroupCommand(),
	)
	cmd.AddCommand(newPeersSourceCommands()...)
	return cmd
}

func newBenchCoreCommand() *cobra.Command {
	var opts bench.CoreOptions
	var asJSON, asMarkdown, strict bool
	var floorsFile string
	attempts := 1
	cmd := &cobra.Command{
		Use:   "core",
		Short: "Match, lease, shared-memory read, store and peer fill",
		Long: `Measure the paths that everything else stands on, on sidecars of this binary
that run as processes of their own: match, lease, read from shared memory, store
and fill from a peer. Every round takes every figure and its ceiling (memcpy, a
bare TCP copy, a bare hash chain, an empty request); a ratio is the median of
the ratios round by round.

With --vllm the first token of real vLLM is measured too, a prompt a round:
loaded from the engine's own sidecar and from a peer's, beside a connector
without a sidecar and beside computing it. Without, its rows say that they were
not run.

Needs about 4 GiB of memory; with --quick 1 GiB; for vLLM 6 GiB,
with --lmcache 12 GiB.`,
		Example: "  membrane bench core\n  membrane bench core --json > core.json\n  make bench-vllm",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if opts.VLLMOnly && opts.VLLM.Python == "" {
				return usageError{errors.New("--vllm-only: needs --vllm")}
			}
			if attempts < 1 {
				return usageError{fmt.Errorf("--attempts %d: is not above 0", attempts)}
			}
			floors, err := readFloors(floorsFile)
			if err != nil {
				return usageError{fmt.Errorf("--floors: %w", err)}
			}
			opts.Version = version
			say := progress(cmd.ErrOrStderr())
			opts.Progress = say
			report, err := bench.Core(cmd.Context(), opts)
			if err != nil {
				return err
			}
			if floors != nil {
				all := []bench.Report{report}
				for err := floors.Check(all...); err != nil; err = floors.Check(all...) {
					if len(all) == attempts {
						return errors.Join(writeReport(cmd.OutOrStdout(), report, asJSON, asMarkdown), fmt.Errorf("below the floor in each of %d attempts: %w", attempts, err))
					}
					say(fmt.Sprintf("measured again, attempt %d of %d: %v", len(all)+1, attempts, err))
					if report, err = bench.Core(cmd.Context(), opts); err != nil {
						return err
					}
					all = append(all, report)
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
	flags.BoolVar(&asJSON, "json", false, "print one JSON object instead of a table")
	flags.BoolVar(&asMarkdown, "markdown", false, "print Markdown instead of a text table")
	flags.BoolVar(&opts.Quick, "quick", false, "less memory and three rounds, to see that all rows work")
	flags.IntVar(&opts.Rounds, "rounds", 0, "how often every figure is taken (default 15, with --quick 3)")
	vllmFlags(flags, &opts.VLLM)
	flags.StringVar(&opts.VLLM.LMCache, "lmcache", "", "with --vllm: a Python interpreter that has vLLM and LMCache, to measure beside it")
	flags.BoolVar(&opts.VLLMOnly, "vllm-only", false, "with --vllm: measure nothing but vLLM; --rounds is the number of prompts")
	flags.StringVar(&floorsFile, "floors", "", "exit 1 when a row is below its floor in this file")
	flags.IntVar(&attempts, "attempts", attempts, "with --floors: measure everything again, up to so many times in all, until each row has met its floor once")
	flags.BoolVar(&strict, "strict", false, "exit 1 when a target is missed")
	return cmd
}

// writeReport writes a report as a table, unless another form was asked for.
func writeReport(w io.Writer, r bench.Forms, asJSON, asMarkdown bool) error {
	switch {
	case asJSON:
		return r.WriteJSON(w)
	case asMarkdown:
		return r.WriteMarkdown(w)
	}
	return r.WriteText(w)
}

// newFrameSourceCommand returns the far end of the bare TCP copy, which the
// benchmarks start as a process of its own.
func newFrameSourceCommand() *cobra.Command {
	var memory int
	cmd := &cobra.Command{
		Use: "frame-source", Hidden: true, Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.FrameSource(cmd.InOrStdin(), cmd.OutOrStdout(), memory)
		},
	}
	cmd.Flags().IntVar(&memory, "memory", 512<<20, "bytes of memory that the frames come from")
	return cmd
}

// newReverseProxyCommand returns the bare reverse proxy, and the engine behind
// it, which the benchmarks start as processes of their own.
func newReverseProxyCommand() *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use: "reverse-proxy", Hidden: true, Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.ReverseProxy(cmd.InOrStdin(), cmd.OutOrStdout(), to)
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "HOST:PORT that requests go to; empty: they are answered here")
	return cmd
}

// newKeepGroupCommand returns the guard that the benchmarks start an engine
// with.
func newKeepGroupCommand() *cobra.Command {
	return &cobra.Command{
		Use: "keep-group -- PROGRAM [ARGUMENT]...", Hidden: true, Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return bench.KeepGroup(cmd.InOrStdin(), cmd.OutOrStdout(), os.Stderr, args)
		},
	}
}

// vllmFlags say where vLLM is.
func vllmFlags(flags *pflag.FlagSet, opts *bench.VLLMOptions) {
	flags.StringVar(&opts.Python, "vllm", "", "a Python interpreter that has vLLM for CPU (make bench-vllm installs one)")
	flags.StringVar(&opts.Connector, "connector", "", "folder with the package membrane_kv (engines/python in a checkout); empty where the interpreter has it installed")
	flags.StringVar(&opts.Logs, "vllm-logs", "", "keep what the vLLM servers say in this folder")
}

// readFloors reads a file of floors; none without a path.
func readFloors(path string) (bench.Floors, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return bench.ReadFloors(f)
}
