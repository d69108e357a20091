package kvwire

// on says of each guard of an invariant that it is on. A build with the tag
// invariant_off_NAME gives guards a method that hides one of these, so that
// `make test-invariants` can show that the invariant's test then fails. In
// every other build the answers are constants and cost nothing.
type on struct{}

type guards struct{ on }

var guard guards

func (on) callDeadline() bool { return true }
func (on) frameLimit() bool   { return true }
func (on) readSum() bool      { return true }
func (on) tokenLimit() bool   { return true }
func (on) weights() bool      { return true }

// tooMany guards invariant 6: the tokens of a chain have a limit.
func tooMany(tokens, limit int) bool { return guard.tokenLimit() && tokens > limit }
