//go:build invariant_off_window

package cache

func (guards) window() bool { return false }
