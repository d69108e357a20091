//go:build invariant_off_pin_cap

package cache

func (guards) pinCap() bool { return false }
