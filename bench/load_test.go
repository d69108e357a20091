package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pipes is a network in memory, so that tests run on synctest's clock.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "pipe"} }

// dial gives up with its context and the server: a client dials on for a request
// that has ended.
func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// fakeServer serves handler for a load and returns the load. Call it inside a
// synctest bubble; what it returns second ends it.
func fakeServer(handler http.HandlerFunc) (load, func()) {
	p := &pipes{conns: make(chan net.Conn), done: make(chan struct{})}
	server := &http.Server{Handler: handler}
	served := make(chan error, 1)
	go func() { served <- server.Serve(p) }()
	client := &http.Client{Transport: &http.Transport{DialContext: p.dial}}
	l := load{client: client, base: "http://fake", model: "m", answer: 3, inFlight: 100, timeout: time.Minute}
	return l, func() {
		close(p.done)
		<-served // every connection is the server's to close from here on
		_ = server.Close()
		client.CloseIdleConnections()
	}
}

// tokensEvery answers with three tokens, each after the given time.
func tokensEvery(w http.ResponseWriter, d time.Duration) {
	for i := range 3 {
		<-time.After(d) // on the bubble's clock
		fmt.Fprintf(w, "data: {\"choices\":[{\"token_ids\":[%d]}]}\n\n", i)
		_ = http.NewResponseController(w).Flush()
	}
	fmt.Fprint(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n")
}

// steady returns n requests that are due d apart.
func steady(n int, d time.Duration) []arrival {
	out := make([]arrival, n)
	for i := range out {
		out[i] = arrival{at: time.Duration(i) * d, prompt: []uint32{uint32(i)}}
	}
	return out
}

func TestLoadTimesTokensFromWhenTheRequestWasDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, end := fakeServer(func(w http.ResponseWriter, _ *http.Request) { tokensEvery(w, 10*time.Millisecond) })
		defer end()
		got, err := l.run(t.Context(), steady(5, time.Second))
		require.NoError(t, err)
		for _, o := range got {
			require.NoError(t, o.err)
			assert.Equal(t, 10*time.Millisecond, o.first)
			assert.Equal(t, 30*time.Millisecond, o.end)
			assert.Equal(t, []time.Duration{10 * time.Millisecond, 10 * time.Millisecond}, o.gaps)
			assert.Equal(t, []uint32{0, 1, 2}, o.tokens)
			assert.Equal(t, 10, o.prompt)
			assert.Equal(t, 4, o.cached)
		}
	})
}

// A server that stalls once for ten seconds, with one request in flight: those
// that were due meanwhile are sent late and answered at once. Counted from when
// they were sent only one of a hundred was slow.
func TestAStallShowsInThePercentiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		l, end := fakeServer(func(w http.ResponseWriter, _ *http.Request) {
			if asked.Add(1) == 1 {
				<-time.After(10 * time.Second) // on the bubble's clock
			}
			tokensEvery(w, time.Millisecond)
		})
		defer end()
		l.inFlight = 1
		got, err := l.run(t.Context(), steady(100, 100*time.Millisecond))
		require.NoError(t, err)
		arm := summarize("fake", [][]outcome{got}, ServeTargets{TTFT: time.Second, ITL: time.Second})
		assert.Zero(t, arm.Failed)
		// Request i is due at i·100 ms and starts when the i before it have ended,
		// 3 ms each.
		ttft := func(i float64) float64 { return 10_000 + 3*i + 1 - 100*i }
		assert.InDelta(t, ttft(0), arm.TTFT.Max, 0.01)
		assert.InDelta(t, ttft(9), arm.TTFT.P90, 0.01)
		assert.InDelta(t, ttft(49), arm.TTFT.P50, 0.01)
		assert.Greater(t, arm.HeldBack.P50, 4000.0)
		assert.InDelta(t, 0.06, arm.GoodShare, 0.05)

		var fromSent samples
		for _, o := range got {
			fromSent = append(fromSent, millis(o.first-o.sent))
		}
		assert.InDelta(t, 1, fromSent.quantile(0.9), 0.01, "which is what an omission of the wait would show")
	})
}

func TestRequestsAreSentWhetherOrNotEarlierOnesAreAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, end := fakeServer(func(w http.ResponseWriter, _ *http.Request) {
			<-time.After(time.Minute / 2) // on the bubble's clock
			tokensEvery(w, time.Millisecond)
		})
		defer end()
		got, err := l.run(t.Context(), steady(50, 100*time.Millisecond))
		require.NoError(t, err)
		for _, o := range got {
			require.NoError(t, o.err)
			assert.Zero(t, o.sent)
			assert.Equal(t, 30001*time.Millisecond, o.first)
		}
	})
}

func TestFailuresAreCountedAndNeverGood(t *testing.T) {
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		want    string
		ttft    float64
	}{
		"refused": {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "full", http.StatusServiceUnavailable) }, "status 503: full", 0},
		"empty":   {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "data: [DONE]\n\n") }, "no token", 0},
		"cut": {func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "data: {\"choices\":[{\"token_ids\":[1]}]}\n\n")
		}, "without [DONE]", 0},
		"too slow": {func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); <-r.Context().Done() }, "deadline exceeded", 60_000},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, end := fakeServer(c.handler)
				defer end()
				got, err := l.run(t.Context(), steady(3, time.Second))
				require.NoError(t, err)
				arm := summarize("fake", [][]outcome{got}, ServeTargets{TTFT: time.Hour, ITL: time.Hour})
				assert.Equal(t, 3, arm.Failed)
				assert.Contains(t, arm.FirstError, c.want)
				assert.Zero(t, arm.GoodShare)
				assert.InDelta(t, c.ttft, arm.TTFT.P50, 1)
			})
		})
	}
}

func TestLoadEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, end := fakeServer(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); <-r.Context().Done() })
		defer end()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := l.run(ctx, steady(100, time.Second))
		assert.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestTokensOfOneChunkComeAtOnce(t *testing.T) {
	times := []time.Time{time.Unix(1, 0), {}, time.Unix(3, 0), {}, {}, {}}
	now := func() time.Time { at := times[0]; times = times[1:]; return at }
	r := func() io.Reader {
		pr, pw := io.Pipe()
		go func() {
			_, _ = io.WriteString(pw, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"token_ids\":[5,6,7]}]}\n\ndata:[DONE]\n")
			_ = pw.Close()
		}()
		return pr
	}()
	s, err := readEvents(r, now)
	require.NoError(t, err)
	assert.Equal(t, []time.Time{time.Unix(1, 0), time.Unix(3, 0), time.Unix(3, 0), time.Unix(3, 0)}, s.arrivals)
	assert.Equal(t, []uint32{5, 6, 7}, s.tokens)
}
