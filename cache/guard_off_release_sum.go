//go:build invariant_off_release_sum

package cache

func (guards) releaseSum() bool { return false }
