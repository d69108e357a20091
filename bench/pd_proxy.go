package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
)

// pdProxyRows are the rows of the OpenAI proxy.
var pdProxyRows = []struct {
	name, target string
	quantile     float64
}{
	{"added by the proxy, not disaggregated, p50", "<= 3", 0.5},
	{"added by the proxy, not disaggregated, p99", "<= 5", 0.99},
}

const (
	proxyRate    = 200 // requests a second
	proxyWorkers = 32
	// leastAdded is the least that a bare proxy must seem to add, in µs, for a
	// ratio to mean something.
	leastAdded = 5.0
)

// proxyArms are asked in turn: the engine itself, a reverse proxy of thirty
// lines, and the sidecar's serving port.
type proxyArms struct {
	client fasthttp.Client
	urls   [3]string
	close  []func()
}

// proxy measures what the serving port adds to a request that is not
// disaggregated, beside what a bare reverse proxy adds.
func (b *pd) proxy(ctx context.Context) error {
	skip := func(why string) error {
		for _, r := range pdProxyRows {
			b.report.Rows = append(b.report.Rows, Row{Name: r.name, Unit: "µs", Target: &r.target, Why: why})
		}
		return nil
	}
	help, err := exec.CommandContext(ctx, b.opts.Binary, "serve", "--help").Output()
	if err != nil {
		return fmt.Errorf("cannot ask the binary for its flags: %w", err)
	}
	if !strings.Contains(string(help), "--serve-port") {
		return skip("this binary has no --serve-port")
	}
	arms, err := b.openProxies(ctx)
	defer arms.shut()
	if err != nil {
		return err
	}
	var rounds [3][]samples // by arm, then round
	for round := range b.opts.Rounds + 1 {
		b.opts.Progress(fmt.Sprintf("proxy, round %d of %d", round, b.opts.Rounds))
		for i := range 3 {
			arm := (i + round) % 3
			got, err := b.askProxy(ctx, &arms.client, arms.urls[arm])
			if err != nil {
				return err
			}
			if round > 0 { // the first opens connections
				rounds[arm] = append(rounds[arm], got)
			}
		}
	}
	return b.judgeProxy(rounds)
}

// judgeProxy compares what the two proxies add to the engine's own time, over
// the requests of all rounds.
func (b *pd) judgeProxy(rounds [3][]samples) error {
	for _, r := range pdProxyRows {
		var all [3]samples
		var by [3]samples // the quantile of each round
		for arm := range rounds {
			for _, round := range rounds[arm] {
				all[arm] = append(all[arm], round...)
				by[arm] = append(by[arm], round.quantile(r.quantile))
			}
		}
		added := func(arm int, name string) Row {
			var each samples
			for i := range by[arm] {
				each = append(each, by[arm][i]-by[0][i])
			}
			row := each.row(name, "µs")
			row.Value = all[arm].quantile(r.quantile) - all[0].quantile(r.quantile)
			return row
		}
		bare := added(1, strings.Replace(r.name, "the proxy, not disaggregated", "a bare reverse proxy", 1))
		row := added(2, r.name)
		if bare.Value < leastAdded {
			row.Target, row.Why = &r.target, fmt.Sprintf("the bare proxy adds %.0f µs here, which is what the machine varies by", bare.Value)
		} else {
			ratio, to := row.Value/bare.Value, "bare reverse proxy"
			row.Ratio, row.RatioTo = &ratio, &to
			var err error
			if row, err = row.judge(ratio, r.target); err != nil {
				return err
			}
		}
		b.report.Rows = append(b.report.Rows, row)
		b.report.Ceilings = append(b.report.Ceilings, bare)
	}
	return nil
}

func (a *proxyArms) shut() {
	if a == nil {
		return
	}
	a.client.CloseIdleConnections()
	for _, f := range a.close {
		f()
	}
}

// openProxies starts an engine that answers the same to everything, a bare
// proxy and a sidecar in front of it.
func (b *pd) openProxies(ctx context.Context) (*proxyArms, error) {
	a := &proxyArms{client: fasthttp.Client{MaxConnsPerHost: proxyWorkers, ReadTimeout: rigTimeout, WriteTimeout: rigTimeout}}
	engine, err := a.source(b.opts.Binary, "")
	if err != nil {
		return a, err
	}
	bare, err := a.source(b.opts.Binary, engine)
	if err != nil {
		return a, err
	}
	start, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	s, err := startSidecar(start, b.opts.Binary, b.dir, "proxy", "--memory=64MiB", "--serve-port=0", "--engine-url=http://"+engine)
	if err != nil {
		return a, err
	}
	a.close = append(a.close, s.kill)
	serve := s.field("serve")
	if serve == "" {
		return a, errors.New("the sidecar does not say where it serves")
	}
	for i, addr := range []string{engine, bare, serve} {
		a.urls[i] = "http://" + addr + "/v1/completions"
	}
	return a, nil
}

// source starts a [ReverseProxy] as a process of its own.
func (a *proxyArms) source(binary, to string) (addr string, err error) {
	cmd := exec.Command(binary, "bench", "reverse-proxy", "--to="+to)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return "", fmt.Errorf("cannot start a reverse proxy: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", fmt.Errorf("cannot start a reverse proxy: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("cannot start a reverse proxy: %w", err)
	}
	a.close = append(a.close, func() {
		_ = stdin.Close() // which ends it
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("cannot read a reverse proxy's address: %w", err)
	}
	return strings.TrimSpace(line), nil
}

// askProxy sends requests at a steady rate, whether or not earlier ones have
// been answered, and returns how long each took, in µs. One that is due while
// all workers wait for answers counts from when it was due.
func (b *pd) askProxy(ctx context.Context, client *fasthttp.Client, url string) (samples, error) {
	n := 3000
	if b.opts.Quick {
		n = 200
	}
	body := []byte(`{"model": "m", "prompt": [` + strings.Repeat("7, ", 63) + `7], "max_tokens": 1}`)
	took := make(samples, n)
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var workers sync.WaitGroup
	begin := time.Now()
	for range proxyWorkers {
		workers.Go(func() {
			req, res := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
			defer fasthttp.ReleaseRequest(req)
			defer fasthttp.ReleaseResponse(res)
			timer := time.NewTimer(0)
			defer timer.Stop()
			for i := int(next.Add(1)) - 1; i < n && failed.Load() == nil; i = int(next.Add(1)) - 1 {
				due := begin.Add(time.Duration(i) * time.Second / proxyRate)
				wait := time.Until(due)
				timer.Reset(wait)
				select {
				case <-timer.C:
				case <-ctx.Done():
					return
				}
				req.SetRequestURI(url)
				req.Header.SetMethod(fasthttp.MethodPost)
				req.Header.SetContentType("application/json")
				req.SetBodyRaw(body)
				sent := time.Now()
				from := sent // a timer that is late is not the server's
				if wait < 0 {
					from = due // the server held back whoever was to send it
				}
				err := client.DoDeadline(req, res, sent.Add(rigTimeout))
				if err == nil && res.StatusCode() != fasthttp.StatusOK {
					err = fmt.Errorf("cannot ask %s: status %d: %s", url, res.StatusCode(), res.Body())
				}
				if err != nil {
					failed.Store(&err)
					return
				}
				took[i] = micros(time.Since(from))
			}
		})
	}
	workers.Wait()
	if err := failed.Load(); err != nil {
		return nil, *err
	}
	return took, ctx.Err()
}
