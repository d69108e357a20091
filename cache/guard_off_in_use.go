//go:build invariant_off_in_use

package cache

func (guards) inUse() bool { return false }
