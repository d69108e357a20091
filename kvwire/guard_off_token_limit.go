//go:build invariant_off_token_limit

package kvwire

func (guards) tokenLimit() bool { return false }
