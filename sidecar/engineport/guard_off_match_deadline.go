//go:build invariant_off_match_deadline

package engineport

func (guards) matchDeadline() bool { return false }
