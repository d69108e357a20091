// Command benchplot draws the plots of the benchmarks' JSON reports. It is a
// program of its own because the drawing library and its fonts would make every
// sidecar eight megabytes larger.
//
// Usage: go run ./cmd/benchplot peers|replay|pd REPORT.json FOLDER
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"membrane/bench"
	"membrane/bench/peers"
	"membrane/bench/replay"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: benchplot peers|replay|pd REPORT.json FOLDER")
		os.Exit(2)
	}
	if err := draw(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "benchplot:", err)
		os.Exit(1)
	}
}

// draw reads a report of the given benchmark and writes its plots.
func draw(benchmark, path, dir string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("cannot read the report: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("cannot make the folder %q: %w", dir, err)
	}
	switch benchmark {
	case "peers":
		return drawPeers(b, dir)
	case "replay":
		return drawReplay(b, dir)
	case "pd":
		return drawPD(b, dir)
	}
	return fmt.Errorf("cannot draw %q: the benchmarks are peers, replay and pd", benchmark)
}

func drawPeers(b []byte, dir string) error {
	var r peers.Report
	if err := json.Unmarshal(b, &r); err != nil {
		return fmt.Errorf("cannot read the report of peers: %w", err)
	}
	for _, g := range peers.Groups() {
		if err := plotGroup(g, g.Table(r), dir); err != nil {
			return err
		}
	}
	return nil
}

func drawReplay(b []byte, dir string) error {
	var r replay.Report
	if err := json.Unmarshal(b, &r); err != nil {
		return fmt.Errorf("cannot read the report of a replay: %w", err)
	}
	return plotReplay(r, dir)
}

func drawPD(b []byte, dir string) error {
	var r bench.PDReport
	if err := json.Unmarshal(b, &r); err != nil {
		return fmt.Errorf("cannot read the report of pd: %w", err)
	}
	return plotPD(r, dir)
}
