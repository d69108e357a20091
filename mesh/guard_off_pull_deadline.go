//go:build invariant_off_pull_deadline

package mesh

func (guards) pullDeadline() bool { return false }
