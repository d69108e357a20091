// Command peersplot draws the plots of membrane bench peers from its JSON
// report. It is a program of its own because the drawing library and its fonts
// would make every sidecar eight megabytes larger.
//
// Usage: go run ./cmd/peersplot REPORT.json FOLDER
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"membrane/bench/peers"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: peersplot REPORT.json FOLDER")
		os.Exit(2)
	}
	if err := draw(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "peersplot:", err)
		os.Exit(1)
	}
}

// draw reads a report and writes a plot for each of its groups.
func draw(path, dir string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("cannot read the report: %w", err)
	}
	var r peers.Report
	if err := json.Unmarshal(b, &r); err != nil {
		return fmt.Errorf("cannot read the report at %q: %w", path, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("cannot make the folder %q: %w", dir, err)
	}
	for _, g := range peers.Groups() {
		if err := plotGroup(g, g.Table(r), dir); err != nil {
			return err
		}
	}
	return nil
}
