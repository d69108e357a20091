//go:build invariant_off_inbox_cap

package engineport

func (guards) inboxCap() bool { return false }
