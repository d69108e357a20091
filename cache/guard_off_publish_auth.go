//go:build invariant_off_publish_auth

package cache

func (guards) publishAuth() bool { return false }
