package proxy

// reason says why a request was prefilled by another pod or was not. The list is
// closed; each has a counter and stands in the log.
type reason uint8

const (
	disaggregated  reason = iota // another pod prefilled
	reasonOff                    // the threshold is 0
	reasonLeg                    // the request is a part of one that somebody split already
	reasonPrefills               // this node prefills only, so it does that itself
	reasonUnfit                  // several prompts, media, or probabilities of the prompt
	reasonShort                  // the whole prompt is below the threshold
	reasonCached                 // what nobody holds is below the threshold
	reasonNobody                 // no other pod that prefills is alive
	reasonBroken                 // there are some, but they failed or are full
	reasonFailed                 // they were asked in vain
	reasonDraining               // this node ends
	reasons
)

var reasonNames = [reasons]string{
	"disaggregated", "off", "leg", "prefill_node", "unsuitable", "short", "cached", "no_prefill_pod", "prefill_pods_out", "prefill_failed", "draining",
}

// String returns the name in metrics and logs.
func (r reason) String() string {
	if r < reasons {
		return reasonNames[r]
	}
	return "unknown"
}

// outcome says how an attempt to prefill elsewhere went. The list is closed.
type outcome uint8

const (
	prefillOK          outcome = iota
	prefillRefused             // the engine there does not take the request (4xx)
	prefillBusy                // saturated, draining, or its pins are at their cap (429, 503)
	prefillError               // 5xx, or an answer that is not one
	prefillUnreachable         // no connection, or it broke
	prefillTimeout
	prefillLost // the mesh says that the node is gone
	prefillGone // the client went away meanwhile
	outcomes
)

var outcomeNames = [outcomes]string{"ok", "refused", "busy", "error", "unreachable", "timeout", "lost", "client_gone"}

// String returns the name in metrics and logs.
func (o outcome) String() string {
	if o < outcomes {
		return outcomeNames[o]
	}
	return "unknown"
}

// again reports whether another pod may do better.
func (o outcome) again() bool {
	return o != prefillOK && o != prefillRefused && o != prefillGone
}
