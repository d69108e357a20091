package bench

import (
	"context"
	"fmt"

	"membrane/kvwire"
)

// fullName is the row's name also where fewer operations are done.
const fullName = "memory after a million operations on a full cache"

// measureMemory does many stores, matches, leases and releases on a full cache
// and then compares what the sidecar holds with what it may: arena, inbox, 96
// MiB and 512 bytes a page.
func (c *core) measureMemory(ctx context.Context) error {
	budget, ops := 1024*mib, 1_000_000
	if c.opts.Quick {
		budget, ops = 64*mib, 20_000
	}
	const (
		pageBytes  = 64 << 10
		pageTokens = 16
		prompt     = 32 // pages
		slots      = 32
	)
	c.opts.Progress(fmt.Sprintf("%d operations on a full cache of %d MiB", ops, budget/mib))
	r, err := c.rig(ctx, "memory", pageBytes, pageTokens, slots, fmt.Sprintf("--memory=%dMiB", budget/mib), fmt.Sprintf("--page-tokens=%d", pageTokens))
	if err != nil {
		return err
	}
	defer r.close()
	recent := make([][]byte, 0, 64) // prompts that are likely to be held still
	for done := 0; done < ops; {
		tokens := c.prompt(prompt * pageTokens)
		if err := r.storeSome(ctx, tokens, pageTokens); err != nil {
			return err
		}
		if len(recent) < cap(recent) {
			recent = append(recent, tokens)
		} else {
			recent[int(c.ids)%len(recent)] = tokens
		}
		// Every page of a store, match and lease counts as an operation.
		done += prompt
		for i := range 3 {
			l, err := r.match(ctx, recent[(int(c.ids)*7+i*13)%len(recent)], 0)
			if err != nil {
				return err
			}
			if l.Lease != 0 {
				if _, err := r.client.Release(ctx, kvwire.Release{Lease: l.Lease}); err != nil {
					return err
				}
			}
			if err := r.client.Drop(ctx, l.Handle); err != nil {
				return err
			}
			done += prompt
		}
	}
	// Without this process's mapping all of the arena is the sidecar's.
	if err := r.client.Close(); err != nil {
		return fmt.Errorf("cannot detach: %w", err)
	}
	held, err := r.sidecar.memory()
	if err != nil {
		return err
	}
	pages, err := metric(r.sidecar.http, residentPages, "")
	if err != nil {
		return err
	}
	bound := float64(budget) + float64(r.reg.InboxBytes) + 96*mib + 512*pages
	c.full, err = (samples{float64(held) / mib}).against(Row{
		Name: fullName, Unit: "MiB", Value: float64(held) / mib, Min: float64(held) / mib, Max: float64(held) / mib,
	}, samples{bound / mib}, "arena + inbox + 96 MiB + 512 B a page", "<= 1")
	return err
}
