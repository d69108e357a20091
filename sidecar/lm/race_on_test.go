//go:build race

package lm

const raceOn = true
