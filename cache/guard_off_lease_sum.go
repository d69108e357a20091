//go:build invariant_off_lease_sum

package cache

func (guards) leaseSum() bool { return false }
