package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/spf13/cobra"
)

const drainPoll = 100 * time.Millisecond

// newDrainCommand returns `membrane drain`.
func newDrainCommand() *cobra.Command {
	var host, key string
	var port int
	var wait bool
	var settle, limit time.Duration
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Have routers and peers look elsewhere, ahead of a stop",
		Long: `Tell a sidecar that it will be stopped: /readyz and the serving port's /health turn
503, and peers ask others to prefill. It serves on, because not everybody knows yet.

With --wait the command ends when nothing is under way any more, but not before
--settle, which is for routers that hear of it late; with status 1 after --timeout.
It is made for a preStop hook of the engine's container, before its SIGTERM.`,
		Example: `  membrane drain --wait --port 8080`,
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkPort(port); err != nil {
				return err
			}
			switch {
			case settle < 0:
				return usageError{fmt.Errorf("--settle %v: is negative", settle)}
			case limit <= 0:
				return usageError{fmt.Errorf("--timeout %v: is not above 0", limit)}
			case wait && settle > limit: // it would end early and say that all is well
				return usageError{fmt.Errorf("--settle %v: is longer than --timeout %v", settle, limit)}
			}
			c := apiClient{base: "http://" + net.JoinHostPort(host, strconv.Itoa(port)), key: key}
			c.http.Timeout = clientTimeout
			n, err := askDrain(&c)
			if err != nil || !wait {
				if err == nil {
					fmt.Fprintf(cmd.OutOrStdout(), "draining, %d under way\n", n)
				}
				return err
			}
			if n, err = waitDrained(cmd.Context(), &c, settle, limit); err != nil {
				return err
			}
			if n > 0 {
				return fmt.Errorf("%d are still under way after %v", n, limit)
			}
			fmt.Fprintln(cmd.OutOrStdout(), "drained")
			return nil
		},
	}
	cmd.Flags().StringVar(&host, "host", "localhost", "the sidecar's host")
	cmd.Flags().IntVarP(&port, "port", "p", 8080, "the sidecar's HTTP port")
	cmd.Flags().BoolVar(&wait, "wait", false, "end when nothing is under way")
	cmd.Flags().DurationVar(&settle, "settle", 5*time.Second, "least time to wait")
	cmd.Flags().DurationVar(&limit, "timeout", 30*time.Second, "longest time to wait")
	keyFlag(cmd.Flags(), &key, "api-key", "API key with the scope admin")
	return cmd
}

// checkPort refuses a --port that nobody can be asked on.
func checkPort(port int) error {
	if port < 1 || port > 65535 {
		return usageError{fmt.Errorf("--port %d: is not between 1 and 65535", port)}
	}
	return nil
}

// askDrain returns how much is under way.
func askDrain(c *apiClient) (int, error) {
	body, err := c.do(http.MethodPost, "/drain", nil)
	if err != nil {
		return 0, err
	}
	var answer struct {
		InFlight int `json:"in_flight"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return 0, fmt.Errorf("cannot decode the answer of /drain: %w", err)
	}
	return answer.InFlight, nil
}

func waitDrained(ctx context.Context, c *apiClient, settle, limit time.Duration) (n int, err error) {
	began := time.Now()
	ticker := time.NewTicker(drainPoll)
	defer ticker.Stop()
	for {
		if n, err = askDrain(c); err != nil {
			return n, err
		}
		if took := time.Since(began); took >= limit || n == 0 && took >= settle {
			return n, nil
		}
		select {
		case <-ctx.Done():
			return n, ctx.Err()
		case <-ticker.C:
		}
	}
}
