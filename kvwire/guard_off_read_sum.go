//go:build invariant_off_read_sum

package kvwire

func (guards) readSum() bool { return false }
