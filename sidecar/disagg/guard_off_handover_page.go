//go:build invariant_off_handover_page

package disagg

func (guards) page() bool { return false }
