package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"membrane/bench"
)

// newDemoCommand returns `membrane demo`.
func newDemoCommand() *cobra.Command {
	var asJSON, keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show KV computed by one engine being reused by another",
		Long: `Start three sidecars that find each other by gossip, each with an embedded
engine, every one a process of its own on free loopback ports. One engine
prefills a prompt, another decodes it from the first one's KV; the tokens are
compared with a computation without any cache, and the tokens reused are read
from the byte counters of the sidecar that served them. Then a shared-prefix
workload runs, and one sidecar is killed while requests are under way.

The exit status is 0 only if everything was as promised.`,
		Example: "  membrane demo\n  membrane demo --json\n  membrane demo --keep",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts := bench.DemoOptions{Progress: progress(cmd.ErrOrStderr())}
			if keep {
				opts.Keep = func(s bench.DemoSystem) { show(cmd.Context(), cmd.ErrOrStderr(), s) }
			}
			result, err := bench.Demo(cmd.Context(), opts)
			if asJSON {
				if e := result.WriteJSON(cmd.OutOrStdout()); e != nil {
					return e
				}
				return err
			}
			if err != nil {
				return err
			}
			return result.WriteText(cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object instead of tables")
	cmd.Flags().BoolVar(&keep, "keep", false, "leave everything running at the end, print the URLs and wait for Ctrl-C")
	return cmd
}

// progress returns a function that prints a line with a mark in front.
func progress(w io.Writer) func(string) {
	return func(line string) { fmt.Fprintln(w, "·", line) }
}

// show prints what runs and waits until ctx ends.
func show(ctx context.Context, w io.Writer, s bench.DemoSystem) {
	for i := range s.Sidecars {
		fmt.Fprintf(w, "sidecar n%d   http://%s/statusz   http://%s/metrics\n", i+1, s.Sidecars[i], s.Sidecars[i])
		fmt.Fprintf(w, "engine  e%d   curl -s http://%s/v1/completions -d '{\"prompt\": [1,2,3,4], \"max_tokens\": 8}'\n", i+1, s.Engines[i])
	}
	fmt.Fprintln(w, "(n1 was killed by the demo; its engine serves without it) Ctrl-C ends everything.")
	<-ctx.Done()
}
