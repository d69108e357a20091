//go:build !race

package main

import "time"

const (
	race = false
	// twoPrefills is what two pods may take to prefill one after the other.
	twoPrefills = 4 * time.Second
)
