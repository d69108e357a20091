//go:build invariant_off_arena_resize

package cache

func (guards) arenaResize() bool { return false }
