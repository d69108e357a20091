package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"membrane/bench"
)

// newBenchServeCommand returns `membrane bench serve`.
func newBenchServeCommand() *cobra.Command {
	var opts bench.ServeOptions
	var asJSON, asMarkdown bool
	var arms string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Open-loop load on a serving engine: first-token and inter-token times, goodput",
		Long: `Send prompts to an OpenAI-compatible server (/v1/completions, streamed) as many
users would: requests are due at random times (a Poisson process), whether or not
earlier ones have been answered. Every latency counts from when its request was
due, also where the generator held it back because --max-in-flight were under
way, so a server that stalls cannot hide it (coordinated omission).

Prompts are conversations that begin with one of a few shared prefixes and get
longer turn by turn; they are lists of token ids and follow from --seed, as the
arrivals do.

With --url the load goes to a server that runs already. Without, real vLLM is
started on this machine for one arm after the other, each from empty caches and
with the same schedule:

  membrane   membrane's connector and a sidecar
  baseline   a connector of the benchmark's own without a sidecar: files on tmpfs
  none       no connector, vLLM's own prefix cache alone
  lmcache    LMCache's multiprocess server and connector

An arm that cannot be run is in the table with the reason. A good answer, which
goodput counts, has its first token within --ttft-target and tokens no more than
--itl-target apart on the mean.`,
		Example: `  make bench-serve
  membrane bench serve --url http://127.0.0.1:8000 --rate 4 --requests 400
  membrane bench serve --vllm .venv/vllm/bin/python --connector engines/python --arms membrane,none`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON && asMarkdown {
				return usageError{errors.New("--json and --markdown are two forms of one report: give one of them")}
			}
			if arms != "" {
				opts.Arms = strings.Split(arms, ",")
			}
			if err := checkServe(opts); err != nil {
				return usageError{err}
			}
			opts.Version = version
			opts.Progress = progress(cmd.ErrOrStderr())
			report, err := bench.Serve(cmd.Context(), opts)
			if err != nil {
				return err
			}
			return writeReport(cmd.OutOrStdout(), report, asJSON, asMarkdown)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.URL, "url", "", "a running OpenAI-compatible server, http://HOST:PORT; empty starts vLLM")
	keyFlag(flags, &opts.Key, "key", "the server's API key")
	flags.StringVar(&opts.Model, "model", "", "the model's name at --url (default: the first that it lists)")
	flags.Float64Var(&opts.Rate, "rate", 0.5, "requests a second, on the mean")
	flags.IntVar(&opts.Requests, "requests", 60, "how many requests are sent, a round and an arm")
	flags.Uint64Var(&opts.Seed, "seed", 1, "what arrivals and prompts follow from")
	flags.IntVar(&opts.InFlight, "max-in-flight", 64, "the most requests under way at a time; those due beyond wait, and their wait counts")
	flags.DurationVar(&opts.Timeout, "timeout", 2*time.Minute, "a request that takes longer has failed")
	flags.DurationVar(&opts.Targets.TTFT, "ttft-target", time.Second, "the first token of a good answer comes within this time")
	flags.DurationVar(&opts.Targets.ITL, "itl-target", 100*time.Millisecond, "its tokens come no further apart on the mean")
	m := &opts.Mix
	flags.IntVar(&m.Prefixes, "prefixes", 12, "how many shared prefixes there are")
	flags.IntVar(&m.PrefixTokens, "prefix-tokens", 1024, "tokens of a shared prefix")
	flags.IntVar(&m.Conversations, "conversations", 12, "conversations under way at a time")
	flags.IntVar(&m.Turns, "turns", 4, "turns of a conversation")
	flags.IntVar(&m.TurnTokens, "turn-tokens", 192, "tokens that a turn adds to its prompt")
	flags.IntVar(&m.AnswerTokens, "answer-tokens", 16, "tokens generated, and taken as the answer in the next turn's prompt")
	flags.IntVar(&m.Vocabulary, "vocabulary", 500, "token ids that occur, from 3 on")
	vllmFlags(flags, &opts.VLLM)
	flags.StringVar(&opts.LMCache, "lmcache", "", "a Python interpreter that has vLLM and LMCache")
	flags.StringVar(&arms, "arms", "", "arms to run, with commas (default: "+strings.Join(bench.ArmNames, ",")+")")
	flags.IntVar(&opts.Rounds, "rounds", 1, "how often every arm runs the schedule")
	flags.IntVar(&opts.EngineMiB, "engine-mib", 256, "vLLM's own KV pool, in MiB")
	flags.IntVar(&opts.CacheMiB, "cache-mib", 1024, "memory of the cache beside it, in MiB")
	flags.BoolVar(&asJSON, "json", false, "print one JSON object instead of a table")
	flags.BoolVar(&asMarkdown, "markdown", false, "print a Markdown table")
	return cmd
}

func checkServe(o bench.ServeOptions) error {
	switch {
	case o.URL != "" && len(o.Arms) > 0:
		return errors.New("--arms: a server at --url is the only arm")
	case o.URL != "" && !strings.HasPrefix(o.URL, "http://") && !strings.HasPrefix(o.URL, "https://"):
		return fmt.Errorf("--url: %q does not begin with http:// or https://", o.URL)
	case o.InFlight < 1 || o.InFlight > 10_000:
		return fmt.Errorf("--max-in-flight: %d is not between 1 and 10000", o.InFlight)
	case o.Timeout <= 0:
		return fmt.Errorf("--timeout: %s is not above 0", o.Timeout)
	case o.Rounds < 1 || o.Rounds > 100:
		return fmt.Errorf("--rounds: %d is not between 1 and 100", o.Rounds)
	case o.EngineMiB < 1 || o.CacheMiB < 1:
		return errors.New("--engine-mib, --cache-mib: not above 0")
	}
	return o.Check()
}
