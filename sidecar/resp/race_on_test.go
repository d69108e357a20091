//go:build race

package resp

const raceOn = true
