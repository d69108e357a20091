//go:build !race

package lm

const raceOn = false
