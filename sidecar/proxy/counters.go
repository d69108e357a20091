package proxy

import (
	"fmt"
	"time"

	"github.com/VictoriaMetrics/metrics"
)

// counters are the metrics of the serving port.
type counters struct {
	decisions  [reasons]*metrics.Counter
	prefills   [outcomes]*metrics.Counter
	prefillFor *metrics.PrometheusHistogram
	fetchFor   *metrics.PrometheusHistogram
	fetched    *metrics.Counter
	followed   *metrics.Counter // of them, those that came while the pod still prefilled
	retries    *metrics.Counter
	noBudget   *metrics.Counter
	gone       *metrics.Counter
	cut        *metrics.Counter
	engineDown *metrics.Counter
	tokenize   map[string]*metrics.Counter
	refused    map[string]*metrics.Counter
	answers    [other + 1][6]*metrics.Counter // by route and class of status
	duration   [other + 1]*metrics.PrometheusHistogram
}

// other counts requests that are passed on unread.
const other = chat + 1

func newCounters(set *metrics.Set) *counters {
	c := &counters{
		prefillFor: set.NewPrometheusHistogram("membrane_proxy_prefill_duration_seconds"),
		fetchFor:   set.NewPrometheusHistogram("membrane_proxy_fetch_duration_seconds"),
		fetched:    set.NewCounter("membrane_proxy_fetched_tokens_total"),
		followed:   set.NewCounter("membrane_proxy_followed_tokens_total"),
		retries:    set.NewCounter("membrane_proxy_prefill_retries_total"),
		noBudget:   set.NewCounter("membrane_proxy_prefill_retries_refused_total"),
		gone:       set.NewCounter("membrane_proxy_client_gone_total"),
		cut:        set.NewCounter("membrane_proxy_answers_cut_total"),
		engineDown: set.NewCounter("membrane_proxy_engine_unreachable_total"),
		tokenize:   make(map[string]*metrics.Counter), refused: make(map[string]*metrics.Counter),
	}
	for r := range reasons {
		c.decisions[r] = set.NewCounter(fmt.Sprintf("membrane_proxy_decisions_total{reason=%q}", r))
	}
	for o := range outcomes {
		c.prefills[o] = set.NewCounter(fmt.Sprintf("membrane_proxy_prefills_total{outcome=%q}", o))
	}
	for _, how := range []string{"engine", "remembered", "timeout", "none", "error"} {
		c.tokenize[how] = set.NewCounter(fmt.Sprintf("membrane_proxy_tokenize_total{how=%q}", how))
	}
	for _, why := range []string{"saturated", "pins", "draining", "key", "scope", "too_large", "bad_body"} {
		c.refused[why] = set.NewCounter(fmt.Sprintf("membrane_proxy_refused_total{why=%q}", why))
	}
	for r, name := range []string{"completions", "chat", "other"} {
		for class := 1; class < 6; class++ {
			c.answers[r][class] = set.NewCounter(fmt.Sprintf(`membrane_proxy_requests_total{route=%q,status="%dxx"}`, name, class))
		}
		c.duration[r] = set.NewPrometheusHistogram(fmt.Sprintf("membrane_proxy_request_duration_seconds{route=%q}", name))
	}
	return c
}

func (c *counters) answered(r route, status int, began time.Time) {
	if class := status / 100; class >= 1 && class <= 5 {
		c.answers[r][class].Inc()
	}
	c.duration[r].UpdateDuration(began)
}
