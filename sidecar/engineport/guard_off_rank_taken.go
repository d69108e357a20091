//go:build invariant_off_rank_taken

package engineport

func (guards) rankTaken() bool { return false }
