//go:build invariant_off_quarantine_cap

package cache

func (guards) quarantineCap() bool { return false }
