//go:build invariant_off_weights

package kvwire

func (guards) weights() bool { return false }
