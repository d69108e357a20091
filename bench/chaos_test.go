package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/engines/llama"
)

func TestTreeIsFourTimesTheBudget(t *testing.T) {
	t.Parallel()
	model, err := llama.Generate(chaosModel, llama.WithLayers(chaosLayers), llama.WithHidden(chaosHidden))
	require.NoError(t, err)
	prompts := chaosTree.prompts(7)
	require.Len(t, prompts, chaosTree.roots*chaosTree.branches*chaosTree.leaves)
	pages := make(map[string]bool)
	for _, p := range prompts {
		assert.NotZero(t, len(p)%chaosPage, "a tail that fills no page")
		for end := chaosPage; end <= len(p); end += chaosPage {
			pages[fmt.Sprint(p[:end])] = true
		}
	}
	assert.Len(t, pages, chaosTree.pages(), "pages are shared exactly as the shape says")
	assert.GreaterOrEqual(t, len(pages)*model.PageBytes(chaosPage), 4*chaosBudget)
	assert.Equal(t, prompts, chaosTree.prompts(7))
	assert.NotEqual(t, prompts, chaosTree.prompts(8))
}

func TestPickerReachesAllAndRepeats(t *testing.T) {
	t.Parallel()
	const n = 128
	a, b, other := newPicker(1, 0, n), newPicker(1, 0, n), newPicker(1, 1, n)
	seen, different := make([]int, n), false
	for range 100 * n {
		i := a.next()
		require.Equal(t, i, b.next())
		different = different || i != other.next()
		seen[i]++
	}
	assert.NotContains(t, seen, 0, "a prompt is never asked for")
	assert.Greater(t, slices.Max(seen), 3*100, "some are asked for often")
	assert.True(t, different)
}

func TestAnswersAreTheModels(t *testing.T) {
	t.Parallel()
	model, err := llama.Generate("m", llama.WithLayers(1), llama.WithHidden(64))
	require.NoError(t, err)
	shape := chaosShape{roots: 2, branches: 4, leaves: 4, root: 1, branch: 1, leaf: 1, pageTokens: 2}
	var lines []string
	got, err := answers(t.Context(), model, shape.prompts(1), 3, func(s string) { lines = append(lines, s) })
	require.NoError(t, err)
	assert.Len(t, lines, 1)
	for _, l := range got {
		kv := model.NewKV(4)
		logits, err := model.Prefill(t.Context(), kv, l.prompt)
		require.NoError(t, err)
		assert.Equal(t, llama.Argmax(logits), l.want[0])
		assert.Len(t, l.want, 3)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = answers(ctx, model, shape.prompts(1), 3, func(string) {})
	require.ErrorIs(t, err, context.Canceled)
}

// Whatever the seed: one sidecar and one engine of each are always well, the
// last ones live on, every kind comes, and nothing outlasts the run.
func TestFaultsLeaveSomebodyWell(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		length := time.Duration(rapid.IntRange(48, 400).Draw(t, "seconds")) * time.Second
		all := makeFaults(seed, length)
		require.Equal(t, all, makeFaults(seed, length))
		var kinds [faultKinds]int
		for i, f := range all {
			kinds[f.kind]++
			if i > 0 {
				require.Greater(t, f.at, all[i-1].at)
			}
			require.LessOrEqual(t, f.at+f.lasts+faultMargin, length)
			require.LessOrEqual(t, f.lasts, longest[f.kind])
			if f.kind.ends() {
				require.NotEqual(t, map[bool]int{true: chaosEngines, false: chaosNodes}[f.kind.ofEngine()]-1, f.target, "%s", f)
			}
			sidecars := map[int]bool{}
			for _, b := range all[:i+1] {
				if b.at+b.lasts+faultMargin <= f.at {
					continue
				}
				if !b.kind.ofEngine() {
					require.False(t, sidecars[b.target], "twice at once")
					sidecars[b.target] = true
				} else if f.kind.ofEngine() && b != f {
					require.NotEqual(t, f.target/chaosEnginesPerNode, b.target/chaosEnginesPerNode, "both engines of a sidecar")
				}
			}
			require.LessOrEqual(t, len(sidecars), maxSidecarsHurt)
		}
		for kind, n := range kinds {
			require.NotZero(t, n, "%s, seed %d, %s", faultKind(kind), seed, length)
		}
	})
}

func goodResult() ChaosResult {
	r := ChaosResult{
		BudgetBytes: 8 << 20, InboxBytes: 4 << 20, Faults: map[string]int{},
		Requests: ChaosRequests{Sent: 11, Right: 10, Aborted: 1, PromptTokens: 100, ReusedTokens: 50, LocalHits: 3, PeerHits: 2},
	}
	for kind := range faultKinds {
		r.Faults[kind.String()] = 1
	}
	for i := range chaosNodes {
		r.EarlySidecars = append(r.EarlySidecars, ChaosSidecar{
			Name: fmt.Sprint("n", i), HealthyPeers: 2, Engines: 2, Pages: 100, ResidentBytes: 8 << 20, ArenaBytes: 8 << 20,
			PSSBytes: 13 << 20, Goroutines: 40, OpenFiles: 20, Evictions: 5,
		})
	}
	for i := range chaosEngines {
		r.EarlyEngines = append(r.EarlyEngines, ChaosEngine{Name: fmt.Sprint("e", i), PSSBytes: 12 << 20, Memfds: 2})
	}
	r.Sidecars, r.Engines = slices.Clone(r.EarlySidecars), slices.Clone(r.EarlyEngines)
	return r
}

func TestVerdictNamesEverythingThatIsAmiss(t *testing.T) {
	t.Parallel()
	good := goodResult()
	require.Empty(t, good.verdict())
	for want, spoil := range map[string]func(*ChaosResult){
		"1 answers have wrong tokens":        func(r *ChaosResult) { r.Requests.Wrong, r.Requests.Right = 1, 9 },
		"1 requests failed":                  func(r *ChaosResult) { r.Requests.Failed, r.Requests.Right = 1, 9 },
		"1 requests were answered too late":  func(r *ChaosResult) { r.Requests.Late = 1 },
		"12 requests were sent, but 10":      func(r *ChaosResult) { r.Requests.Sent++ },
		"own sidecar":                        func(r *ChaosResult) { r.Requests.LocalHits = 0 },
		"pages of a peer":                    func(r *ChaosResult) { r.Requests.PeerHits = 0 },
		"no fault stop_engine happened":      func(r *ChaosResult) { r.Faults["stop_engine"] = 0 },
		"not every sidecar":                  func(r *ChaosResult) { r.Sidecars = r.Sidecars[:2] },
		"not every engine":                   func(r *ChaosResult) { r.EarlyEngines = nil },
		"n1 has 1 healthy peers instead":     func(r *ChaosResult) { r.Sidecars[1].HealthyPeers = 1 },
		"n1 has 1 engines instead":           func(r *ChaosResult) { r.Sidecars[1].Engines = 1 },
		"n2 has 1 leases instead of 0":       func(r *ChaosResult) { r.Sidecars[2].Leases = 1 },
		"n2 has 1 leases of engines":         func(r *ChaosResult) { r.Sidecars[2].EngineLeases = 1 },
		"n2 has 2 pins":                      func(r *ChaosResult) { r.Sidecars[2].Pins = 2 },
		"n2 has 9 pinned bytes":              func(r *ChaosResult) { r.Sidecars[2].PinnedBytes = 9 },
		"n2 has 3 handles":                   func(r *ChaosResult) { r.Sidecars[2].Handles = 3 },
		"n2 has 4 reserved slots":            func(r *ChaosResult) { r.Sidecars[2].ReservedSlots = 4 },
		"n2 has 5 views":                     func(r *ChaosResult) { r.Sidecars[2].Held = 5 },
		"n2 has 6 pulls":                     func(r *ChaosResult) { r.Sidecars[2].Pulls = 6 },
		"n0 evicted nothing":                 func(r *ChaosResult) { r.Sidecars[0].Evictions = 0 },
		"n0 found 1 corrupt":                 func(r *ChaosResult) { r.Sidecars[0].Corrupt = 1 },
		"more than its budget":               func(r *ChaosResult) { r.Sidecars[0].ResidentBytes++ },
		"bytes of memory, more than":         func(r *ChaosResult) { r.Sidecars[0].PSSBytes = 108<<20 + 51201 },
		"n0 has 49 goroutines, 40 before":    func(r *ChaosResult) { r.Sidecars[0].Goroutines = 49 },
		"n0 has 29 open files, 20 before":    func(r *ChaosResult) { r.Sidecars[0].OpenFiles = 29 },
		"n0 has 31457280 bytes of memory, 1": func(r *ChaosResult) { r.Sidecars[0].PSSBytes = 30 << 20 },
		"e4 has 4 pieces of shared memory":   func(r *ChaosResult) { r.Engines[4].Memfds = 4 },
		"e5 has 31457280 bytes of memory, 1": func(r *ChaosResult) { r.Engines[5].PSSBytes = 30 << 20 },
		"left after the stop: 12 membrane":   func(r *ChaosResult) { r.LeftProcesses = []string{"12 membrane serve"} },
		"left after the stop: memfd":         func(r *ChaosResult) { r.LeftMemfds = []string{"memfd 3"} },
	} {
		r := goodResult()
		spoil(&r)
		assert.Contains(t, strings.Join(r.verdict(), "\n"), want)
	}
}

func TestResultIsWritten(t *testing.T) {
	t.Parallel()
	r := goodResult()
	var text, doc bytes.Buffer
	require.NoError(t, r.WriteText(&text))
	assert.Contains(t, text.String(), "10 right")
	assert.Contains(t, text.String(), "stop_engine 1")
	require.NoError(t, r.WriteJSON(&doc))
	var back ChaosResult
	require.NoError(t, json.Unmarshal(doc.Bytes(), &back))
	assert.Equal(t, r, back)
}

// sleeper is a member whose process does nothing.
func sleeper(t *testing.T) *member {
	t.Helper()
	m := newMember("sleeper", func(context.Context) (*process, string, error) {
		p, err := start("sleep", "sleeper", "60")
		return p, "here", err
	})
	require.NoError(t, m.start(t.Context()))
	t.Cleanup(func() {
		if p := m.take(); p != nil {
			p.kill()
		}
	})
	return m
}

func TestMemberSuffersAndHeals(t *testing.T) {
	t.Parallel()
	m := sleeper(t)
	addr, first, err := m.current(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "here", addr)

	require.NoError(t, m.suffer(t.Context(), fault{kind: stopEngine, lasts: 20 * time.Millisecond}))
	assert.False(t, m.gone(first), "a stop ends nobody")
	assert.GreaterOrEqual(t, m.stoppedFor(), 20*time.Millisecond)

	before := m.running()
	require.NoError(t, m.suffer(t.Context(), fault{kind: killEngine}))
	assert.True(t, m.gone(first))
	assert.NotSame(t, before, m.running())

	require.Error(t, m.suffer(t.Context(), fault{kind: restartSidecar}), "it ends by SIGTERM, not with status 0")
	require.NoError(t, m.died())

	m.running().kill()
	require.ErrorContains(t, m.suffer(t.Context(), fault{kind: stopEngine}), "ended by itself")
}

func TestMemberIsWaitedFor(t *testing.T) {
	t.Parallel()
	m := sleeper(t)
	m.take().kill()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, _, err := m.current(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	found := make(chan int, 1)
	go func() {
		_, generation, err := m.current(t.Context())
		assert.NoError(t, err)
		found <- generation
	}()
	require.NoError(t, m.start(t.Context()))
	assert.Equal(t, 1, <-found)
	require.Error(t, newMember("nobody", nil).freeze())
}

// fakeEngine is a member that answers as f does.
func fakeEngine(t *testing.T, f http.HandlerFunc) *member {
	t.Helper()
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	m := sleeper(t)
	m.addr = strings.TrimPrefix(s.URL, "http://")
	return m
}

func TestRequestsAreJudged(t *testing.T) {
	t.Parallel()
	stream := func(w http.ResponseWriter, tokens, load string) {
		fmt.Fprintf(w, "data: {\"choices\":[{\"token_ids\":%s}]}\n\n", tokens)
		fmt.Fprintf(w, "data: {\"choices\":[],\"membrane\":{\"reused_tokens\":2,\"peer_pages\":1,\"miss_reason\":\"absent\",\"load_ms\":%s}}\n\n", load)
		fmt.Fprint(w, "data: [DONE]\n\n")
	}
	leaf := leafPrompt{prompt: []uint32{1, 2, 3}, want: []uint32{4, 5}}
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter, r *http.Request)
		abort  time.Duration
		want   ChaosRequests
	}{
		"right":  {func(w http.ResponseWriter, _ *http.Request) { stream(w, "[4,5]", "3") }, 0, ChaosRequests{Right: 1}},
		"wrong":  {func(w http.ResponseWriter, _ *http.Request) { stream(w, "[4,6]", "3") }, 0, ChaosRequests{Wrong: 1}},
		"short":  {func(w http.ResponseWriter, _ *http.Request) { stream(w, "[4]", "3") }, 0, ChaosRequests{Wrong: 1}},
		"late":   {func(w http.ResponseWriter, _ *http.Request) { stream(w, "[4,5]", "1500") }, 0, ChaosRequests{Right: 1, Late: 1}},
		"failed": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, 0, ChaosRequests{Failed: 1}},
		"aborted": {
			func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body) // or the server does not see that the client is gone
				<-r.Context().Done()
			}, 20 * time.Millisecond,
			ChaosRequests{Aborted: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := newChaos(ChaosOptions{}, t.TempDir())
			run.request(t.Context(), fakeEngine(t, c.answer), leaf, c.abort)
			got := run.tally.snapshot()
			assert.Equal(t, 1, got.Sent)
			assert.Equal(t, c.want, ChaosRequests{Right: got.Right, Wrong: got.Wrong, Failed: got.Failed, Late: got.Late, Aborted: got.Aborted})
			assert.Equal(t, got.Right+got.Wrong, got.PeerHits)
			assert.Len(t, run.tally.problems, min(1, got.Wrong+got.Failed+got.Late))
			assert.False(t, math.IsNaN(got.ReusedShare()))
		})
	}
}

func TestRequestIsSentAgainAfterAKill(t *testing.T) {
	t.Parallel()
	asked, killed := make(chan struct{}), make(chan struct{})
	var requests atomic.Int64
	m := fakeEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		if requests.Add(1) == 1 {
			close(asked)
			<-killed
			panic(http.ErrAbortHandler) // cuts the connection
		}
		fmt.Fprint(w, "data: {\"choices\":[{\"token_ids\":[4]}]}\n\ndata: [DONE]\n\n")
	})
	addr := m.addr
	m.begin = func(context.Context) (*process, string, error) {
		p, err := start("sleep", "again", "60")
		return p, addr, err
	}
	run := newChaos(ChaosOptions{}, t.TempDir())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		run.request(t.Context(), m, leafPrompt{prompt: []uint32{1}, want: []uint32{4}}, 0)
	}()
	<-asked
	m.take().kill()
	close(killed)
	require.NoError(t, m.start(t.Context()))
	<-ended
	got := run.tally.snapshot()
	assert.Equal(t, ChaosRequests{Sent: 1, SentAgain: 1, Right: 1}, ChaosRequests{Sent: got.Sent, SentAgain: got.SentAgain, Right: got.Right, Failed: got.Failed})
}

// The real binary, every kind of fault once, in seconds: `make chaos` is the
// long form.
func TestSmallChaos(t *testing.T) {
	binary := realBinary(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c := newChaos(ChaosOptions{Binary: binary, Seed: 5, Progress: func(s string) { t.Log(s) }}, t.TempDir())
	run := func() error {
		small := chaosShape{roots: 2, branches: 2, leaves: 2, root: 1, branch: 1, leaf: 1, pageTokens: chaosPage}
		if err := c.prepare(ctx, small); err != nil {
			return err
		}
		if err := c.start(ctx); err != nil {
			return err
		}
		var faults []fault
		for kind := range faultKinds {
			faults = append(faults, fault{at: time.Duration(kind) * 200 * time.Millisecond, lasts: 300 * time.Millisecond, kind: kind, target: int(kind) % 2})
		}
		errs := make(chan error, 1)
		go func() { errs <- c.hurt(ctx, faults) }()
		c.load(ctx, 0, 2*time.Second)
		if err := <-errs; err != nil {
			return err
		}
		var err error
		if c.result.Sidecars, c.result.Engines, err = c.settle(ctx, chaosSettle); err != nil {
			return err
		}
		c.replay(ctx)
		c.note("replayed")
		return nil
	}
	err := run()
	r, _ := c.finish(ctx, err)
	require.NoError(t, err)
	assert.Positive(t, r.Requests.Right)
	assert.Positive(t, r.Requests.LocalHits)
	assert.Zero(t, r.Requests.Wrong)
	assert.Zero(t, r.Requests.Failed)
	for kind := range faultKinds {
		assert.Equal(t, 1, r.Faults[kind.String()], kind)
	}
	assert.Empty(t, r.LeftProcesses)
	assert.Empty(t, r.LeftMemfds)
	for _, s := range r.Sidecars {
		assert.Empty(t, s.busy())
	}
}

func TestChaosRefusesAShortRun(t *testing.T) {
	t.Parallel()
	_, err := Chaos(t.Context(), ChaosOptions{Duration: time.Second})
	require.ErrorContains(t, err, "duration 1s")
}

func TestFixedPortsDiffer(t *testing.T) {
	t.Parallel()
	ports, err := fixedPorts(6)
	require.NoError(t, err)
	slices.Sort(ports)
	assert.Len(t, slices.Compact(ports), 6)
}
