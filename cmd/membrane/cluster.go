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
		Short:   "Show the members that a sidecar knows",
		Example: "  membrane cluster-status --port 8080",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := apiClient{base: "http://" + net.JoinHostPort(host, strconv.Itoa(port)), key: key}
			c.http.Timeout = clientTimeout
			body, err := c.do(http.MethodGet, "/peers", nil)
			if err != nil {
				return err
			}
			var answer struct {
				Peers []struct {
					NodeID  string `json:"node_id"`
					Host    string `json:"host"`
					Port    int    `json:"port"`
					Healthy bool   `json:"healthy"`
					Status  string `json:"status"`
					Role    string `json:"role"`
				} `json:"peers"`
			}
			if err := json.Unmarshal(body, &answer); err != nil {
				return fmt.Errorf("cannot decode the answer of /peers: %w", err)
			}
			out := cmd.OutOrStdout()
			if len(answer.Peers) == 0 {
				fmt.Fprintln(out, "no peers")
				return nil
			}
			t := tabwriter.NewWriter(out, 2, 0, 3, ' ', 0)
			fmt.Fprintln(t, "node\thost\tport\thealthy\tstatus\trole")
			for _, p := range answer.Peers {
				fmt.Fprintf(t, "%s\t%s\t%d\t%t\t%s\t%s\n", p.NodeID, p.Host, p.Port, p.Healthy, p.Status, p.Role)
			}
			return t.Flush()
		},
	}
	cmd.Flags().StringVar(&host, "host", "localhost", "the sidecar's host")
	cmd.Flags().IntVarP(&port, "port", "p", 8080, "the sidecar's HTTP port")
	keyFlag(cmd.Flags(), &key, "api-key", "API key")
	return cmd
}
