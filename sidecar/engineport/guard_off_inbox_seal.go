//go:build invariant_off_inbox_seal

package engineport

func (guards) inboxSeal() bool { return false }
