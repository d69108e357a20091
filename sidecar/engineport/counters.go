package engineport

import (
	"fmt"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"membrane/cache"
	"membrane/kvwire"
)

// requestBuckets are the upper bounds of the duration histograms, in seconds:
// a local answer takes microseconds, a fill up to its deadline.
var requestBuckets = []float64{
	10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1, 2.5, 10,
}

// sources say where leased pages were before the request.
const (
	local = iota
	peer
	sources
)

var sourceNames = [sources]string{"local", "peer"}

// served counts what leases handed to engines from one source.
type served struct{ pages, tokens, bytes *metrics.Counter }

// op counts the requests of one type.
type op struct {
	requests, failed *metrics.Counter
	seconds          *metrics.PrometheusHistogram
}

// counters are everything that the engine port counts. All are made at the
// start, so that a reader sees zero and not nothing.
type counters struct {
	ops       map[kvwire.Type]*op
	errors    map[kvwire.Code]*metrics.Counter
	refusedID *metrics.Counter // connections of users who may not connect
	panics    *metrics.Counter

	leased                   [sources]served
	storedPages, storedBytes *metrics.Counter
	existing                 *metrics.Counter
	missedPages              map[kvwire.Reason]*metrics.Counter
	missedTokens             map[kvwire.Reason]*metrics.Counter
	refused                  map[kvwire.Reason]*metrics.Counter
	expired, corrupt         *metrics.Counter // releases that said so

	translatedPages, translatedBytes *metrics.Counter
	translateSeconds                 *metrics.FloatCounter
	droppedForms                     *metrics.Counter // source copies that nobody here reads
	untranslated                     *metrics.Counter // requests that ended at a page in another form
}

var opTypes = []kvwire.Type{
	kvwire.TypeHello, kvwire.TypeRegister, kvwire.TypePing, kvwire.TypeMatch, kvwire.TypeExtend, kvwire.TypeLease,
	kvwire.TypeRelease, kvwire.TypeReserve, kvwire.TypeCommit, kvwire.TypeDrop, kvwire.TypeReset, kvwire.TypeStats,
	kvwire.TypeRead, kvwire.TypeWrite, kvwire.TypeMatchHashes,
}

func newCounters(set *metrics.Set) *counters {
	n := &counters{
		ops: make(map[kvwire.Type]*op), errors: make(map[kvwire.Code]*metrics.Counter),
		missedPages:  make(map[kvwire.Reason]*metrics.Counter),
		missedTokens: make(map[kvwire.Reason]*metrics.Counter),
		refused:      make(map[kvwire.Reason]*metrics.Counter),
	}
	counter := func(format string, args ...any) *metrics.Counter {
		return set.NewCounter(fmt.Sprintf("membrane_engine_"+format, args...))
	}
	for _, t := range opTypes {
		n.ops[t] = &op{
			requests: counter(`requests_total{op=%q}`, t),
			failed:   counter(`requests_failed_total{op=%q}`, t),
			seconds:  set.NewPrometheusHistogramExt(fmt.Sprintf(`membrane_engine_request_duration_seconds{op=%q}`, t), requestBuckets),
		}
	}
	for c := kvwire.CodeInternal; c <= kvwire.CodeBusy; c++ {
		n.errors[c] = counter(`errors_total{code=%q}`, c)
	}
	n.refusedID, n.panics = counter(`connections_refused_total`), counter(`panics_total`)
	for i, name := range sourceNames {
		n.leased[i] = served{
			pages:  counter(`leased_pages_total{source=%q}`, name),
			tokens: counter(`leased_tokens_total{source=%q}`, name),
			bytes:  counter(`leased_bytes_total{source=%q}`, name),
		}
	}
	n.storedPages, n.storedBytes = counter(`stored_pages_total`), counter(`stored_bytes_total`)
	n.existing = counter(`existing_pages_total`)
	for _, r := range kvwire.Reasons() {
		switch {
		case r <= kvwire.ReasonDraining:
			n.missedPages[r] = counter(`missed_pages_total{reason=%q}`, r)
			n.missedTokens[r] = counter(`missed_tokens_total{reason=%q}`, r)
		case r < kvwire.ReasonRejected:
		default:
			continue
		}
		n.refused[r] = counter(`refused_stores_total{reason=%q}`, r)
	}
	n.expired, n.corrupt = counter(`releases_total{outcome="expired"}`), counter(`releases_total{outcome="corrupt"}`)
	n.translatedPages, n.translatedBytes = set.NewCounter("membrane_translate_pages_total"), set.NewCounter("membrane_translate_bytes_total")
	n.translateSeconds = set.NewFloatCounter("membrane_translate_seconds_total")
	n.droppedForms, n.untranslated = set.NewCounter("membrane_translate_dropped_sources_total"), set.NewCounter("membrane_translate_refused_total")
	return n
}

// converted counts a page that was translated.
func (n *counters) converted(out cache.Converted) {
	if out.Recipe == nil {
		return
	}
	n.translatedPages.Inc()
	n.translatedBytes.AddInt64(out.Bytes)
	if out.Dropped {
		n.droppedForms.Inc()
	}
}

// request counts one request and its outcome.
func (n *counters) request(t kvwire.Type, began time.Time, err error) {
	if err != nil {
		n.refuse(err)
	}
	o := n.ops[t]
	if o == nil {
		return
	}
	o.requests.Inc()
	if err != nil {
		o.failed.Inc()
	}
	o.seconds.UpdateDuration(began)
}

// refuse counts an error that was sent by its code.
func (n *counters) refuse(err error) {
	code := kvwire.CodeOf(err)
	if c := n.errors[code]; c != nil {
		c.Inc()
		return
	}
	n.errors[kvwire.CodeInternal].Inc()
}

// miss counts pages that a request asked for and did not get.
func (n *counters) miss(why kvwire.Reason, pages, pageTokens int) {
	if c := n.missedPages[why]; c != nil && pages > 0 {
		c.Add(pages)
		n.missedTokens[why].Add(pages * pageTokens)
	}
}

// hit counts leased pages.
func (n *counters) hit(source, pages, pageTokens int, bytes int64) {
	s := n.leased[source]
	s.pages.Add(pages)
	s.tokens.Add(pages * pageTokens)
	s.bytes.AddInt64(bytes)
}

// Served is what engines got from one source since the start.
type Served struct {
	Pages  uint64 `json:"pages"`
	Tokens uint64 `json:"tokens"`
	Bytes  uint64 `json:"bytes"`
}

// Translated is what was made of pages in other forms since the start.
type Translated struct {
	Pages   uint64  `json:"pages"`
	Bytes   uint64  `json:"bytes"`
	Seconds float64 `json:"seconds"`
	// Dropped is how many of them took the place of their source, Refused how
	// many requests ended at a page that could not be translated.
	Dropped uint64 `json:"dropped_sources"`
	Refused uint64 `json:"refused"`
}

// Counts is a snapshot of the port's counters since the start.
type Counts struct {
	LeasedLocal   Served            `json:"leased_local"`
	LeasedPeer    Served            `json:"leased_peer"`
	Translated    Translated        `json:"translated"`
	StoredPages   uint64            `json:"stored_pages"`
	StoredBytes   uint64            `json:"stored_bytes"`
	ExistingPages uint64            `json:"existing_pages"`
	MissedPages   map[string]uint64 `json:"missed_pages"`
	MissedTokens  map[string]uint64 `json:"missed_tokens"`
	RefusedStores map[string]uint64 `json:"refused_stores"`
	Errors        map[string]uint64 `json:"errors"`
	Requests      map[string]uint64 `json:"requests"`
}

func (n *counters) snapshot() Counts {
	serve := func(s served) Served {
		return Served{Pages: s.pages.Get(), Tokens: s.tokens.Get(), Bytes: s.bytes.Get()}
	}
	c := Counts{
		LeasedLocal: serve(n.leased[local]), LeasedPeer: serve(n.leased[peer]),
		Translated: Translated{
			Pages: n.translatedPages.Get(), Bytes: n.translatedBytes.Get(), Seconds: n.translateSeconds.Get(),
			Dropped: n.droppedForms.Get(), Refused: n.untranslated.Get(),
		},
		StoredPages: n.storedPages.Get(), StoredBytes: n.storedBytes.Get(), ExistingPages: n.existing.Get(),
		MissedPages: nonZero(n.missedPages), MissedTokens: nonZero(n.missedTokens),
		RefusedStores: nonZero(n.refused), Errors: nonZero(n.errors), Requests: make(map[string]uint64),
	}
	for t, o := range n.ops {
		if v := o.requests.Get(); v > 0 {
			c.Requests[t.String()] = v
		}
	}
	return c
}

func nonZero[K interface {
	comparable
	fmt.Stringer
}](m map[K]*metrics.Counter) map[string]uint64 {
	out := make(map[string]uint64)
	for k, c := range m {
		if v := c.Get(); v > 0 {
			out[k.String()] = v
		}
	}
	return out
}
