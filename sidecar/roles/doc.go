// Package roles says which phases of a request this node serves: prefill,
// decode or both.
//
// It owns the decision of an auto node about itself, how long an answer must
// have held before the node follows it, the draining of the phase that it gives
// up, and the count of requests under way in each phase. It does not own
// membership and tags (package mesh) or what a phase does (package disagg).
//
// Gossip gives no consensus, so nobody hands out roles. Each auto node ranks
// the live auto nodes by a hash of their ids and finds its own place. Nodes
// that see the same members agree; while they do not, some phase has a node too
// many or too few for a while, and each part of a divided mesh keeps both.
//
// All methods of [Keeper] may be called by several goroutines at once.
package roles
