// Command membrane is the KV-cache sidecar, its embedded engine, its client,
// its demo and its benchmarks in one binary.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"membrane/sidecar"
)

// version is set by the build.
var version = "dev"

// Exit statuses: a command that failed, and a command line or setting that is
// not allowed.
const (
	exitFailed = 1
	exitUsage  = 2
)

// usageError is an error of the caller's: the exit status is 2.
type usageError struct{ error }

// Unwrap returns the error itself.
func (e usageError) Unwrap() error { return e.error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	root := newRootCommand()
	err := root.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "membrane:", err)
		os.Exit(statusOf(err))
	}
}

func statusOf(err error) int {
	var usage usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailed
}

// newRootCommand returns the command line. Each command has a file of its own.
func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "membrane",
		Short: "A KV-cache sidecar for LLM inference",
		Long: `membrane keeps the KV pages of the inference engine beside it, finds those that
other pods hold, and hands them to the engine before it would compute them again.

  membrane demo     shows it at work on this machine
  membrane serve    runs a sidecar`,
		Version:       version,
		Args:          refuseArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("membrane {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if bad := (*pflag.InvalidValueError)(nil); errors.As(err, &bad) {
			err = &sidecar.SettingError{Flag: bad.GetFlag().Name, Value: bad.GetValue(), Reason: sidecar.WhyNot(bad.Unwrap())}
		}
		return usageError{fmt.Errorf("%w (see %s --help)", err, cmd.CommandPath())}
	})
	root.AddCommand(
		newServeCommand(),
		newEngineCommand(),
		newClientCommand(),
		newDisaggCommand(),
		newClusterStatusCommand(),
		newDrainCommand(),
		newKeysCommand(),
		newDoctorCommand(),
		newDemoCommand(),
		newBenchCommand(),
		newVersionCommand(),
	)
	return root
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: refuseArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "membrane", version) },
	}
}

// refuseArgs refuses whatever is not a flag or a command.
func refuseArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("%q is not a command of %s (see %s --help)", args[0], cmd.CommandPath(), cmd.CommandPath())}
	}
	return nil
}

// needsCommand is the RunE of a command that only has commands below it.
func needsCommand(cmd *cobra.Command, _ []string) error {
	return usageError{fmt.Errorf("%s needs a command (see %s --help)", cmd.CommandPath(), cmd.CommandPath())}
}

// keyFlag adds a flag for a key, with MEMBRANE_API_KEY behind it. A key must not
// be in the help text, where flags show their default.
func keyFlag(flags *pflag.FlagSet, p *string, name, usage string) {
	flags.StringVar(p, name, os.Getenv("MEMBRANE_API_KEY"), usage+" (MEMBRANE_API_KEY)")
	flags.Lookup(name).DefValue = ""
}

// envOr returns the value of an environment variable, or def.
func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}
