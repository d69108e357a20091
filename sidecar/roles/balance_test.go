package roles

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// measured returns p nodes that prefill and d that decode, whose queues are so
// long in all.
func measured(p, d, prefill, decode int) []Measured {
	out := make([]Measured, 0, p+d)
	for range p {
		out = append(out, Measured{Role: RolePrefill})
	}
	for range d {
		out = append(out, Measured{Role: RoleDecode})
	}
	out[0].Queues.Prefill = prefill
	out[len(out)-1].Queues.Decode = decode
	return out
}

// scene is what a balance measures, under test control.
type scene struct {
	mu    sync.Mutex
	nodes []Measured
}

func (s *scene) set(nodes []Measured) { s.mu.Lock(); defer s.mu.Unlock(); s.nodes = nodes }

func balance(t *testing.T) (*Balance, *scene) {
	t.Helper()
	s := &scene{}
	b := NewBalance(BalanceConfig{Measure: func(ctx context.Context) []Measured {
		until, ok := ctx.Deadline()
		assert.True(t, ok && time.Until(until) <= 5*time.Second)
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.nodes
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); b.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return b, s
}

func TestTheRatioFollowsQueuesThatStayLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, s := balance(t)
		assert.InDelta(t, 0.5, b.Ratio(), 0)
		s.set(measured(2, 3, 0, 0))
		pass(10 * time.Minute)
		assert.Zero(t, b.State().Steps, "nothing waits, nothing changes")

		s.set(measured(2, 3, 40, 3))
		pass(25 * time.Second)
		assert.InDelta(t, 0.5, b.Ratio(), 0, "not at once")
		pass(20 * time.Second)
		assert.InDelta(t, 3.0/5, b.Ratio(), 1e-9, "one node more")
		assert.EqualValues(t, 1, b.State().Steps)
		assert.Equal(t, 5, b.State().Nodes)
		assert.Regexp(t, `^queues \d+:1\.0$`, b.State().String())

		// Others learn of the change later: no second step for the same queue.
		pass(time.Minute)
		assert.EqualValues(t, 1, b.State().Steps)
		s.set(measured(3, 2, 40, 3))
		pass(2 * time.Minute)
		assert.InDelta(t, 4.0/5, b.Ratio(), 1e-9)
		s.set(measured(4, 1, 400, 0))
		pass(10 * time.Minute)
		assert.InDelta(t, 4.0/5, b.Ratio(), 1e-9, "one node decodes at the least")

		s.set(measured(4, 1, 0, 30))
		pass(5 * time.Minute)
		assert.InDelta(t, 3.0/5, b.Ratio(), 1e-9)
	})
}

func TestTheRatioDoesNotSwing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, s := balance(t)
		for range 60 { // bursts that are over before a node would have changed
			s.set(measured(2, 2, 50, 0))
			pass(10 * time.Second)
			s.set(measured(2, 2, 0, 50))
			pass(10 * time.Second)
		}
		assert.Zero(t, b.State().Steps)
		s.set(measured(2, 2, 10, 6)) // both wait, about as much
		pass(10 * time.Minute)
		assert.Zero(t, b.State().Steps)
	})
}

func TestNodesThatHaveNotChosenAreWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, s := balance(t)
		s.set(append(measured(1, 2, 50, 0), Measured{Role: RoleBoth}))
		pass(10 * time.Minute)
		assert.Zero(t, b.State().Steps)
		s.set(nil)
		pass(time.Minute)
		s.set([]Measured{{Role: RoleBoth, Queues: Queues{Prefill: 50}}})
		pass(10 * time.Minute)
		assert.Zero(t, b.State().Steps, "alone")
		assert.InDelta(t, 0.5, b.Ratio(), 0)
	})
}

// Whatever is measured: the ratio leaves a node to each phase, steps are at
// least the pause apart, and each changes one node.
func TestEachStepIsOfOneNode(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := NewBalance(BalanceConfig{})
		now := time.Unix(0, 0)
		var last time.Time
		p, d := rapid.IntRange(1, 5).Draw(t, "p"), rapid.IntRange(1, 5).Draw(t, "d")
		for range 200 {
			now = now.Add(5 * time.Second)
			steps := b.State().Steps
			b.look(now, measured(p, d, rapid.IntRange(-1, 100).Draw(t, "prefill"), rapid.IntRange(0, 20).Draw(t, "decode")))
			if b.State().Steps == steps {
				continue
			}
			require.True(t, last.IsZero() || now.Sub(last) >= DefaultBalancePause)
			last = now
			k := prefillNodes(p+d, b.Ratio())
			require.Equal(t, 1, max(k-p, p-k))
			require.True(t, k >= 1 && k < p+d)
			p, d = k, p+d-k
		}
	})
}

const vllmMetrics = `# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_running{engine="0",model_name="m"} 9.0
vllm:num_requests_waiting{engine="0",model_name="a{b} c"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0 1700000000
vllm:num_requests_waiting_by_reason{reason="x"} 70
`

func TestQueuesOfEnginesAreRead(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{vllmMetrics: 7, "sglang:num_queue_reqs{tp_rank=\"0\"} 5\n": 5, "sglang:num_queue_reqs 2\n": 2} {
		n, err := parseWaiting(strings.NewReader(text))
		require.NoError(t, err)
		assert.Equal(t, want, n)
	}
	for _, bad := range []string{
		"", "up 1\n", "sglang:num_queue_reqs{", "sglang:num_queue_reqs x", "sglang:num_queue_reqs -1", "sglang:num_queue_reqs NaN", "sglang:num_queue_reqs{} ",
		"sglang:num_queue_reqs +Inf", "sglang:num_queue_reqs " + strings.Repeat("1", maxScrapeLine),
	} {
		_, err := parseWaiting(strings.NewReader(bad))
		assert.Error(t, err, "%.40s", bad)
	}
	_, err := parseWaiting(strings.NewReader("sglang:num_queue_reqs{a=\"" + strings.Repeat("x", maxScrapeLine-40) + "\"} 1\n"))
	assert.NoError(t, err, "a line at the limit")
}

func FuzzWaiting(f *testing.F) {
	f.Add(vllmMetrics)
	f.Add("sglang:num_queue_reqs{")
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := parseWaiting(strings.NewReader(text)); err == nil && n < 0 {
			t.Fatalf("%d", n)
		}
	})
}

func TestTheScraperIsBounded(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	defer close(hang)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/a/metrics":
			fmt.Fprint(w, vllmMetrics)
		case "/long/metrics":
			line := strings.Repeat("x", 1023) + "\n"
			for range maxScrape / len(line) {
				fmt.Fprint(w, line)
			}
			fmt.Fprint(w, vllmMetrics) // behind the limit
		case "/hang/metrics":
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(srv.Close)
	ask := func(path string) (int, error) {
		s := NewScraper(srv.URL + path)
		defer s.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		return s.Waiting(ctx)
	}
	n, err := ask("/a/")
	require.NoError(t, err)
	assert.Equal(t, 7, n)
	_, err = ask("/long")
	assert.Error(t, err)
	began := time.Now()
	_, err = ask("/hang")
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.Less(t, time.Since(began), 5*time.Second)
	_, err = ask("/nothing")
	assert.ErrorContains(t, err, "status 404")
	_, err = NewScraper("http://[").Waiting(context.Background())
	assert.Error(t, err)
}

func TestANodeSaysWhatItsRatioFollows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k, v := keep(t, func(c *Config) { c.RatioWhy = BalanceState{Prefill: 1234.5, Decode: 0.25}.String })
		pass(time.Minute)
		assert.Equal(t, "no other auto node is alive", k.State().Why)
		v.set(among(t, RolePrefill))
		pass(40 * time.Second)
		why := k.State().Why
		assert.Contains(t, why, "1 of them prefill, queues 1234:0.2")
		assert.LessOrEqual(t, len(why), maxWhy)
		assert.Len(t, cut(strings.Repeat("x", maxWhy+1), maxWhy), maxWhy)
	})
}
