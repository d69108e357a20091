//go:build invariant_off_handover

package disagg

func (guards) handover() bool { return false }
