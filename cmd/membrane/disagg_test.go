package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"membrane/sidecar/grpcapi/transferpb"
)

// tenantKeys writes a keyfile with a key of scope write for each tenant.
func tenantKeys(t *testing.T, tenants ...string) (file string, keys map[string]string) {
	t.Helper()
	keys = map[string]string{}
	var text strings.Builder
	for _, tenant := range tenants {
		made := finish(t, "keys", "generate", "--subject", tenant, "--scope", "write")
		require.Zero(t, made.status, made.err)
		lines := strings.Split(made.out, "\n")
		keys[tenant] = lines[0]
		text.WriteString(lines[1] + "\n")
	}
	file = filepath.Join(t.TempDir(), "api-keys")
	require.NoError(t, os.WriteFile(file, []byte(text.String()), 0o600))
	return file, keys
}

// call sends a request of a tenant and returns the status and the JSON answer.
func (n *node) call(t *testing.T, key, method, path string, body any) (int, map[string]any) {
	t.Helper()
	b, err := json.Marshal(body)
	require.NoError(t, err)
	req, err := http.NewRequest(method, n.url()+path, bytes.NewReader(b))
	require.NoError(t, err)
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	res, err := plain.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	var out map[string]any
	if json.Unmarshal(text, &out) != nil {
		out = map[string]any{"text": string(text)}
	}
	return res.StatusCode, out
}

func (n *node) metric(t *testing.T, key, name string) string {
	t.Helper()
	code, got := n.call(t, key, "GET", "/metrics", nil)
	require.Equal(t, 200, code)
	found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (.*)$`).FindStringSubmatch(got["text"].(string))
	require.Len(t, found, 2, "no metric %s", name)
	return found[1]
}

func tokensFrom(first, n int) (out []int) {
	for i := range n {
		out = append(out, first+i)
	}
	return out
}

// A prefill pod and a decode pod of two tenants, as real processes; then the
// prefill pod is stopped, and killed.
func TestPrefillPodAndDecodePod(t *testing.T) {
	t.Parallel()
	file, keys := tenantKeys(t, "acme", "other")
	p := startNode(t, "-n", "p", "--role", "prefill", "--api-key-file", file)
	d := startNode(t, "-n", "d", "--role", "decode", "--api-key-file", file, "--peer", p.fields["http"])
	single := startNode(t, "-n", "single", "--api-key-file", file)
	for _, n := range []*node{p, d} {
		require.Eventually(t, func() bool {
			_, got := n.call(t, keys["acme"], "GET", "/peers", nil)
			peers, _ := got["peers"].([]any)
			return len(peers) == 1 && peers[0].(map[string]any)["healthy"] == true
		}, timeout, tick)
	}
	status := command(t, "cluster-status", "--host", "127.0.0.1", "--port", port(d))
	status.Env = append(status.Env, "MEMBRANE_API_KEY="+keys["acme"])
	shown := finishCommand(t, status)
	assert.Regexp(t, `(?m)^d .*self .*decode .*set with --role$`, shown.out)
	assert.Regexp(t, `(?m)^p .*true .*prefill .*set with --role$`, shown.out)

	prefill := func(n *node, tenant string, tokens []int) (int, map[string]any) {
		return n.call(t, keys[tenant], "POST", "/disagg/prefill", map[string]any{"request_id": "r", "model_id": "llama-3-8b", "token_ids": tokens})
	}
	decode := func(n *node, tenant, handle string) (int, map[string]any) {
		began := time.Now()
		code, got := n.call(t, keys[tenant], "POST", "/disagg/decode", map[string]any{
			"request_id": "r", "model_id": "llama-3-8b", "kv_handle": handle, "max_tokens": 8, "deadline_ms": 5000,
		})
		assert.Less(t, time.Since(began), 6*time.Second, "answered by the deadline")
		return code, got
	}
	handle := func(tenant string, tokens []int) string {
		code, got := prefill(p, tenant, tokens)
		require.Equal(t, 200, code, got)
		return got["kv_handle"].(string)
	}

	prompt := tokensFrom(1, 300)
	known := handle("acme", prompt)
	code, got := decode(d, "acme", known)
	require.Equal(t, 200, code, got)
	assert.EqualValues(t, 300, got["pulled_tokens"])
	assert.EqualValues(t, 0, got["recomputed_tokens"])
	assert.Equal(t, "0", d.metric(t, keys["acme"], "membrane_disagg_decode_recomputed_tokens_total"))
	assert.Equal(t, "1", d.metric(t, keys["acme"], `membrane_role{role="decode"}`))
	_, alone := prefill(single, "acme", prompt)
	require.Equal(t, known, alone["kv_handle"], "the same prompt has the same handle everywhere")
	_, want := decode(single, "acme", known)
	assert.Equal(t, want["token_ids"], got["token_ids"])
	require.Eventually(t, func() bool { return p.metric(t, keys["acme"], "membrane_cache_pins") == "0" }, timeout, tick, "the pull ends the pins")

	code, got = decode(d, "other", known)
	assert.Equal(t, 404, code, got)
	assert.Equal(t, known, handle("other", prompt))
	code, _ = decode(d, "other", known)
	assert.Equal(t, 200, code)
	code, got = prefill(d, "acme", prompt)
	assert.Equal(t, 409, code, got)
	code, got = decode(p, "acme", known)
	assert.Equal(t, 409, code, got)

	// Stopped: what the decode pod has not pulled cannot be had, what it has, can.
	fresh := handle("acme", tokensFrom(1000, 200))
	p.signal(t, syscall.SIGSTOP)
	code, got = decode(d, "acme", fresh)
	assert.Equal(t, 404, code, got)
	assert.Contains(t, fmt.Sprint(got["detail"]), "did not answer")
	code, got = decode(d, "acme", known)
	assert.Equal(t, 200, code, got)
	p.signal(t, syscall.SIGCONT)
	require.Eventually(t, func() bool {
		code, got = decode(d, "acme", fresh)
		return code == 200
	}, timeout, tick)
	assert.EqualValues(t, 0, got["recomputed_tokens"])

	// Killed.
	lost := handle("acme", tokensFrom(2000, 200))
	p.signal(t, syscall.SIGKILL)
	p.wait(t)
	code, _ = decode(d, "acme", lost)
	assert.Equal(t, 404, code)
	code, got = decode(d, "acme", fresh)
	assert.Equal(t, 200, code)
	assert.EqualValues(t, 0, got["recomputed_tokens"])
	d.signal(t, syscall.SIGTERM)
	assert.Zero(t, d.wait(t))
}

// grpcPods starts a prefill pod and a decode pod that know each other, with
// gRPC, for one tenant.
func grpcPods(t *testing.T) (p, d *node, key string) {
	t.Helper()
	file, keys := tenantKeys(t, "acme")
	p = startNode(t, "-n", "p", "--role", "prefill", "--api-key-file", file, "--grpc-port", "0")
	d = startNode(t, "-n", "d", "--role", "decode", "--api-key-file", file, "--grpc-port", "0", "--peer", p.fields["http"])
	require.Eventually(t, func() bool {
		_, got := d.call(t, keys["acme"], "GET", "/peers", nil)
		peers, _ := got["peers"].([]any)
		return len(peers) == 1 && peers[0].(map[string]any)["healthy"] == true
	}, timeout, tick)
	return p, d, keys["acme"]
}

func TestStockGoClient(t *testing.T) {
	t.Parallel()
	p, d, key := grpcPods(t)
	client := func(n *node) transferpb.TransferClient {
		conn, err := grpc.NewClient(n.fields["grpc"], grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return transferpb.NewTransferClient(conn)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	prompt := &transferpb.PrefillRequest{RequestId: "r", ModelId: "llama-3-8b"}
	for i := range int64(300) {
		prompt.TokenIds = append(prompt.TokenIds, i+1)
	}
	done, err := client(p).Prefill(ctx, prompt)
	require.NoError(t, err)
	got, err := client(d).Decode(ctx, &transferpb.DecodeRequest{RequestId: "r", ModelId: "llama-3-8b", KvHandle: done.GetKvHandle(), MaxTokens: 8})
	require.NoError(t, err)
	assert.EqualValues(t, 300, got.GetPulledTokens())
	assert.Zero(t, got.GetRecomputedTokens())
	assert.Len(t, got.GetTokenIds(), 8)
	_, err = client(d).Prefill(ctx, prompt)
	assert.Equal(t, codes.FailedPrecondition, status.Code(err))
	d.signal(t, syscall.SIGTERM)
	assert.Zero(t, d.wait(t))
}

// TestStockPythonClient needs a Python with grpcio-tools, whose path `make
// test-grpc` puts into MEMBRANE_GRPC_PYTHON.
func TestStockPythonClient(t *testing.T) {
	t.Parallel()
	python := os.Getenv("MEMBRANE_GRPC_PYTHON")
	if python == "" {
		t.Skip("MEMBRANE_GRPC_PYTHON is not set: run make test-grpc")
	}
	p, d, key := grpcPods(t)
	cmd := exec.Command(python, "../../sidecar/grpcapi/testdata/client.py", p.fields["grpc"], d.fields["grpc"], key)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Run(), errs.String())
	var tokens []int
	require.NoError(t, json.Unmarshal(out.Bytes(), &tokens), out.String())
	assert.Len(t, tokens, 8)
}

// A prefill of which the handle is known at once, a decode that follows it, and
// both by the command line.
func TestADecodePodFollowsAPrefillPod(t *testing.T) {
	t.Parallel()
	p := startNode(t, "-n", "p", "--role", "prefill")
	d := startNode(t, "-n", "d", "--role", "decode", "--peer", p.fields["http"])
	waitForPeer(t, d)
	var ids strings.Builder
	for i := range 1500 {
		fmt.Fprintln(&ids, i+1)
	}
	prefill := command(t, "disagg", "prefill", "--base-url", p.url(), "--tokens", ids.String(), "--stream", "--request-id", "r1")
	pipe, err := prefill.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, prefill.Start())
	lines := bufio.NewScanner(pipe)
	require.True(t, lines.Scan())
	var first, last map[string]any
	require.NoError(t, json.Unmarshal(lines.Bytes(), &first))
	assert.EqualValues(t, 1500, first["prompt_len"])
	assert.Equal(t, "r1", first["request_id"])
	handle := first["kv_handle"].(string)

	whole := finish(t, "disagg", "decode", "--base-url", d.url(), "--handle", handle, "--max-tokens", "4")
	require.Zero(t, whole.status, whole.err)
	require.NoError(t, json.Unmarshal([]byte(whole.out), &last))
	assert.EqualValues(t, 1500, last["pulled_tokens"])
	assert.EqualValues(t, 0, last["recomputed_tokens"])
	require.True(t, lines.Scan())
	var end map[string]any
	require.NoError(t, json.Unmarshal(lines.Bytes(), &end))
	assert.Equal(t, handle, end["kv_handle"])
	assert.False(t, lines.Scan())
	require.NoError(t, prefill.Wait())
	followed, err := strconv.Atoi(d.metric(t, "", "membrane_disagg_decode_followed_tokens_total"))
	require.NoError(t, err)
	assert.GreaterOrEqual(t, followed, 128, "the first page leaves before the prefill ends")
	require.Eventually(t, func() bool { return p.metric(t, "", "membrane_cache_pins") == "0" }, timeout, tick)

	streamed := finish(t, "disagg", "decode", "--base-url", d.url(), "--handle", handle, "--max-tokens", "4", "--stream")
	require.Zero(t, streamed.status, streamed.err)
	assert.Len(t, strings.Split(strings.TrimSpace(streamed.out), "\n"), 5, "four tokens and the whole answer")
	for _, bad := range []struct {
		status int
		says   string
		args   []string
	}{
		{2, "--handle is empty", []string{"decode"}},
		{2, "--tokens is empty", []string{"prefill"}},
		{2, "--stop-tokens", []string{"decode", "--handle", handle, "--stop-tokens", "x"}},
		{2, "--base-url", []string{"decode", "--handle", handle, "--base-url", "p:1", "--stream"}},
		{2, "needs a command", nil},
		{1, "status 409", []string{"decode", "--handle", handle, "--base-url", p.url(), "--stream"}},
		{1, "status 404", []string{"decode", "--handle", "ab", "--base-url", d.url()}},
	} {
		got := finish(t, append([]string{"disagg"}, bad.args...)...)
		assert.Equal(t, bad.status, got.status, "%v: %s", bad.args, got.err)
		assert.Contains(t, got.err, bad.says)
	}
}

func waitForPeer(t *testing.T, n *node) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, got := n.call(t, "", "GET", "/peers", nil)
		peers, _ := got["peers"].([]any)
		return len(peers) == 1 && peers[0].(map[string]any)["healthy"] == true
	}, timeout, tick)
}
