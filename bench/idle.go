package bench

import (
	"context"
	"fmt"
	"time"
)

// measureIdle takes the memory and the processor time of a sidecar that nobody
// asks anything. Its arena is touched before, so that what lies beside it is
// known exactly.
func (c *core) measureIdle(ctx context.Context) error {
	const arena = 64 * mib
	settle, watch := 3*time.Second, 10*time.Second
	if c.opts.Quick {
		settle, watch = time.Second, 2*time.Second
	}
	c.opts.Progress(fmt.Sprintf("watching an idle sidecar for %s", watch))
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s, err := startSidecar(ctx, c.opts.Binary, c.dir, "idle", fmt.Sprintf("--memory=%dMiB", arena/mib))
	if err != nil {
		return err
	}
	defer s.kill()
	if err := pause(ctx, settle); err != nil {
		return err
	}
	before, err := s.cpu()
	if err != nil {
		return err
	}
	if err := pause(ctx, watch); err != nil {
		return err
	}
	after, err := s.cpu()
	if err != nil {
		return err
	}
	held, err := s.memory()
	if err != nil {
		return err
	}
	beside := float64(held-arena) / mib
	percent := 100 * (after - before).Seconds() / watch.Seconds()
	if c.idle[0], err = (samples{beside}).row("idle sidecar, memory beside the arena", "MiB").judge(beside, "<= 60"); err != nil {
		return err
	}
	c.idle[1], err = (samples{percent}).row("idle sidecar, processor", "% of a core").judge(percent, "<= 1")
	return err
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
