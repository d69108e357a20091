//go:build invariant_off_own_copy

package cache

func (guards) ownCopy() bool { return false }
