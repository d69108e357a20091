//go:build invariant_off_head_window

package engineport

func (guards) headWindow() bool { return false }
