//go:build invariant_off_replace

package cache

func (guards) replace() bool { return false }
