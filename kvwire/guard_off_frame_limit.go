//go:build invariant_off_frame_limit

package kvwire

func (guards) frameLimit() bool { return false }
