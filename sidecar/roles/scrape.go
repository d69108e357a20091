package roles

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	// maxScrape is the most of an engine's metrics that is read.
	maxScrape     = 4 << 20
	maxScrapeLine = 64 << 10
	scrapeTime    = 2 * time.Second
)

// waitingMetrics are what engines call the number of requests that wait.
var waitingMetrics = map[string]bool{"vllm:num_requests_waiting": true, "sglang:num_queue_reqs": true}

// Scraper reads the length of an engine's queue from its /metrics: vLLM's and
// SGLang's. One goroutine at a time uses it.
type Scraper struct {
	url    string
	client *http.Client
}

// NewScraper returns a scraper of the engine at http://HOST:PORT. Close ends
// its connections.
func NewScraper(base string) *Scraper {
	return &Scraper{strings.TrimRight(base, "/") + "/metrics", &http.Client{Transport: &http.Transport{MaxIdleConns: 1}}}
}

// Close lets go of idle connections.
func (s *Scraper) Close() { s.client.CloseIdleConnections() }

// Waiting returns how many requests wait in the engine, within two seconds or
// ctx's deadline.
func (s *Scraper) Waiting(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTime)
	defer cancel()
	fail := func(err error) (int, error) {
		return 0, fmt.Errorf("cannot read the engine's queue at %q: %w", s.url, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, http.NoBody)
	if err != nil {
		return fail(err)
	}
	res, err := s.client.Do(req)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return fail(fmt.Errorf("status %d", res.StatusCode))
	}
	n, err := parseWaiting(io.LimitReader(res.Body, maxScrape))
	if err != nil {
		return fail(err)
	}
	return n, nil
}

// parseWaiting sums the lines of an engine's metrics that say how many requests
// wait, of which there is one for each of its replicas.
func parseWaiting(r io.Reader) (int, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxScrapeLine)
	sum, found := 0.0, false
	for lines.Scan() {
		line := lines.Text()
		end := strings.IndexAny(line, "{ ")
		if end < 0 || !waitingMetrics[line[:end]] {
			continue
		}
		value := line[strings.LastIndexByte(line, '}')+1:]
		if line[end] == ' ' {
			value = line[end:]
		}
		fields := strings.Fields(value) // a time may follow
		if len(fields) == 0 {
			return 0, fmt.Errorf("%s has no value", line[:end])
		}
		v, err := strconv.ParseFloat(fields[0], 64)
		if err != nil || !(v >= 0 && v < 1e9) {
			return 0, fmt.Errorf("%s is %q", line[:end], fields[0])
		}
		sum, found = sum+v, true
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	if !found {
		return 0, fmt.Errorf("there is neither vllm:num_requests_waiting nor sglang:num_queue_reqs")
	}
	return int(min(sum, 1e9)), nil
}
