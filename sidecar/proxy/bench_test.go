package proxy

import (
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"

	"membrane/sidecar/roles"
)

// plainProxy is a reverse proxy as fasthttp makes it easy: the measure of what
// a proxy costs at all.
func plainProxy(engine string) fasthttp.RequestHandler {
	client := &fasthttp.HostClient{Addr: engine, MaxConns: 1024, StreamResponseBody: true}
	return func(c *fasthttp.RequestCtx) {
		req, res := &c.Request, &c.Response
		req.Header.Del("Connection")
		req.SetHost(engine)
		if err := client.Do(req, res); err != nil {
			c.Error("engine: "+err.Error(), fasthttp.StatusBadGateway)
			return
		}
		res.Header.Del("Connection")
	}
}

func serveFast(b *testing.B, h fasthttp.RequestHandler) string {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	s := &fasthttp.Server{Handler: h, StreamRequestBody: true, MaxRequestBodySize: MaxBody}
	go func() { _ = s.Serve(l) }()
	b.Cleanup(func() { _ = s.Shutdown() })
	return "http://" + l.Addr().String()
}

// BenchmarkAddedLatency sends the same request straight to an engine, through
// the plain proxy and through this one, in turns, and compares what each adds.
func BenchmarkAddedLatency(b *testing.B) {
	reply := `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"` + strings.Repeat("word ", 60) + `","finish_reason":"length"}],"usage":{"prompt_tokens":5,"completion_tokens":60,"total_tokens":65}}`
	for _, size := range []struct {
		name  string
		bytes int
	}{{"2KiB", 2 << 10}, {"16KiB", 16 << 10}} {
		b.Run(size.name, func(b *testing.B) {
			engine := serveFast(b, func(c *fasthttp.RequestCtx) {
				if r := c.RequestBodyStream(); r != nil {
					_, _ = io.Copy(io.Discard, r)
				}
				c.Response.Header.SetContentType("application/json")
				c.SetBodyString(reply)
			})
			reference := serveFast(b, plainProxy(strings.TrimPrefix(engine, "http://")))
			s, err := New(Config{
				Engine: engine, Threshold: 1 << 20, ClusterKey: []byte("key"), Cache: &fakeCache{}, Metrics: metrics.NewSet(), Log: zerolog.Nop(),
				Pods: func() []Pod { return nil }, Role: func() roles.Role { return roles.RoleDecode },
			})
			require.NoError(b, err)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(b, err)
			s.Serve(l)
			b.Cleanup(func() { _ = s.Close(b.Context()) })
			body := `{"model":"m","max_tokens":60,"temperature":0.7,"prompt":"` + strings.Repeat("x", size.bytes) + `","stream":false}`
			targets := []string{engine, reference, "http://" + l.Addr().String()}
			took := make([][]time.Duration, len(targets))
			client := &fasthttp.Client{}
			one := func(t int) time.Duration {
				req, res := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
				defer fasthttp.ReleaseRequest(req)
				defer fasthttp.ReleaseResponse(res)
				req.SetRequestURI(targets[t] + completionsPath)
				req.Header.SetMethod(http.MethodPost)
				req.Header.SetContentType("application/json")
				req.SetBodyString(body)
				began := time.Now()
				if err := client.Do(req, res); err != nil || res.StatusCode() != 200 || len(res.Body()) != len(reply) {
					b.Fatal(err, res.StatusCode())
				}
				return time.Since(began)
			}
			for range 200 {
				for t := range targets {
					one(t)
				}
			}
			for i := 0; b.Loop(); i++ {
				for k := range targets { // each as often first
					t := (i + k) % len(targets)
					took[t] = append(took[t], one(t))
				}
			}
			at := func(t int, q float64) float64 {
				slices.Sort(took[t])
				return float64(took[t][int(q*float64(len(took[t])-1))].Nanoseconds()) / 1000
			}
			for _, q := range []struct {
				name string
				at   float64
			}{{"p50", 0.5}, {"p99", 0.99}} {
				direct, plain, ours := at(0, q.at), at(1, q.at), at(2, q.at)
				b.ReportMetric(plain-direct, "plain-added-us-"+q.name)
				b.ReportMetric(ours-direct, "added-us-"+q.name)
				b.ReportMetric((ours-direct)/(plain-direct), "ratio-"+q.name)
			}
		})
	}
}
