//go:build invariant_off_call_deadline

package kvwire

func (guards) callDeadline() bool { return false }
