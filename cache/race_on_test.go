//go:build race

package cache

const raceOn = true
