package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"membrane/engines/doctor"
	"membrane/sidecar"
)

// newDoctorCommand returns `membrane doctor`.
func newDoctorCommand() *cobra.Command {
	var opts doctor.Options
	cmd := &cobra.Command{
		Use:   "doctor --engine ADDRESS",
		Short: "Store and reload one page as an engine does, and say what is wrong",
		Long: `Look at a sidecar from where an engine sees it, and say in one sentence what is
wrong. It registers as an engine of its own, in a namespace that no other engine
has, and

  1. reaches the sidecar and maps its shared memory,
  2. stores one page and reads it back, through shared memory and inline, with the
     checksum, the lease and the release that every engine uses,
  3. reads it once more as an engine with another layout (translation),
  4. looks at the engines that are registered: layout, ranks, namespace, what was
     hit, missed and refused so far, and why.

Its page is dropped again. Run it in the engine's container, as the engine's user:
then the socket, its directory and its permissions are looked at, too. The exit
status is 0 when all is well, else 1; what is wrong is the last line.

Before the engine has come, steps 1 to 3 are shown and the last line says that no
engine is registered.`,
		Example: `  membrane doctor --engine /run/membrane/engine.sock
  membrane doctor --engine localhost:7600 --key "$KEY"
  kubectl exec POD -c engine -- membrane doctor --engine /run/membrane/engine.sock`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if opts.Addr == "" {
				return usageError{errors.New("--engine is empty: give the path of the engine socket or HOST:PORT")}
			}
			if opts.Timeout <= 0 {
				return usageError{fmt.Errorf("--timeout %v: is not above 0", opts.Timeout)}
			}
			if err := doctor.Run(cmd.Context(), opts, cmd.OutOrStdout()); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "all is well")
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.Addr, "engine", envOr("MEMBRANE_SIDECAR", sidecar.DefaultEngineSocket), "the sidecar as an engine sees it: path of the engine socket or HOST:PORT (MEMBRANE_SIDECAR)")
	keyFlag(flags, &opts.Key, "key", "API key with the scope engine, where the localhost listener wants one")
	flags.StringVar(&opts.Engine, "id", "", "look at the engine of this id only, which must be registered")
	flags.DurationVar(&opts.Timeout, "timeout", 10*time.Second, "longest time for a step")
	return cmd
}
