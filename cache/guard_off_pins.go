//go:build invariant_off_pins

package cache

func (guards) pins() bool { return false }
