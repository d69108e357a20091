package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"membrane/bench"
	"membrane/bench/replay"
)

// newBenchReplayCommand returns `membrane bench replay`.
func newBenchReplayCommand() *cobra.Command {
	var opts replay.Options
	var files, names []string
	var format, output, out string
	var seed uint64
	var requests int
	var strict bool
	var nodes replay.NodesOptions
	cmd := &cobra.Command{
		Use:   "replay",
		Short: "Play traces of prompts against the cache, LRU, ristretto and the optimum",
		Long: `Play traces of requests, each a prompt as a list of block hashes, against caches
of equal memory, and print which part of the prompts' tokens each saves: this
project's cache (the real one, over a real arena whose small pages stand for KV),
plain LRU, the ristretto library alone, and the offline optimum.

A request hits the longest run of its leading blocks that are held; the others
are computed and stored. Time is that of the trace: nothing waits. The first
token is modelled as loaded tokens / --load-rate + other tokens / --prefill-rate.

With --nodes N the traces are played against N sidecars of this binary that run
as processes in one mesh and share the memory: an engine at each matches, copies
out of shared memory, compares every byte, releases, and stores the rest, in
pages of 256 bytes that stand for blocks.

Traces are files in one of the published formats (--trace, repeated; the format
is seen from the first line):
  mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids
            (blocks of 512 tokens)
  bailian   JSON lines: chat_id, parent_chat_id, timestamp (s), input_length,
            output_length, type, turn, hash_ids (blocks of 16 tokens)
or made by generators whose parameters the report states (--workload):
` + workloadList(),
		Example: `  membrane bench replay
  membrane bench replay --trace conversation_trace.jsonl --fractions 0.05,0.2
  membrane bench replay --workload agents --policies membrane,lru --json
  membrane bench replay --workload chat --nodes 3 --random --fractions 0.2
  membrane bench replay --markdown > replay.md`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			write, err := reportWriter(output)
			if err != nil {
				return err
			}
			traces, err := replayTraces(files, names, format, seed, requests)
			if err != nil {
				return err
			}
			say := progress(cmd.ErrOrStderr())
			if nodes.Nodes > 0 {
				nodes.Progress, nodes.TokenBytes = say, opts.TokenBytes
				return replayNodes(cmd, traces, nodes, opts.Fractions, output)
			}
			opts.Progress = say
			report, err := replay.Run(cmd.Context(), traces, opts)
			if err != nil {
				return err
			}
			if err := write(report, cmd.OutOrStdout()); err != nil {
				return err
			}
			if out != "" {
				if err := bench.Save(report, out, "replay"); err != nil {
					return err
				}
			}
			if strict && (report.Target == nil || !report.Target.OK) {
				return fmt.Errorf("target missed")
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&files, "trace", nil, "play this file (repeated); without it and --workload all workloads")
	flags.StringVar(&format, "format", "", "format of the files: mooncake or bailian (default: seen from the first line)")
	flags.StringSliceVar(&names, "workload", nil, "play these generated traces")
	var workloads []string
	for _, w := range replay.Workloads() {
		workloads = append(workloads, w.Name)
	}
	offer(cmd, "workload", workloads...)
	flags.Uint64Var(&seed, "seed", 1, "seed of the generators")
	flags.IntVar(&requests, "requests", 0, "how many requests a generator makes (default: as many as it is calibrated for)")
	flags.Float64SliceVar(&opts.Fractions, "fractions", nil, "cache sizes as `parts` of the distinct blocks")
	flags.Lookup("fractions").DefValue = "0.05,0.1,0.2,0.4, with --nodes 0.2"
	flags.StringSliceVar(&opts.Policies, "policies", nil, "which of membrane, lru, lru-heads-first, ristretto, optimum (default all)")
	offer(cmd, "policies", "membrane", "lru", "lru-heads-first", "ristretto", "optimum")
	flags.Float64Var(&opts.PrefillRate, "prefill-rate", 8000, "tokens computed a second")
	flags.Float64Var(&opts.LoadRate, "load-rate", 200_000, "tokens loaded from the cache a second")
	flags.Int64Var(&opts.TokenBytes, "token-bytes", 128<<10, "bytes of KV of one token")
	flags.StringVar(&output, "output", "text", "text, json or markdown")
	flags.StringVar(&out, "out", "", "also write replay.txt, replay.json and replay.md into this folder (make bench draws plots from them)")
	flags.BoolVar(&strict, "strict", false, "exit 1 when the target is missed: on the mean above lru and ristretto, nowhere more than 1 % below the better of them")
	flags.IntVar(&nodes.Nodes, "nodes", 0, "play against this many sidecars in one mesh instead")
	flags.BoolVar(&nodes.Random, "random", false, "with --nodes: send each request to any node instead of that of its session")
	flags.Float64Var(&nodes.Speed, "speed", 0, "with --nodes: keep the trace's times, this many times as fast (default: do not wait)")
	for _, short := range []string{"json", "markdown"} {
		flags.BoolFunc(short, "the same as --output "+short, func(string) error { output = short; return nil })
	}
	return cmd
}

// replayNodes plays every trace at every size against sidecars.
func replayNodes(cmd *cobra.Command, traces []*replay.Trace, opts replay.NodesOptions, fractions []float64, output string) error {
	var err error
	if opts.Binary, err = os.Executable(); err != nil {
		return fmt.Errorf("cannot find the binary of sidecars: %w", err)
	}
	if len(fractions) == 0 {
		fractions = []float64{0.2}
	}
	var rows []replay.NodesReport
	for _, t := range traces {
		for _, opts.Fraction = range fractions {
			row, err := replay.RunNodes(cmd.Context(), t, opts)
			if err != nil {
				return err
			}
			rows = append(rows, row)
		}
	}
	switch output {
	case "json":
		enc := json.NewEncoder(cmd.OutOrStdout())
		enc.SetIndent("", "  ")
		return enc.Encode(rows)
	case "markdown":
		return replay.WriteNodesMarkdown(cmd.OutOrStdout(), rows)
	}
	return replay.WriteNodesText(cmd.OutOrStdout(), rows)
}

func workloadList() string {
	var b strings.Builder
	for _, w := range replay.Workloads() {
		var kinds []string
		for _, p := range w.Parts {
			kinds = append(kinds, p.Kind)
		}
		fmt.Fprintf(&b, "  %-14s %s, %d requests, blocks of %d tokens\n", w.Name, strings.Join(kinds, " and "), w.Requests, w.BlockTokens)
	}
	return strings.TrimRight(b.String(), "\n")
}

func reportWriter(output string) (func(replay.Report, io.Writer) error, error) {
	switch output {
	case "text":
		return replay.Report.WriteText, nil
	case "json":
		return replay.Report.WriteJSON, nil
	case "markdown":
		return replay.Report.WriteMarkdown, nil
	}
	return nil, usageError{fmt.Errorf("--output %q: not text, json or markdown", output)}
}

// replayTraces reads the files and makes the workloads that were asked for.
func replayTraces(files, names []string, format string, seed uint64, requests int) ([]*replay.Trace, error) {
	var f replay.Format
	switch format {
	case "":
	case replay.Mooncake.Name:
		f = replay.Mooncake
	case replay.Bailian.Name:
		f = replay.Bailian
	default:
		return nil, usageError{fmt.Errorf("--format %q: not mooncake or bailian", format)}
	}
	if requests < 0 || requests > replay.MaxRequests {
		return nil, usageError{fmt.Errorf("--requests %d: not between 0 and %d", requests, replay.MaxRequests)}
	}
	var traces []*replay.Trace
	for _, name := range files {
		t, err := readTrace(name, f)
		if err != nil {
			return nil, err
		}
		traces = append(traces, t)
	}
	all := len(files) == 0 && len(names) == 0
	for _, w := range replay.Workloads() {
		if !all && !take(&names, w.Name) {
			continue
		}
		t, err := w.Trace(seed, requests)
		if err != nil {
			return nil, err
		}
		traces = append(traces, t)
	}
	if len(names) > 0 {
		return nil, usageError{fmt.Errorf("--workload %q: there is none of this name", names[0])}
	}
	return traces, nil
}

// take removes a name from a list and reports whether it was there.
func take(list *[]string, name string) bool {
	for i, n := range *list {
		if n == name {
			*list = append((*list)[:i:i], (*list)[i+1:]...)
			return true
		}
	}
	return false
}

func readTrace(name string, f replay.Format) (*replay.Trace, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, usageError{fmt.Errorf("--trace: %w", err)}
	}
	defer func() { _ = file.Close() }()
	return replay.Read(file, name, f)
}
