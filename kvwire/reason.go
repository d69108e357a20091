package kvwire

import "fmt"

// Reason says why a page was not served, not stored or left the cache. The
// list is closed: every miss and every eviction has one of these, in the
// answer, in the metrics (label reason) and in the logs.
type Reason uint8

// The reasons. Their numbers travel on the wire and are never reused.
const (
	// ReasonNone means that nothing was missed.
	ReasonNone Reason = 0

	// Misses of a lookup.

	// ReasonAbsent: nobody that this node knows of holds the page.
	ReasonAbsent Reason = 1
	// ReasonLayout: the page is here, but only in a form that cannot be
	// translated, or the engine's own layout contradicts itself.
	ReasonLayout Reason = 2
	// ReasonIncomplete: not every shard of the form is here.
	ReasonIncomplete Reason = 3
	// ReasonNamespace: the same tokens are here under another namespace only, or
	// the peer that was asked does not know the caller's.
	ReasonNamespace Reason = 4
	// ReasonCorrupt: the bytes failed their checksum or authenticator.
	ReasonCorrupt Reason = 5
	// ReasonDeadline: the answer did not come before the deadline.
	ReasonDeadline Reason = 6
	// ReasonPeer: the peer that held the page failed, refused or lied.
	ReasonPeer Reason = 7
	// ReasonPinned: leases and pins are at their cap.
	ReasonPinned Reason = 8
	// ReasonExpired: the lease ended before the copy did.
	ReasonExpired Reason = 9
	// ReasonUnreachable: the sidecar did not answer (counted by the client).
	ReasonUnreachable Reason = 10
	// ReasonDraining: the sidecar is stopping.
	ReasonDraining Reason = 11

	// Refused stores.

	// ReasonOverBudget: no slot is free now.
	ReasonOverBudget Reason = 32
	// ReasonTooLarge: the object is larger than the arena can hold.
	ReasonTooLarge Reason = 33
	// ReasonReset: the namespace was reset between reserve and commit.
	ReasonReset Reason = 34
	// ReasonQuarantined: an earlier copy failed its checksum.
	ReasonQuarantined Reason = 35

	// Evictions.

	// ReasonRejected: the admission policy did not take the page as it left
	// the recency window.
	ReasonRejected Reason = 64
	// ReasonCapacity: the policy chose the page as a victim.
	ReasonCapacity Reason = 65
	// ReasonDropped: the namespace was reset.
	ReasonDropped Reason = 66
	// ReasonDeleted: a client deleted the page, or the time to live that a
	// client gave it ended.
	ReasonDeleted Reason = 67
	// ReasonReplaced: a client stored other bytes under its name.
	ReasonReplaced Reason = 68

	// LastReason is the highest number in use, for tables by reason.
	LastReason = ReasonReplaced
)

var reasonNames = map[Reason]string{
	ReasonNone: "none",

	ReasonAbsent: "absent", ReasonLayout: "layout", ReasonIncomplete: "incomplete",
	ReasonNamespace: "namespace", ReasonCorrupt: "corrupt", ReasonDeadline: "deadline",
	ReasonPeer: "peer", ReasonPinned: "pinned", ReasonExpired: "expired",
	ReasonUnreachable: "unreachable", ReasonDraining: "draining",

	ReasonOverBudget: "over_budget", ReasonTooLarge: "too_large", ReasonReset: "reset",
	ReasonQuarantined: "quarantined",

	ReasonRejected: "rejected", ReasonCapacity: "capacity", ReasonDropped: "dropped",
	ReasonDeleted: "deleted", ReasonReplaced: "replaced",
}

// String returns the reason's stable name.
func (r Reason) String() string {
	if s, ok := reasonNames[r]; ok {
		return s
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Reasons returns every reason but [ReasonNone], in the order of their numbers.
func Reasons() []Reason {
	var all []Reason
	for r := Reason(1); r != 0; r++ {
		if _, ok := reasonNames[r]; ok {
			all = append(all, r)
		}
	}
	return all
}
