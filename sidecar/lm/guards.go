package lm

// on says of each guard of an invariant that it is on. A build with the tag
// invariant_off_NAME gives guards a method that hides one of these, so that
// `make test-invariants` can show that the invariant's test then fails. In
// every other build the answers are constants and cost nothing.
type on struct{}

type guards struct{ on }

var guard guards

func (on) getSum() bool { return true }
