package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// apiClient speaks to a sidecar's HTTP listener.
type apiClient struct {
	base string
	key  string
	http http.Client
}

const (
	maxAnswer     = 256 << 20
	clientTimeout = 10 * time.Second
	// prefillTimeout allows for a long prompt on the embedded engine.
	prefillTimeout = 5 * time.Minute
)

// newClientCommand returns `membrane client`.
func newClientCommand() *cobra.Command {
	var c apiClient
	cmd := &cobra.Command{
		Use:   "client",
		Short: "Ask a running sidecar over HTTP",
		Args:  refuseArgs,
		RunE:  needsCommand,
	}
	flags := cmd.PersistentFlags()
	flags.StringVar(&c.base, "base-url", "http://localhost:8080", "the sidecar's HTTP listener")
	keyFlag(flags, &c.key, "api-key", "API key")
	cmd.AddCommand(c.prefillCommand(), c.reconstructCommand(), c.retrieveCommand(), c.inventoryCommand())
	return cmd
}

func (c *apiClient) prefillCommand() *cobra.Command {
	var tokens, model string
	cmd := &cobra.Command{
		Use:     "prefill",
		Short:   "Compute a prompt's KV on the embedded engine and keep it",
		Example: `  membrane client prefill --prompt-tokens "1 2 3 4 5 6 7 8"`,
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ids, err := parseTokens("--prompt-tokens", tokens)
			if err != nil {
				return err
			}
			return c.post(cmd.OutOrStdout(), "/prefill", map[string]any{"prompt_tokens": ids, "model_id": model})
		},
	}
	cmd.Flags().StringVar(&tokens, "prompt-tokens", "", `token ids, separated by spaces or commas`)
	cmd.Flags().StringVar(&model, "model-id", "default", "the model")
	return cmd
}

func (c *apiClient) reconstructCommand() *cobra.Command {
	var tokens, model string
	var prefill bool
	cmd := &cobra.Command{
		Use:     "reconstruct",
		Short:   "Say which fragments of a prompt are cached, here or at a peer",
		Example: `  membrane client reconstruct --tokens "1 2 3 4 5 6 7 8"`,
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ids, err := parseTokens("--tokens", tokens)
			if err != nil {
				return err
			}
			return c.post(cmd.OutOrStdout(), "/reconstruct", map[string]any{"tokens": ids, "model_id": model, "prefill": prefill})
		},
	}
	cmd.Flags().StringVar(&tokens, "tokens", "", "token ids, separated by spaces or commas")
	cmd.Flags().StringVar(&model, "model-id", "default", "the model")
	cmd.Flags().BoolVar(&prefill, "prefill", false, "compute what is missing")
	return cmd
}

func (c *apiClient) retrieveCommand() *cobra.Command {
	var hash string
	cmd := &cobra.Command{
		Use:     "retrieve",
		Short:   "Describe a fragment by its payload hash",
		Example: "  membrane client retrieve --hash HASH   # a hash of membrane client inventory",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if hash == "" {
				return usageError{errors.New("--hash is empty: give a payload hash of membrane client inventory")}
			}
			return c.get(cmd.OutOrStdout(), "/retrieve?content_hash="+url.QueryEscape(hash))
		},
	}
	cmd.Flags().StringVar(&hash, "hash", "", "payload hash of the fragment")
	return cmd
}

func (c *apiClient) inventoryCommand() *cobra.Command {
	var after string
	var limit int
	cmd := &cobra.Command{
		Use:   "inventory",
		Short: "List the fragments that a sidecar holds",
		Args:  refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			q := url.Values{"after": {after}, "limit": {strconv.Itoa(limit)}}
			return c.get(cmd.OutOrStdout(), "/inventory?"+q.Encode())
		},
	}
	cmd.Flags().StringVar(&after, "after", "", "go on behind this hash (the last answer's next)")
	cmd.Flags().IntVar(&limit, "limit", 0, "at most this many (0: 100000); next in the answer is where to go on")
	return cmd
}

// parseTokens reads token ids that are separated by spaces or commas.
func parseTokens(flag, text string) ([]int64, error) {
	fields := strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == ',' || r == '\n' || r == '\t' })
	if len(fields) == 0 {
		return nil, usageError{fmt.Errorf(`%s is empty: give token ids, such as "1 2 3"`, flag)}
	}
	ids := make([]int64, len(fields))
	for i, f := range fields {
		id, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return nil, usageError{fmt.Errorf("%s: %q at position %d is not a token id", flag, f, i)}
		}
		ids[i] = id
	}
	return ids, nil
}

func (c *apiClient) post(out io.Writer, path string, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("cannot encode the request: %w", err)
	}
	c.http.Timeout = prefillTimeout
	return c.print(out, http.MethodPost, path, b)
}

func (c *apiClient) get(out io.Writer, path string) error {
	c.http.Timeout = clientTimeout
	return c.print(out, http.MethodGet, path, nil)
}

// print sends a request and writes the answer with its keys in order.
func (c *apiClient) print(out io.Writer, method, path string, body []byte) error {
	answer, err := c.do(method, path, body)
	if err != nil {
		return err
	}
	var v any
	dec := json.NewDecoder(bytes.NewReader(answer))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		return fmt.Errorf("cannot decode the answer of %s: %w", path, err)
	}
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// do sends a request and returns the answer's body; any status but 200 is an
// error with the server's own words.
func (c *apiClient) do(method, path string, body []byte) ([]byte, error) {
	if u, err := url.Parse(c.base); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, usageError{fmt.Errorf("--base-url %q: is not http://HOST:PORT", c.base)}
	}
	req, err := http.NewRequest(method, strings.TrimSuffix(c.base, "/")+path, bytes.NewReader(body))
	if err != nil {
		return nil, usageError{fmt.Errorf("--base-url: %w", err)}
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("cannot reach the sidecar: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("cannot read the answer of %s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s %s: status %d: %s", method, path, resp.StatusCode, bytes.TrimSpace(answer))
	}
	return answer, nil
}
