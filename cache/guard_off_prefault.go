//go:build invariant_off_prefault

package cache

func (guards) prefault() bool { return false }
