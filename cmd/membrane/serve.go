package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"membrane/sidecar"
)

// newServeCommand returns `membrane serve`.
func newServeCommand() *cobra.Command {
	settings := sidecar.DefaultSettings()
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run a sidecar",
		Long: `Run a sidecar until SIGTERM or SIGINT: it then refuses new work, waits for what is
under way, says goodbye to its peers and ends with status 0. A second signal ends
it at once.

Without any flag it serves on this machine only. A setting is taken from its flag,
else from its environment variable (in brackets), else from its default. Its log
goes to standard error; the line "serving" names every address.

Roles: with --role prefill or decode a node refuses the other phase of /disagg and
gRPC. With --role auto the nodes share the phases by themselves: each ranks the live
auto nodes and follows an answer that has held for 30 s, at most once a minute, after
the phase that it gives up has drained. membrane cluster-status shows who does what.

With --serve-port it serves OpenAI's API in front of the engine at --engine-url. A
prompt with at least --prefill-threshold tokens that no node holds is prefilled by
another pod, and this pod's engine goes on from that KV; whatever fails there, this
pod's engine answers. See docs/prefill-decode.md.`,
		Example: `  membrane serve
  membrane serve --memory 8GiB --page-tokens 64
  membrane serve --host 0.0.0.0 --api-key-file api-keys

  # one node prefills, another decodes behind its KV (docs/prefill-decode.md)
  membrane serve -n p -p 8080 --role prefill &
  membrane serve -n d -p 8081 --role decode --peer localhost:8080 --grpc-port 8091 &

  # one OpenAI endpoint per pod, before engines on ports 8000 and 8001
  membrane serve -n p -p 8080 --role prefill --serve-port 9000 --engine-url http://127.0.0.1:8000 &
  membrane serve -n d -p 8081 --role decode --peer localhost:8080 --serve-port 9001 --engine-url http://127.0.0.1:8001 &

  # three nodes on one machine
  membrane serve -n n1 -p 8080 --peer localhost:8081 --peer localhost:8082 &
  membrane serve -n n2 -p 8081 --peer localhost:8080 --peer localhost:8082 &
  membrane serve -n n3 -p 8082 --peer localhost:8080 --peer localhost:8081 &`,
		Args: refuseArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settings.ReadEnv(cmd.Flags(), os.LookupEnv); err != nil {
				return usageError{err}
			}
			return serve(cmd.Context(), settings)
		},
	}
	settings.AddFlags(cmd.Flags())
	offer(cmd, "role", "prefill", "decode", "both", "auto")
	offer(cmd, "log-level", "debug", "info", "warn", "error")
	offer(cmd, "log-format", "text", "json")
	return cmd
}

func serve(ctx context.Context, settings sidecar.Settings) error {
	node, err := sidecar.New(settings, version, settings.Logger())
	if err != nil {
		return usageError{err} // whatever keeps a sidecar from starting is status 2
	}
	stopped := make(chan struct{})
	defer close(stopped)
	go func() {
		select {
		case <-stopped:
			return
		case <-ctx.Done(): // the first signal
		}
		second := make(chan os.Signal, 1)
		signal.Notify(second, syscall.SIGINT, syscall.SIGTERM)
		defer signal.Stop(second)
		select {
		case <-second:
			node.StopNow()
		case <-stopped:
		}
	}()
	err = node.Run(ctx)
	select {
	case <-node.Ready():
		return err
	default:
		if err != nil && !errors.Is(err, sidecar.ErrStopped) {
			return usageError{err}
		}
		return err
	}
}
