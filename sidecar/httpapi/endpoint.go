package httpapi

import (
	"fmt"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/valyala/fasthttp"
)

// endpoint has the metrics of one route. Its counters are kept here by how a
// request ended: to look one up by its name is to write that name each time.
type endpoint struct {
	name    string
	set     *metrics.Set
	seconds *metrics.PrometheusHistogram

	mu    sync.RWMutex
	ended map[ending]*metrics.Counter
}

type ending struct {
	method string
	status int
}

// endpoint returns the metrics of a route. Several routes may share a name.
func (s *Server) endpoint(name string) *endpoint {
	return &endpoint{
		name: name, set: s.cfg.Metrics, ended: make(map[ending]*metrics.Counter),
		seconds: s.cfg.Metrics.GetOrCreatePrometheusHistogram(fmt.Sprintf(`membrane_request_duration_seconds{endpoint=%q}`, name)),
	}
}

// count counts a request that was answered.
func (e *endpoint) count(c *fasthttp.RequestCtx, began time.Time) {
	e.counter(ending{methodName(c.Method()), c.Response.StatusCode()}).Inc()
	e.seconds.UpdateDuration(began)
}

func (e *endpoint) counter(o ending) *metrics.Counter {
	e.mu.RLock()
	n := e.ended[o]
	e.mu.RUnlock()
	if n == nil {
		n = e.set.GetOrCreateCounter(fmt.Sprintf(`membrane_requests_total{endpoint=%q,method=%q,status="%d"}`, e.name, o.method, o.status))
		e.mu.Lock()
		e.ended[o] = n
		e.mu.Unlock()
	}
	return n
}

// methodName returns a method's name, and "other" for one that HTTP does not
// have: the caller's text would make metrics without end.
func methodName(method []byte) string {
	for _, known := range []string{"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"} {
		if string(method) == known {
			return known
		}
	}
	return "other"
}
