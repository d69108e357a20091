package bench

import "context"

// pdProxyRows are the rows of the OpenAI proxy.
var pdProxyRows = []struct{ name, target string }{
	{"added by the proxy, not disaggregated, p50", "<= 3"},
	{"added by the proxy, not disaggregated, p99", "<= 5"},
}

// proxy notes the rows of the OpenAI proxy.
func (b *pd) proxy(context.Context) error {
	for _, r := range pdProxyRows {
		b.report.Rows = append(b.report.Rows, Row{Name: r.name, Unit: "µs", Target: &r.target, Why: "this binary has no --serve-port"})
	}
	return nil
}
