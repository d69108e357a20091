//go:build race

package main

import "time"

const (
	race = true
	// twoPrefills is longer here: the embedded engine is slow under the race
	// detector.
	twoPrefills = 24 * time.Second
)
