//go:build invariant_off_arena_write

package cache

func (guards) arenaWrite() bool { return false }
