//go:build invariant_off_get_sum

package lm

func (guards) getSum() bool { return false }
