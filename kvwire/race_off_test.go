//go:build !race

package kvwire

const raceOn = false
