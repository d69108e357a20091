//go:build invariant_off_publish_sum

package cache

func (guards) publishSum() bool { return false }
