package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/bench"
)

// run runs a command line in this process and returns what it printed.
func run(ctx context.Context, args ...string) (string, error) {
	var out bytes.Buffer
	root := newRootCommand()
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	return out.String(), err
}

func runOK(t *testing.T, args ...string) string {
	t.Helper()
	out, err := run(t.Context(), args...)
	require.NoError(t, err, out)
	return out
}

// background runs a command until the test ends, which it must do well.
func background(t *testing.T, args ...string) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { _, err := run(ctx, args...); done <- err }()
	t.Cleanup(func() {
		stop()
		assert.NoError(t, <-done)
	})
}

// freePort returns a loopback port that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

func answers(t *testing.T, url string) {
	t.Helper()
	require.Eventually(t, func() bool {
		resp, err := http.Get(url)
		if err != nil {
			return false
		}
		return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
	}, timeout, tick)
}

func TestCommandsInOneProcess(t *testing.T) {
	dir := runtimeDir(t)
	port, enginePort := freePort(t), freePort(t)
	socket := filepath.Join(dir, "e.sock")
	background(t, "serve", "-n", "one", "-p", port, "--memory=16MiB", "--engine-socket", socket, "--engine-addr=off", "--log-level=error")
	answers(t, "http://127.0.0.1:"+port+"/readyz")
	base := "--base-url=http://127.0.0.1:" + port

	var made struct {
		Fragments []struct {
			Identity struct {
				Hash string `json:"payload_hash"`
			} `json:"identity"`
		} `json:"fragments"`
	}
	out := runOK(t, "client", "prefill", base, "--prompt-tokens", "1 2,3 4", "--model-id", "m")
	require.NoError(t, json.Unmarshal([]byte(out), &made))
	require.Len(t, made.Fragments, 1)
	hash := made.Fragments[0].Identity.Hash
	assert.Contains(t, runOK(t, "client", "inventory", base), hash)
	assert.Contains(t, runOK(t, "client", "retrieve", base, "--hash", hash), `"found": true`)
	assert.Contains(t, runOK(t, "client", "reconstruct", base, "--tokens", "1 2 3 4", "--model-id", "m"), `"coverage": 1`)
	alone := runOK(t, "cluster-status", "--host=127.0.0.1", "-p", port)
	assert.Regexp(t, `(?m)^\S+ .* self .* both `, alone)
	assert.Contains(t, alone, "\nno peers\n")

	background(t, "engine", "--addr=127.0.0.1:"+enginePort, "--sidecar", socket, "--layers=1", "--hidden=64")
	answers(t, "http://127.0.0.1:"+enginePort+"/health")
	resp, err := http.Post("http://127.0.0.1:"+enginePort+"/v1/completions", "application/json", strings.NewReader(`{"prompt": [1,2], "max_tokens": 2}`))
	require.NoError(t, err)
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	require.NoError(t, resp.Body.Close())
}

func TestClusterStatusShowsPeers(t *testing.T) {
	dir := runtimeDir(t)
	one, two := freePort(t), freePort(t)
	for name, ports := range map[string][2]string{"n1": {one, two}, "n2": {two, one}} {
		background(t, "serve", "-n", name, "-p", ports[0], "--peer=127.0.0.1:"+ports[1], "--memory=4MiB", "--engine-addr=off",
			"--engine-socket", filepath.Join(dir, name+".sock"), "--log-level=error")
	}
	answers(t, "http://127.0.0.1:"+one+"/readyz")
	require.Eventually(t, func() bool {
		out, err := run(t.Context(), "cluster-status", "--host=127.0.0.1", "-p", one)
		return err == nil && strings.Contains(out, "n2") && strings.Contains(out, "true")
	}, timeout, tick)
}

func TestKeysAreMade(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(runOK(t, "keys", "generate", "-s", "ops", "--scope=read", "--scope=engine")), "\n")
	require.Len(t, lines, 2)
	assert.True(t, strings.HasPrefix(lines[0], "mbr_"))
	assert.Contains(t, lines[1], ":ops:")
	var made map[string]string
	require.NoError(t, json.Unmarshal([]byte(runOK(t, "keys", "generate", "-s", "ops", "--json")), &made))
	assert.NotEmpty(t, made["key"])
	assert.Contains(t, made["keyfile_line"], "sha256:")
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(runOK(t, "keys", "cluster")))
	require.NoError(t, err)
	assert.Len(t, key, 32)
}

func TestMistakesAreTheCallers(t *testing.T) {
	for line, want := range map[string]string{
		"nothing":                                "not a command",
		"serve now":                              "not a command",
		"keys":                                   "needs a command",
		"client":                                 "needs a command",
		"bench":                                  "needs a command",
		"serve --port=many":                      `--port "many": is not a whole number (see membrane serve --help)`,
		"serve -p 1e99":                          `--port "1e99": is not a whole number`,
		"serve --port=99999999999999999999":      `: is out of range`,
		"serve --lm-open=maybe":                  `--lm-open "maybe": is neither true nor false`,
		"bench serve --rate=fast":                `--rate "fast": is not a number`,
		"serve --memory=1":                       "memory",
		"keys generate":                          "--subject",
		"keys generate -s a --scope=all":         "--scope",
		"client retrieve":                        "--hash",
		"client prefill":                         "--prompt-tokens",
		"client prefill --prompt-tokens=1,x":     `"x" at position 1`,
		"engine --layers=0":                      "layers",
		"engine --addr=foo":                      `--addr "foo"`,
		"engine --sidecar=foo":                   `--sidecar "foo"`,
		"engine --block-tokens=0":                "--block-tokens 0",
		"engine --deadline=-1s":                  "--deadline -1s",
		"engine --lease=0s":                      "--lease 0s",
		"engine --model=/nowhere":                "/nowhere",
		"bench chaos --duration=1s":              "--duration",
		"bench core --floors=/nowhere --rounds=": "rounds",
		"bench core --vllm-only":                 "needs --vllm",
		"bench serve --json --markdown":          "--markdown",
		"bench serve --url=localhost:8000":       "--url",
		"bench serve --url=http://x --arms=none": "--arms",
		"bench serve --max-in-flight=0":          "--max-in-flight",
		"bench serve --timeout=0s":               "--timeout",
		"bench serve --rounds=0":                 "--rounds",
		"bench serve --cache-mib=0":              "--cache-mib",
		"bench serve --rate=0":                   "rate",
		"bench serve --turns=0":                  "turns",
		"bench serve --arms=none,vllm":           `"vllm" is not one of`,
	} {
		_, err := run(t.Context(), strings.Fields(line)...)
		require.Error(t, err, line)
		assert.Contains(t, err.Error(), want, line)
		assert.Equal(t, exitUsage, statusOf(err), "%s: %v", line, err)
	}
	_, err := run(t.Context(), "client", "inventory", "--base-url=http://127.0.0.1:"+freePort(t))
	require.Error(t, err)
	assert.Equal(t, exitFailed, statusOf(err))
	_, err = run(t.Context(), "cluster-status", "--host=127.0.0.1", "-p", freePort(t))
	require.Error(t, err)
	assert.Equal(t, exitFailed, statusOf(err))
}

func TestFloorsFileIsRead(t *testing.T) {
	_, err := run(t.Context(), "bench", "core", "--quick", "--floors=/nowhere")
	if assert.ErrorContains(t, err, "--floors: ") {
		assert.Equal(t, exitUsage, statusOf(err))
	}
	none, err := readFloors("")
	require.NoError(t, err)
	assert.Nil(t, none)
	floors, err := readFloors("../../tools/bench-floors.txt")
	require.NoError(t, err)
	assert.ErrorContains(t, floors.Check(bench.Report{}), "has no row")
	_, err = run(t.Context(), "bench", "core", "--attempts=0")
	assert.ErrorContains(t, err, "--attempts 0: is not above 0")
}

func TestHelpTeaches(t *testing.T) {
	for _, command := range [][]string{{}, {"serve"}, {"engine"}, {"client"}, {"demo"}, {"bench"}, {"bench", "core"}, {"bench", "serve"}, {"keys", "generate"}} {
		out := runOK(t, append(command, "--help")...)
		assert.Contains(t, out, "Usage:")
	}
	assert.Equal(t, "membrane "+version+"\n", runOK(t, "version"))
	assert.Equal(t, "membrane "+version+"\n", runOK(t, "--version"))
	assert.Contains(t, runOK(t), "Available Commands")
}

func TestProgressAndAddressesAreShown(t *testing.T) {
	var out, diag bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	show(ctx, &diag, bench.DemoSystem{Sidecars: []string{"127.0.0.1:1"}, Engines: []string{"127.0.0.1:2"}})
	assert.Contains(t, diag.String(), "http://127.0.0.1:1/statusz")
	progress(&out)("step")
	assert.Equal(t, "· step\n", out.String())
}

func TestShellsCompleteValues(t *testing.T) {
	t.Parallel()
	for flag, values := range map[string]string{
		"serve --role":             "prefill decode both auto",
		"serve --log-level":        "debug info warn error",
		"serve --log-format":       "text json",
		"keys generate --scope":    "read write admin engine",
		"bench replay --policies":  "membrane lru lru-heads-first ristretto optimum",
		"bench replay --workload":  "chat agents retrieval mooncake-like bailian-like",
		"disagg decode --model-id": "",
	} {
		got, directive, _ := strings.Cut(runOK(t, append([]string{"__complete"}, append(strings.Fields(flag), "")...)...), ":")
		assert.Equal(t, strings.Fields(values), strings.Fields(got), flag)
		assert.Contains(t, directive, "ShellCompDirectiveNoFileComp", flag)
	}
}
