//go:build invariant_off_convert_sum

package cache

func (guards) convertSum() bool { return false }
