//go:build invariant_off_reserved_slot

package engineport

func (guards) reservedSlot() bool { return false }
