package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// newClusterStatusCommand returns `membrane cluster-status`.
func newClusterStatusCommand() *cobra.Command {
	var host, key string
	var port int
	cmd := &cobra.Command{
		Use:     "cluster-status",
		Short:   "Show the members that a sidecar knows, and which phases they serve",
		Example: "  membrane cluster-status --port 8080",
		Long: `Show the members that a sidecar knows, and which phases they serve.

waiting is prefill+decode: the prompts that wait for prefill and the requests that
wait for decode. Of other nodes a sidecar knows it where --prefill-ratio is auto.`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkPort(port); err != nil {
				return err
			}
			c := apiClient{base: "http://" + net.JoinHostPort(host, strconv.Itoa(port)), key: key}
			c.http.Timeout = clientTimeout
			body, err := c.do(http.MethodGet, "/peers", nil)
			if err != nil {
				return err
			}
			type member struct {
				NodeID  string `json:"node_id"`
				Host    string `json:"host"`
				Port    int    `json:"port"`
				Healthy bool   `json:"healthy"`
				Status  string `json:"status"`
				Role    string `json:"role"`
				Since   string `json:"role_since"`
				Why     string `json:"role_why"`
				Next    string `json:"role_next"`
				Queues  *struct {
					Prefill int `json:"prefill"`
					Decode  int `json:"decode"`
				} `json:"queues"`
			}
			var answer struct {
				Peers []member `json:"peers"`
				Self  member   `json:"self"`
			}
			if err := json.Unmarshal(body, &answer); err != nil {
				return fmt.Errorf("cannot decode the answer of /peers: %w", err)
			}
			out := cmd.OutOrStdout()
			t := tabwriter.NewWriter(out, 2, 0, 3, ' ', 0)
			fmt.Fprintln(t, "node\thost\tport\thealthy\tstatus\trole\trole since\twaiting\twhy")
			row := func(p member, healthy string) {
				role := p.Role
				if p.Next != "" {
					role += " to " + p.Next
				}
				waiting := "-"
				if q := p.Queues; q != nil {
					waiting = fmt.Sprintf("%d+%d", q.Prefill, q.Decode)
				}
				fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n", p.NodeID, p.Host, p.Port, healthy, p.Status, role, p.Since, waiting, p.Why)
			}
			row(answer.Self, "self")
			for _, p := range answer.Peers {
				row(p, strconv.FormatBool(p.Healthy))
			}
			if err := t.Flush(); err != nil {
				return err
			}
			if len(answer.Peers) == 0 {
				fmt.Fprintln(out, "no peers")
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&host, "host", "localhost", "the sidecar's host")
	cmd.Flags().IntVarP(&port, "port", "p", 8080, "the sidecar's HTTP port")
	keyFlag(cmd.Flags(), &key, "api-key", "API key")
	return cmd
}
