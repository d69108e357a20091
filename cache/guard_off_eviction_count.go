//go:build invariant_off_eviction_count

package cache

func (guards) evictionCount() bool { return false }
