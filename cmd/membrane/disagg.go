package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// newDisaggCommand returns `membrane disagg`.
func newDisaggCommand() *cobra.Command {
	var c apiClient
	cmd := &cobra.Command{
		Use:   "disagg",
		Short: "Prefill a prompt on one sidecar, decode behind its KV on another",
		Long: `Ask sidecars for the two halves of a request (docs/prefill-decode.md). A prefill
computes a prompt's KV on the embedded engine, keeps it under a handle, and prints
that; a decode on another node pulls the KV and goes on behind the prompt without
computing it again.

With --stream a prefill prints its handle as soon as it begins: a decode that is
asked for it then takes the pages while they are made, so that its first token comes
shortly after the prefill's end, however long the prompt is.`,
		Example: `  membrane serve -n p -p 8080 --role prefill &
  membrane serve -n d -p 8081 --role decode --peer localhost:8080 &

  membrane disagg prefill --tokens "1 2 3 4 5 6 7 8"
  membrane disagg decode --base-url http://localhost:8081 --handle HANDLE --max-tokens 16 --stream`,
		Args: refuseArgs,
		RunE: needsCommand,
	}
	flags := cmd.PersistentFlags()
	flags.StringVar(&c.base, "base-url", "http://localhost:8080", "the sidecar's HTTP listener")
	keyFlag(flags, &c.key, "api-key", "API key with scope write")
	cmd.AddCommand(c.disaggPrefillCommand(), c.disaggDecodeCommand())
	return cmd
}

// halfFlags are the flags that both halves have.
type halfFlags struct {
	model, request string
	deadline       time.Duration
	stream         bool
}

func (h *halfFlags) add(cmd *cobra.Command, stream string) {
	flags := cmd.Flags()
	flags.StringVar(&h.model, "model-id", "default", "the model; a decode names the one of its prefill")
	flags.StringVar(&h.request, "request-id", "", "comes back in the answer (default: a random one)")
	flags.DurationVar(&h.deadline, "deadline", 2*time.Minute, "the longest that the sidecar may take, to 10m")
	flags.BoolVar(&h.stream, "stream", false, stream)
	// No flag of theirs is a file, which a shell would offer.
	flags.VisitAll(func(f *pflag.Flag) { _ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.NoFileCompletions) })
	cmd.ValidArgsFunction = cobra.NoFileCompletions
}

// body returns what both requests have.
func (h *halfFlags) body() map[string]any {
	if h.request == "" {
		h.request = "cli-" + strings.ToLower(rand.Text()[:12])
	}
	b := map[string]any{"request_id": h.request, "model_id": h.model, "deadline_ms": h.deadline.Milliseconds()}
	if h.stream {
		b["stream"] = true
	}
	return b
}

// send posts a request and prints the answer, or each event of a stream in a
// line of its own.
func (h *halfFlags) send(cmd *cobra.Command, c *apiClient, path string, body map[string]any) error {
	if h.stream {
		return c.stream(cmd.Context(), cmd.OutOrStdout(), path, body)
	}
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("cannot encode the request: %w", err)
	}
	c.http.Timeout = h.deadline + clientTimeout
	return c.print(cmd.OutOrStdout(), http.MethodPost, path, b)
}

func (c *apiClient) disaggPrefillCommand() *cobra.Command {
	var h halfFlags
	var tokens string
	cmd := &cobra.Command{
		Use:   "prefill",
		Short: "Compute a prompt's KV, keep it for a decode, print its handle",
		Example: `  membrane disagg prefill --tokens "1 2 3 4 5 6 7 8"
  membrane disagg prefill --tokens "$(seq 1 4096)" --stream   # the handle comes first`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ids, err := parseTokens("--tokens", tokens)
			if err != nil {
				return err
			}
			body := h.body()
			body["token_ids"] = ids
			return h.send(cmd, c, "/disagg/prefill", body)
		},
	}
	cmd.Flags().StringVar(&tokens, "tokens", "", "the prompt: token ids, separated by spaces, commas or lines")
	h.add(cmd, "print the handle as soon as the prefill begins, the rest at its end")
	return cmd
}

func (c *apiClient) disaggDecodeCommand() *cobra.Command {
	var h halfFlags
	var handle, stop string
	var most int
	var temperature, topP float64
	var seed int64
	cmd := &cobra.Command{
		Use:   "decode",
		Short: "Generate behind a prompt that another node has prefilled",
		Example: `  membrane disagg decode --handle HANDLE --max-tokens 16
  membrane disagg decode --handle HANDLE --temperature 0.8 --seed 1 --stream`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if handle == "" {
				return usageError{errors.New("--handle is empty: give a kv_handle of membrane disagg prefill")}
			}
			body := h.body()
			body["kv_handle"], body["max_tokens"], body["temperature"] = handle, most, temperature
			if cmd.Flags().Changed("top-p") {
				body["top_p"] = topP
			}
			if cmd.Flags().Changed("seed") {
				body["seed"] = seed
			}
			if stop != "" {
				ids, err := parseTokens("--stop-tokens", stop)
				if err != nil {
					return err
				}
				body["stop_token_ids"] = ids
			}
			return h.send(cmd, c, "/disagg/decode", body)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&handle, "handle", "", "the kv_handle of a prefill, done or still running")
	flags.IntVar(&most, "max-tokens", 256, "tokens to generate at most")
	flags.Float64Var(&temperature, "temperature", 0, "0 takes the most likely token, up to 2")
	flags.Float64Var(&topP, "top-p", 1, "keep the most likely tokens whose probabilities sum to it")
	flags.Int64Var(&seed, "seed", 0, "makes the choice of tokens the same each time (default: a random one)")
	flags.StringVar(&stop, "stop-tokens", "", "token ids that end the generation, separated by spaces or commas")
	h.add(cmd, "print each token as it comes")
	return cmd
}

// maxEvent is the longest line of a stream, in bytes: the last event of a
// decode has all its tokens.
const maxEvent = 1 << 20

// stream posts a request and prints the data of each server-sent event in a
// line. It ends with ctx.
func (c *apiClient) stream(ctx context.Context, out io.Writer, path string, body any) error {
	if u, err := url.Parse(c.base); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return usageError{fmt.Errorf("--base-url %q: is not http://HOST:PORT", c.base)}
	}
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("cannot encode the request: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(c.base, "/")+path, bytes.NewReader(b))
	if err != nil {
		return usageError{fmt.Errorf("--base-url: %w", err)}
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("cannot reach the sidecar: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, maxEvent))
		return fmt.Errorf("POST %s: status %d: %s", path, resp.StatusCode, bytes.TrimSpace(text))
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	failed := false
	for lines.Scan() {
		line := lines.Text()
		failed = failed || line == "event: error"
		data, ok := strings.CutPrefix(line, "data: ")
		switch {
		case !ok:
		case failed:
			return fmt.Errorf("POST %s: failed: %s", path, data)
		case data == "[DONE]":
			return nil
		default:
			if _, err := fmt.Fprintln(out, data); err != nil {
				return err
			}
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("cannot read the stream of %s: %w", path, err)
	}
	return fmt.Errorf("the stream of %s ended before its end", path)
}
