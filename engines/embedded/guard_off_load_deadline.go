//go:build invariant_off_load_deadline

package embedded

func (guards) loadDeadline() bool { return false }
