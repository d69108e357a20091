//go:build invariant_off_pair_hidden

package resp

func (guards) pairHidden() bool { return false }
