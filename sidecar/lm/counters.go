package lm

import (
	"fmt"

	"github.com/VictoriaMetrics/metrics"

	"membrane/kvwire"
)

// counters are everything that the listener counts. All are made at the start,
// so that a reader sees zero and not nothing.
type counters struct {
	requests [health + 1]*metrics.Counter
	bad      *metrics.Counter // requests that ended their connection

	hits, stored, existing, conflicts *metrics.Counter
	missed, refused                   map[kvwire.Reason]*metrics.Counter
	received, sent                    *metrics.Counter // bytes of values
	slow                              *metrics.Counter // connections closed for not reading or not going on
	turnedAway, panics                *metrics.Counter
}

func newCounters(set *metrics.Set) *counters {
	counter := func(format string, args ...any) *metrics.Counter {
		return set.NewCounter(fmt.Sprintf("membrane_lm_"+format, args...))
	}
	n := &counters{
		bad: counter(`bad_requests_total`), hits: counter(`hits_total`),
		stored: counter(`stored_total`), existing: counter(`existing_total`), conflicts: counter(`conflicts_total`),
		missed: make(map[kvwire.Reason]*metrics.Counter), refused: make(map[kvwire.Reason]*metrics.Counter),
		received: counter(`received_bytes_total`), sent: counter(`sent_bytes_total`),
		slow: counter(`slow_connections_total`), turnedAway: counter(`connections_refused_total`), panics: counter(`panics_total`),
	}
	for c := put; c <= health; c++ {
		n.requests[c] = counter(`requests_total{command=%q}`, c)
	}
	for _, r := range kvwire.Reasons() {
		if r <= kvwire.ReasonDraining {
			n.missed[r] = counter(`missed_total{reason=%q}`, r)
		}
		if r == kvwire.ReasonDraining || r >= kvwire.ReasonOverBudget && r < kvwire.ReasonRejected {
			n.refused[r] = counter(`refused_stores_total{reason=%q}`, r)
		}
	}
	return n
}

// miss counts a value that was asked for and not served.
func (n *counters) miss(why kvwire.Reason) {
	if c := n.missed[why]; c != nil {
		c.Inc()
	}
}

// refuse counts a value that was not stored.
func (n *counters) refuse(why kvwire.Reason) {
	if c := n.refused[why]; c != nil {
		c.Inc()
	}
}
