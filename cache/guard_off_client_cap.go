//go:build invariant_off_client_cap

package cache

func (guards) clientCap() bool { return false }
