package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func smallServe(url string) ServeOptions {
	return ServeOptions{
		URL: url, Mix: PromptMix{Prefixes: 2, PrefixTokens: 128, Conversations: 2, Turns: 2, TurnTokens: 32, AnswerTokens: 3, Vocabulary: 300},
		Requests: 8, Rate: 100, Seed: 1, InFlight: 4, Timeout: time.Minute, Rounds: 2,
		Targets: ServeTargets{TTFT: time.Minute, ITL: time.Minute}, Version: "test",
	}
}

func TestServeMeasuresAServerAtAURL(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "Bearer secret", r.Header.Get("Authorization"))
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data":[{"id":"the-model"}]}`)
			return
		}
		var body completionBody
		assert.NoError(t, json.NewDecoder(r.Body).Decode(&body))
		assert.Equal(t, "the-model", body.Model)
		assert.True(t, body.Stream)
		assert.Equal(t, 3, body.MaxTokens)
		tokensEvery(w, 0)
	}))
	defer server.Close()
	opts := smallServe(server.URL + "/v1/")
	opts.Key = "secret"
	r, err := Serve(t.Context(), opts)
	require.NoError(t, err)
	require.Len(t, r.Arms, 1)
	arm := r.Arms[0]
	assert.Equal(t, 16, arm.Requests)
	assert.Zero(t, arm.Failed, arm.FirstError)
	assert.Zero(t, arm.Differ)
	assert.InDelta(t, 1, arm.GoodShare, 0)
	assert.InDelta(t, 0.4, arm.CachedShare, 1e-9)
	assert.Positive(t, arm.TTFT.P99)
	assert.Positive(t, arm.GoodS)
}

func TestServeNamesAServerThatHasNoModels(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	_, err := Serve(t.Context(), smallServe(server.URL))
	assert.ErrorContains(t, err, "cannot list the models")
	assert.ErrorContains(t, err, "status 404")
}

func TestServeMeasuresTheEmbeddedEngine(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	s, err := startSidecar(ctx, realBinary(t), dir, "serve", "--memory=64MiB")
	require.NoError(t, err)
	defer s.kill()
	engine, err := start(realBinary(t), "engine", "engine", "--name=serve", "--sidecar="+s.socket, "--layers=1", "--hidden=64")
	require.NoError(t, err)
	defer engine.kill()
	fields, err := engine.logged(ctx, "engine serving")
	require.NoError(t, err)
	_, err = engine.logged(ctx, "sidecar attached")
	require.NoError(t, err)
	addr, _ := fields["http"].(string)
	r, err := Serve(ctx, smallServe("http://"+addr))
	require.NoError(t, err)
	arm := r.Arms[0]
	assert.Equal(t, 16, arm.Requests)
	assert.Zero(t, arm.Failed, arm.FirstError)
	assert.Zero(t, arm.Differ, "the second round has the first one's tokens")
	assert.Greater(t, arm.CachedShare, 0.5, "the second round is cached")
	assert.Positive(t, arm.ITL.P50)
}

func TestArmsThatCannotBeRunSayWhy(t *testing.T) {
	opts := smallServe("")
	opts.Binary = "/bin/false"
	r, err := Serve(t.Context(), opts)
	require.NoError(t, err)
	require.Len(t, r.Arms, len(ArmNames))
	for i, arm := range r.Arms {
		assert.Equal(t, ArmNames[i], arm.Name)
		assert.Contains(t, arm.Why, "needs vLLM")
	}
	for _, write := range []func(*strings.Builder) error{
		func(w *strings.Builder) error { return r.WriteText(w) },
		func(w *strings.Builder) error { return r.WriteJSON(w) },
		func(w *strings.Builder) error { return r.WriteMarkdown(w) },
	} {
		var w strings.Builder
		require.NoError(t, write(&w))
		for _, name := range ArmNames {
			assert.Contains(t, w.String(), name)
		}
		assert.Contains(t, w.String(), "needs vLLM")
	}
	opts.Arms = []string{"none", "none"}
	_, err = Serve(t.Context(), opts)
	assert.ErrorContains(t, err, `"none" is not one of`)
}

func TestServeRunsEveryArm(t *testing.T) {
	opts := smallServe("")
	opts.Binary, opts.VLLM.Python = realBinary(t), fakePython(t, "")
	opts.LMCache, opts.EngineMiB, opts.CacheMiB = opts.VLLM.Python, 64, 64
	r, err := Serve(deadline(t), opts)
	require.NoError(t, err)
	require.Len(t, r.Arms, len(ArmNames))
	for _, arm := range r.Arms {
		assert.Empty(t, arm.Why, arm.Name)
		assert.Equal(t, 16, arm.Requests, arm.Name)
		assert.Zero(t, arm.Failed, arm.FirstError)
		assert.Zero(t, arm.Differ, arm.Name)
	}
	assert.Equal(t, 64, r.Workload.CacheMiB)
}

func TestAnArmThatDoesNotStartLeavesTheOthers(t *testing.T) {
	opts := smallServe("")
	opts.Binary, opts.VLLM.Python, opts.EngineMiB, opts.CacheMiB = realBinary(t), fakePython(t, "boot"), 64, 64
	opts.Arms, opts.Rounds = []string{"baseline", "none", "lmcache"}, 1
	r, err := Serve(deadline(t), opts)
	require.NoError(t, err)
	require.Len(t, r.Arms, 3)
	assert.Contains(t, r.Arms[0].Why, "vllm-baseline ended before it was ready")
	assert.Equal(t, 8, r.Arms[1].Requests)
	assert.Contains(t, r.Arms[2].Why, "needs LMCache")
}

func TestServeReportsEveryForm(t *testing.T) {
	due := func(i int) time.Duration { return time.Duration(i) * time.Second }
	ok := outcome{first: 100 * time.Millisecond, end: 300 * time.Millisecond, gaps: []time.Duration{200 * time.Millisecond}, tokens: []uint32{1, 2}, count: 2, prompt: 100, cached: 50}
	slow, other, failed := ok, ok, outcome{due: due(3), end: time.Second, err: errNoToken}
	slow.due, slow.first, slow.end = due(1), 3*time.Second, 3200*time.Millisecond
	other.due, other.tokens = due(2), []uint32{1, 3}
	reference := []outcome{ok, slow, ok, ok}
	opts := ServeOptions{Targets: ServeTargets{TTFT: time.Second, ITL: time.Second}}
	arm := opts.summarize("membrane", [][]outcome{{ok, slow, other, failed}}, reference)
	assert.Equal(t, 1, arm.Failed)
	assert.Equal(t, 1, arm.Differ)
	assert.InDelta(t, 0.5, arm.GoodShare, 1e-9)
	assert.InDelta(t, 2/4.2, arm.GoodS, 1e-9, "the last answer ends after 4.2 s")
	assert.InDelta(t, 3000, arm.TTFT.Max, 1e-9)
	assert.InDelta(t, 0.5, arm.CachedShare, 1e-9)

	r := ServeReport{Workload: ServeWorkload{EngineMiB: 256, CacheMiB: 1024}, Arms: []ServeArm{arm, {Name: "lmcache", Why: "needs LMCache"}}}
	var text, markdown, js strings.Builder
	require.NoError(t, r.WriteText(&text))
	assert.Contains(t, text.String(), "lmcache: not run: needs LMCache")
	assert.Contains(t, text.String(), "the answer has no token")
	require.NoError(t, r.WriteMarkdown(&markdown))
	assert.Contains(t, markdown.String(), "| lmcache | not run: needs LMCache |")
	for _, line := range strings.Split(strings.TrimSpace(markdown.String()), "\n") {
		if strings.HasPrefix(line, "|") && !strings.Contains(line, "---") {
			assert.Equal(t, len(serveColumns)+1, strings.Count(line, "|"), line)
		}
	}
	require.NoError(t, r.WriteJSON(&js))
	for _, field := range []string{"ttft", "p99_ms", "goodput_s", "held_back", "rate_s", "cached_share", "why"} {
		assert.Contains(t, js.String(), `"`+field+`"`)
	}
}

func TestPythonFilesAreComplete(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, unpackPython(dir))
	for _, name := range []string{"__init__", "baseline", "files", "model"} {
		_, err := os.Stat(dir + "/membrane_bench/" + name + ".py")
		assert.NoError(t, err)
	}
}
