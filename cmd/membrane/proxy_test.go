package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// podUnderTest is a sidecar with a serving port and an engine behind it.
type podUnderTest struct {
	*node
	engine *node // nil where the test stands for it
	key    string
}

// startPod starts a sidecar and its engine. engineURL "" starts a real engine.
func startPod(t *testing.T, name, role, engineURL string, args ...string) *podUnderTest {
	t.Helper()
	p := &podUnderTest{}
	at := ""
	if engineURL == "" {
		at = "127.0.0.1:" + freePorts(t, 1)[0]
		engineURL = "http://" + at
	}
	p.node = startNode(t, append([]string{
		"-n", name, "--role", role, "--serve-port", "0", "--engine-url", engineURL, "--prefill-threshold", "96", "--prefill-timeout", fmt.Sprint(twoPrefills),
	}, args...)...)
	if at != "" {
		p.engine = startUntil(t, command(t, "engine", "--openai", "--name", name, "--addr", at, "--sidecar", p.fields["engine_socket"], "--deadline", "2s"), "engine serving")
		require.Eventually(t, func() bool { return strings.Contains(p.engine.text(), "sidecar attached") }, timeout, tick)
	}
	return p
}

func (p *podUnderTest) serve() string { return "http://" + p.fields["serve"] }

// knows waits until the pod sees so many others as healthy.
func (p *podUnderTest) knows(t *testing.T, others int) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, got := p.call(t, p.key, "GET", "/peers", nil)
		peers, _ := got["peers"].([]any)
		healthy := 0
		for _, one := range peers {
			if m, ok := one.(map[string]any); ok && m["healthy"] == true {
				healthy++
			}
		}
		return healthy == others
	}, timeout, tick)
}

func (p *podUnderTest) count(t *testing.T, name string) string {
	t.Helper()
	return p.metric(t, p.key, name)
}

func decisions(reason string) string {
	return fmt.Sprintf("membrane_proxy_decisions_total{reason=%q}", reason)
}

type completionAnswer struct {
	tokens         []int
	text           string
	reused, stored int
	chunks         int
}

// complete sends a completion or chat, whose stream must be well-formed, and
// returns the one answer that there is.
func complete(t *testing.T, base, key, path string, body map[string]any) completionAnswer {
	t.Helper()
	b, err := json.Marshal(body)
	require.NoError(t, err)
	req, err := http.NewRequest("POST", base+path, bytes.NewReader(b))
	require.NoError(t, err)
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	res, err := plain.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Equal(t, 200, res.StatusCode, "%s", text)
	var out completionAnswer
	if body["stream"] != true {
		out.add(t, text)
		return out
	}
	require.Equal(t, "text/event-stream", res.Header.Get("Content-Type"))
	events := strings.Split(strings.TrimSuffix(string(text), "\n\n"), "\n\n")
	for i, e := range events {
		data, ok := strings.CutPrefix(e, "data: ")
		require.True(t, ok, e)
		if i == len(events)-1 {
			require.Equal(t, "[DONE]", data)
			break
		}
		out.add(t, []byte(data))
		out.chunks++
	}
	return out
}

func (a *completionAnswer) add(t *testing.T, text []byte) {
	t.Helper()
	var c struct {
		Choices []struct {
			TokenIDs []int                    `json:"token_ids"`
			Text     string                   `json:"text"`
			Message  struct{ Content string } `json:"message"`
			Delta    struct{ Content string } `json:"delta"`
		} `json:"choices"`
		Membrane *struct {
			Reused int `json:"reused_tokens"`
			Stored int `json:"stored_pages"`
		} `json:"membrane"`
	}
	require.NoError(t, json.Unmarshal(text, &c), "%s", text)
	require.Len(t, c.Choices, 1, "%s", text)
	a.tokens = append(a.tokens, c.Choices[0].TokenIDs...)
	a.text += c.Choices[0].Text + c.Choices[0].Message.Content + c.Choices[0].Delta.Content
	if c.Membrane != nil {
		a.reused, a.stored = c.Membrane.Reused, c.Membrane.Stored
	}
}

func completionOf(prompt any, more ...any) map[string]any {
	body := map[string]any{"model": "default", "prompt": prompt, "max_tokens": 8}
	for i := 0; i < len(more); i += 2 {
		body[more[i].(string)] = more[i+1]
	}
	return body
}

// reference is an engine alone, whose tokens all others must give.
func reference(t *testing.T) string {
	t.Helper()
	n := startUntil(t, command(t, "engine", "--openai", "--name", "alone", "--addr", "127.0.0.1:0"), "engine serving")
	return "http://" + n.fields["http"]
}

const completionsPath, chatPath = "/v1/completions", "/v1/chat/completions"

func TestOneEndpointBeforePrefillAndDecode(t *testing.T) {
	t.Parallel()
	file, keys := tenantKeys(t, "acme", "other")
	cluster := filepath.Join(t.TempDir(), "cluster")
	made := finish(t, "keys", "cluster")
	require.Zero(t, made.status)
	require.NoError(t, os.WriteFile(cluster, []byte(made.out), 0o600))
	shared := []string{"--api-key-file", file, "--cluster-key-file", cluster}
	p := startPod(t, "p", "prefill", "", shared...)
	d := startPod(t, "d", "decode", "", append(shared, "--peer", p.fields["http"])...)
	p.key, d.key = keys["acme"], keys["acme"]
	d.knows(t, 1)
	alone := reference(t)

	// Short: nothing of it leaves the pod.
	short := complete(t, d.serve(), keys["acme"], completionsPath, completionOf("a short prompt"))
	assert.Equal(t, complete(t, alone, "", completionsPath, completionOf("a short prompt")).tokens, short.tokens)
	assert.Equal(t, "1", d.count(t, decisions("short")))
	assert.Equal(t, "0", p.count(t, "membrane_peer_served_bytes_total"))

	// Long: prefilled there, decoded here, from the KV that was made there.
	long := strings.Repeat("All work and no play. ", 20) // 440 bytes
	for i, stream := range []bool{false, true} {
		prompt := fmt.Sprint(i) + long
		want := complete(t, alone, "", completionsPath, completionOf(prompt))
		got := complete(t, d.serve(), keys["acme"], completionsPath, completionOf(prompt, "stream", stream, "stream_options", map[bool]any{true: map[string]any{"include_usage": true}}[stream]))
		assert.Equal(t, want.tokens, got.tokens)
		assert.Equal(t, 384, got.reused, "six pages of 64")
		if stream {
			assert.Equal(t, 9, got.chunks, "a token each, and the end")
		}
	}
	assert.Equal(t, "2", d.count(t, decisions("disaggregated")))
	assert.Equal(t, "2", p.count(t, decisions("leg")))
	assert.Equal(t, "768", d.count(t, "membrane_proxy_fetched_tokens_total"))
	fetched := d.count(t, "membrane_peer_fetched_bytes_total")
	assert.Equal(t, p.count(t, "membrane_peer_served_bytes_total"), fetched)
	assert.Equal(t, fmt.Sprint(12*64*4*2*2*32*4), fetched, "pages × tokens × layers × K and V × heads × size × bytes")

	// The same prompt again is here; with a longer end, too.
	again := complete(t, d.serve(), keys["acme"], completionsPath, completionOf("0"+long))
	assert.Equal(t, 384, again.reused)
	assert.Equal(t, "1", d.count(t, decisions("cached")))
	// Another tenant's is not: neither here nor in the mesh.
	other := complete(t, d.serve(), keys["other"], completionsPath, completionOf("0"+long))
	assert.Equal(t, again.tokens, other.tokens)
	assert.Equal(t, "3", d.count(t, decisions("disaggregated")))
	// Nor under another salt of the same tenant.
	complete(t, d.serve(), keys["acme"], completionsPath, completionOf("0"+long, "cache_salt", "s"))
	assert.Equal(t, "4", d.count(t, decisions("disaggregated")))

	// Chat.
	chat := map[string]any{"model": "default", "messages": []any{
		map[string]any{"role": "system", "content": long}, map[string]any{"role": "user", "content": []any{map[string]any{"type": "text", "text": "Hello"}}},
	}, "max_completion_tokens": 6, "min_tokens": 3}
	want := complete(t, alone, "", chatPath, chat)
	got := complete(t, d.serve(), keys["acme"], chatPath, chat)
	assert.Equal(t, want.tokens, got.tokens)
	assert.Equal(t, want.text, got.text)
	assert.Positive(t, got.reused)
	chat["stream"] = true
	assert.Equal(t, want.tokens, complete(t, d.serve(), keys["acme"], chatPath, chat).tokens)
	assert.Equal(t, "5", d.count(t, decisions("disaggregated")))

	// What a client of OpenAI's asks beside.
	for path, code := range map[string]int{"/v1/models": 401, "/health": 200} {
		res, err := plain.Get(d.serve() + path)
		require.NoError(t, err)
		_ = res.Body.Close()
		assert.Equal(t, code, res.StatusCode, path)
	}
	for _, n := range []*node{d.node, p.node} {
		require.Eventually(t, func() bool { return n.metric(t, keys["acme"], "membrane_cache_leases") == "0" }, timeout, tick)
		assert.Equal(t, "0", n.metric(t, keys["acme"], "membrane_cache_pins"))
		assert.Equal(t, "0", n.metric(t, keys["acme"], "membrane_proxy_in_flight"))
	}
}

// late forwards to an engine, after a while or in another way of failing.
type late struct {
	mu     sync.Mutex
	before func(w http.ResponseWriter, r *http.Request) bool // answers itself: true
	to     string
}

func (l *late) set(f func(w http.ResponseWriter, r *http.Request) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.before = f
}

func (l *late) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	before, to := l.before, l.to
	l.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	if before != nil && before(w, r) {
		return
	}
	req, _ := http.NewRequestWithContext(r.Context(), r.Method, to+r.URL.Path, bytes.NewReader(body))
	res, err := plain.Do(req)
	if err != nil {
		w.WriteHeader(500)
		return
	}
	defer func() { _ = res.Body.Close() }()
	w.WriteHeader(res.StatusCode)
	_, _ = io.Copy(w, res.Body)
}

func TestPrefillPodsFailAndTheClientDoesNot(t *testing.T) {
	t.Parallel()
	// p1's engine is behind a server of the test's, so that it can fail in
	// every way; p2 and d are whole pods.
	spoil := &late{}
	server := httptest.NewServer(spoil)
	defer server.Close()
	p1 := startPod(t, "p1", "prefill", server.URL)
	engine := startUntil(t, command(t, "engine", "--openai", "--name", "p1", "--addr", "127.0.0.1:0", "--sidecar", p1.fields["engine_socket"]), "engine serving")
	spoil.to = "http://" + engine.fields["http"]
	p2 := startPod(t, "p2", "prefill", "", "--peer", p1.fields["http"])
	d := startPod(t, "d", "decode", "", "--peer", p1.fields["http"], "--peer", p2.fields["http"])
	d.knows(t, 2)
	p2.knows(t, 2)
	alone := reference(t)
	seed := 0
	// ask sends a prompt that p1 holds a page of, so that it is chosen first.
	ask := func(what string, within time.Duration) completionAnswer {
		seed++
		head := fmt.Sprintf("%d %s", seed, strings.Repeat("begin ", 20))
		complete(t, p1.serve(), "", completionsPath, completionOf(head))
		prompt := head + strings.Repeat("and so on ", 30)
		want := complete(t, alone, "", completionsPath, completionOf(prompt))
		if what != "" {
			spoilWith(spoil, what)
		}
		began := time.Now()
		got := complete(t, d.serve(), "", completionsPath, completionOf(prompt, "stream", seed%2 == 0))
		assert.Less(t, time.Since(began), within, what)
		assert.Equal(t, want.tokens, got.tokens, what)
		spoil.set(nil)
		return got
	}
	ask("", timeout)
	for _, what := range []string{"error", "busy", "garbage", "cut"} {
		got := ask(what, timeout)
		assert.Positive(t, got.reused, "%s: p2 has prefilled", what)
	}
	ask("delay", timeout)
	ask("hang", 5*twoPrefills)
	failed := d.count(t, decisions("prefill_failed"))

	// The sidecar of p1 stops, then dies.
	p1.signal(t, syscall.SIGSTOP)
	got := sendLong(t, d, alone, 100)
	assert.Positive(t, got.reused)
	p1.signal(t, syscall.SIGCONT)
	d.knows(t, 2)
	spoilWith(spoil, "hang")
	killed := time.AfterFunc(200*time.Millisecond, func() { _ = p1.cmd.Process.Kill() }) // meanwhile
	defer killed.Stop()
	assert.Len(t, sendLong(t, d, alone, 101).tokens, 8)
	p1.wait(t)
	spoil.set(nil)

	// Nobody is left to prefill: the engine of d does.
	p2.engine.signal(t, syscall.SIGKILL)
	p2.engine.wait(t)
	assert.Len(t, sendLong(t, d, alone, 102).tokens, 8)
	p2.signal(t, syscall.SIGKILL)
	p2.wait(t)
	assert.Len(t, sendLong(t, d, alone, 103).tokens, 8)
	assert.NotEqual(t, failed, d.count(t, decisions("prefill_failed")))
	// And only when that fails, too, there is an error.
	d.engine.signal(t, syscall.SIGKILL)
	d.engine.wait(t)
	res, err := plain.Post(d.serve()+completionsPath, "application/json", strings.NewReader(`{"prompt":"x"}`))
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 502, res.StatusCode)
	assert.Equal(t, "0", d.count(t, "membrane_proxy_in_flight"))
}

func sendLong(t *testing.T, d *podUnderTest, alone string, seed int) completionAnswer {
	t.Helper()
	prompt := fmt.Sprint(seed) + strings.Repeat(" long enough", 40)
	want := complete(t, alone, "", completionsPath, completionOf(prompt))
	got := complete(t, d.serve(), "", completionsPath, completionOf(prompt, "stream", seed%2 == 0))
	assert.Equal(t, want.tokens, got.tokens)
	return got
}

func spoilWith(l *late, what string) {
	l.set(func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/tokenize" {
			return false
		}
		switch what {
		case "error":
			w.WriteHeader(500)
		case "busy":
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(503)
		case "garbage":
			_, _ = io.WriteString(w, "<html>")
		case "cut":
			_, _ = io.WriteString(w, `{"choices"`)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case "delay":
			select {
			case <-time.After(700 * time.Millisecond):
			case <-r.Context().Done():
			}
			return false
		default: // hang
			<-r.Context().Done()
		}
		return true
	})
}

// abort sends a request and goes away after some of the answer, or before it.
func abort(base string, body map[string]any, after time.Duration) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if _, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", completionsPath, len(b), b); err != nil {
		return err
	}
	_ = conn.SetReadDeadline(time.Now().Add(after))
	_, _ = bufio.NewReader(conn).ReadString('\n') // some of the answer, if it comes so soon
	return nil
}

func TestAbortedRequestsLeaveTheirPodsAsTheyWere(t *testing.T) {
	t.Parallel()
	p := startPod(t, "p", "prefill", "")
	d := startPod(t, "d", "decode", "", "--peer", p.fields["http"])
	d.knows(t, 1)
	gauges := []string{"membrane_proxy_in_flight", "membrane_cache_leases", "membrane_cache_pins", "membrane_cache_pinned_bytes", "membrane_engine_kept_bytes", "membrane_phase_in_flight{phase=\"prefill\"}"}
	all := func(n *node) (out []string) {
		for _, g := range gauges {
			out = append(out, n.metric(t, "", g))
		}
		return out
	}
	goroutines := func(n *node) int {
		var k int
		_, _ = fmt.Sscan(n.metric(t, "", "go_goroutines"), &k)
		return k
	}
	prompt := func(i int) map[string]any {
		return completionOf(fmt.Sprint(i)+strings.Repeat(" go away", 60), "max_tokens", 200, "stream", i%2 == 0)
	}
	complete(t, d.serve(), "", completionsPath, completionOf("warm"+strings.Repeat(" go away", 60)))
	before := [][]string{all(d.node), all(p.node)}
	began := []int{goroutines(d.node), goroutines(p.node)}
	const n, at = 120, 4
	errs := make(chan error, at)
	for w := range at {
		go func() {
			var err error
			for i := w; i < n && err == nil; i += at {
				err = abort(d.serve(), prompt(i), time.Duration(i%40)*time.Millisecond)
			}
			errs <- err
		}()
	}
	for range at {
		require.NoError(t, <-errs)
	}
	for i, pod := range []*node{d.node, p.node} {
		assert.Eventually(t, func() bool { return assert.ObjectsAreEqual(before[i], all(pod)) }, timeout, tick)
		assert.Equal(t, before[i], all(pod))
		assert.Eventually(t, func() bool { return goroutines(pod) <= began[i]+10 }, timeout, tick, "fasthttp's workers end a while later")
	}
	assert.NotEmpty(t, complete(t, d.serve(), "", completionsPath, completionOf("still there")).tokens)
}

func TestDrainWaitsForWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var once sync.Once
	defer once.Do(func() { close(release) })
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == completionsPath {
			<-release
		}
		_, _ = io.WriteString(w, "{}")
	}))
	defer server.Close()
	d := startPod(t, "d", "both", server.URL)
	answered := make(chan int, 1)
	go func() {
		res, err := plain.Post(d.serve()+completionsPath, "application/json", strings.NewReader(`{"prompt":"x"}`))
		if err != nil {
			answered <- 0
			return
		}
		_ = res.Body.Close()
		answered <- res.StatusCode
	}()
	require.Eventually(t, func() bool { return d.count(t, "membrane_proxy_in_flight") == "1" }, timeout, tick)
	late := finish(t, "drain", "--port", port(d.node), "--wait", "--settle", "0s", "--timeout", "300ms")
	assert.Equal(t, 1, late.status)
	assert.Contains(t, late.err, "1 are still under way")
	assert.Equal(t, 503, d.status(t, "/readyz"))
	res, err := plain.Get(d.serve() + "/health")
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 503, res.StatusCode)
	res, err = plain.Get(d.serve() + "/v1/models")
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 200, res.StatusCode, "it serves on")
	once.Do(func() { close(release) })
	done := finish(t, "drain", "--port", port(d.node), "--wait", "--settle", "0s")
	assert.Zero(t, done.status, done.err)
	assert.Equal(t, 200, <-answered)
	d.signal(t, syscall.SIGTERM)
	assert.Zero(t, d.wait(t))
}

func TestDrainNamesAFlagThatCannotBeMeant(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"drain", "--port", "99999"}, "--port 99999: is not between 1 and 65535"},
		{[]string{"cluster-status", "--port", "0"}, "--port 0: is not between 1 and 65535"},
		{[]string{"drain", "--wait", "--settle", "40s", "--timeout", "3s"}, "--settle 40s: is longer than --timeout 3s"},
		{[]string{"drain", "--wait", "--settle", "-1s"}, "--settle -1s: is negative"},
		{[]string{"drain", "--timeout", "0s"}, "--timeout 0s: is not above 0"},
	} {
		got := finish(t, c.args...)
		assert.Equal(t, 2, got.status, c.args)
		assert.Contains(t, got.err, c.says)
	}
}

// SIGTERM: what is under way is answered to its end.
func TestSIGTERMLetsAnswersEnd(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	next := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		select {
		case <-next:
		case <-ctx.Done():
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}))
	defer server.Close()
	d := startPod(t, "d", "both", server.URL)
	res, err := plain.Post(d.serve()+completionsPath, "application/json", strings.NewReader(`{"prompt":"x","stream":true}`))
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	r := bufio.NewReader(res.Body)
	_, err = r.ReadString('\n')
	require.NoError(t, err)
	d.signal(t, syscall.SIGTERM)
	require.Eventually(t, func() bool { return d.status(t, "/readyz") == 503 }, timeout, tick)
	refused, err := plain.Post(d.serve()+completionsPath, "application/json", strings.NewReader(`{"prompt":"x"}`))
	require.NoError(t, err)
	_ = refused.Body.Close()
	assert.Equal(t, 503, refused.StatusCode)
	assert.Equal(t, "1", refused.Header.Get("Retry-After"))
	close(next)
	rest, err := io.ReadAll(r)
	require.NoError(t, err)
	assert.Equal(t, "\ndata: [DONE]\n\n", string(rest))
	assert.Zero(t, d.wait(t))
}
