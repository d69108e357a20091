//go:build invariant_off_miss_reason

package engineport

func (guards) missReason() bool { return false }
