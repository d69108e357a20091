package engineport

import "golang.org/x/sys/unix"

// on says of each guard of an invariant that it is on. A build with the tag
// invariant_off_NAME gives guards a method that hides one of these, so that
// `make test-invariants` can show that the invariant's test then fails. In
// every other build the answers are constants and cost nothing.
type on struct{}

type guards struct{ on }

var guard guards

func (on) headWindow() bool    { return true }
func (on) inboxCap() bool      { return true }
func (on) inboxSeal() bool     { return true }
func (on) matchDeadline() bool { return true }
func (on) missReason() bool    { return true }
func (on) objectSize() bool    { return true }
func (on) rankTaken() bool     { return true }
func (on) reservedSlot() bool  { return true }

// inboxSeals guards invariant 6: an engine cannot resize its inbox.
func inboxSeals() int {
	if !guard.inboxSeal() {
		return unix.F_SEAL_SEAL
	}
	return unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
}
