package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"membrane/kvwire"
)

// own returns how long the engine has been held up by the connector: the time
// inside all its hooks, in both processes, and the time for which requests
// were put off. Both count the hooks that ran while a request was put off.
func (v *vllmCore) own(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	var last, now float64
	since := time.Now()
	err := poll(ctx, "that the connector is quiet", func() (bool, error) {
		now = 0
		for _, side := range []string{"scheduler", "worker"} {
			s, err := readConnectorStats(v.stats, side)
			if err != nil {
				return false, err
			}
			now += s.seconds()
		}
		if now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > v.host.opts.settle, nil
	})
	return time.Duration(now * float64(time.Second)), err
}

// checkLoads looks at the connector's own counters: every load worked.
func (v *vllmCore) checkLoads(ctx context.Context, prompts int) error {
	if err := v.turn(v.ours); err != nil {
		return err
	}
	if _, err := v.own(ctx); err != nil { // they are all in the file
		return err
	}
	s, err := readConnectorStats(v.stats, "worker")
	if err != nil {
		return err
	}
	want := 2 * prompts * vllmHeld / vllmPage
	if s.Counts["loaded_pages"] != want || s.Counts["failed_loads"] > 0 || s.Counts["hook_errors"] > 0 || s.Counts["dropped_stores"] > 0 {
		return fmt.Errorf("the connector loaded %d of %d pages: %v", s.Counts["loaded_pages"], want, s.Counts)
	}
	return nil
}

// connectorStats is the file that one side of membrane's connector writes.
type connectorStats struct {
	Off          string          `json:"off"`
	Registration kvwire.Register `json:"registration"`
	Counts       map[string]int  `json:"counts"`
	Hooks        map[string]struct {
		Sum float64 `json:"sum_s"`
	} `json:"hooks"`
}

func (s connectorStats) seconds() float64 {
	total := float64(s.Counts["none_us"]) / 1e6
	for name, h := range s.Hooks {
		if name != "register_kv_caches" {
			total += h.Sum
		}
	}
	return total
}

func readConnectorStats(path, side string) (connectorStats, error) {
	var s connectorStats
	files, err := filepath.Glob(path + "." + side + ".*.json")
	if err == nil && len(files) != 1 {
		err = fmt.Errorf("there are %d files", len(files))
	}
	if err != nil {
		return s, fmt.Errorf("cannot find the connector's counters at %q: %w", path, err)
	}
	b, err := os.ReadFile(files[0])
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("cannot read the connector's counters: %w", err)
	}
	return s, nil
}
