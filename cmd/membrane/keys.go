package main

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"membrane/sidecar/auth"
)

// newKeysCommand returns `membrane keys`.
func newKeysCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Make API keys and cluster keys",
		Args:  refuseArgs,
		RunE:  needsCommand,
	}
	cmd.AddCommand(newKeysGenerateCommand(), newKeysClusterCommand())
	return cmd
}

func newKeysGenerateCommand() *cobra.Command {
	var subject string
	var scopes []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Make an API key and its keyfile entry",
		Long: `Make an API key. The first line is the key, for the client; the second is the
entry for the file of serve's --api-key-file, which holds only a digest. The
subject is the tenant of whoever uses the key. Scopes: read, write (has read),
admin (has both), and engine (may use the engine listener).`,
		Example: `  membrane keys generate --subject ops --scope admin > ops.txt
  sed -n 2p ops.txt > api-keys && chmod 600 api-keys
  membrane serve --host 0.0.0.0 --api-key-file api-keys`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := auth.ParseScopes(strings.Join(scopes, ","))
			if err != nil {
				return usageError{fmt.Errorf("--scope: %w", err)}
			}
			key, line, err := auth.Generate(subject, set)
			if err != nil {
				return usageError{fmt.Errorf("--subject: %w", err)}
			}
			out := cmd.OutOrStdout()
			if asJSON {
				return json.NewEncoder(out).Encode(map[string]string{"key": key, "keyfile_line": line})
			}
			_, err = fmt.Fprintf(out, "%s\n%s\n", key, line)
			return err
		},
	}
	cmd.Flags().StringVarP(&subject, "subject", "s", "", "whose key it is: the tenant (required)")
	cmd.Flags().StringArrayVar(&scopes, "scope", []string{"read"}, "read, write, admin or engine; may be repeated")
	offer(cmd, "scope", "read", "write", "admin", "engine")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func newKeysClusterCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cluster",
		Short: "Make a cluster key",
		Long: `Make a cluster key: 32 random bytes in base64. Every sidecar of a cluster gets the
same file with --cluster-key-file.`,
		Example: "  membrane keys cluster > cluster-key && chmod 600 cluster-key",
		Args:    refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			key := make([]byte, 32)
			_, _ = rand.Read(key) // never fails: crypto/rand ends the process instead
			_, err := fmt.Fprintln(cmd.OutOrStdout(), base64.StdEncoding.EncodeToString(key))
			return err
		},
	}
}
