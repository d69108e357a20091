//go:build invariant_off_get_sum

package resp

func (guards) getSum() bool { return false }
