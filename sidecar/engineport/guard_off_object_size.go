//go:build invariant_off_object_size

package engineport

func (guards) objectSize() bool { return false }
