package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// freePorts returns ports that nobody listens on now.
func freePorts(t *testing.T, n int) []string {
	t.Helper()
	var ports []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer func() { _ = l.Close() }()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		ports = append(ports, port)
	}
	return ports
}

// The quickstart of the home page, as an ordinary user types it.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	n := startNode(t, "--daemon")
	got := n.client(t, "prefill", "--prompt-tokens", "1 2 3 4 5 6 7 8")
	assert.Equal(t, true, got["success"])
	digest := n.client(t, "inventory")["digest"].(map[string]any)
	require.Len(t, digest, 1)
	for hash := range digest {
		found := n.client(t, "retrieve", "--hash", hash)
		assert.Equal(t, true, found["found"])
		assert.Equal(t, hash, found["fragment"].(map[string]any)["identity"].(map[string]any)["payload_hash"])
	}
	assert.Equal(t, false, n.client(t, "retrieve", "--hash", "nothing")["found"])
	// Keys come in order, so that two answers can be compared as text.
	text := finish(t, "client", "inventory", "--base-url", n.url()).out
	assert.Less(t, strings.Index(text, `"digest"`), strings.Index(text, `"next"`))

	bad := finish(t, "client", "prefill", "--base-url", n.url(), "--prompt-tokens", "1 -2")
	assert.Equal(t, 1, bad.status)
	assert.Contains(t, bad.err, "prompt_tokens[1]")
	assert.Contains(t, finish(t, "cluster-status", "--port", port(n)).out, "no peers\n")
}

func port(n *node) string {
	_, p, _ := net.SplitHostPort(n.fields["http"])
	return p
}

// Three nodes of the home page, of which each names the other two, with
// nothing but names and ports that differ.
func TestThreeNodesFindEachOtherAndShare(t *testing.T) {
	t.Parallel()
	ports := freePorts(t, 3)
	dir := runtimeDir(t)
	var nodes []*node
	for i := range 3 {
		args := []string{"serve", "-n", fmt.Sprint("n", i+1), "-p", ports[i], "--daemon", "--log-format", "json"}
		for k, p := range ports {
			if k != i {
				args = append(args, "--peer", "localhost:"+p)
			}
		}
		cmd := command(t, args...)
		cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR="+dir, "MEMBRANE_MEMORY=32MiB", "MEMBRANE_INBOX=4MiB")
		nodes = append(nodes, startCommand(t, cmd))
	}
	sockets := map[string]bool{}
	for i, n := range nodes {
		n.meets(t, 2)
		assert.Equal(t, fmt.Sprint("n", i+1), n.fields["node"])
		sockets[n.fields["engine_socket"]] = true
	}
	assert.Len(t, sockets, 3)

	prompt := strings.Trim(strings.ReplaceAll(fmt.Sprint(make([]int, 300)), "0", "7"), "[]")
	made := nodes[0].client(t, "prefill", "--prompt-tokens", prompt, "--model-id", "llama-3-8b")["fragments"]
	require.Len(t, made, 3)
	require.Eventually(t, func() bool {
		got := nodes[2].client(t, "reconstruct", "--tokens", prompt, "--model-id", "llama-3-8b")
		if got["coverage"] != 1.0 {
			return false
		}
		assert.Equal(t, made, got["fragments"])
		assert.Equal(t, false, got["prefilled"])
		return true
	}, timeout, 100e6)

	// One is killed: the others serve what they have.
	nodes[0].signal(t, syscall.SIGKILL)
	nodes[0].wait(t)
	assert.Equal(t, 1.0, nodes[2].client(t, "reconstruct", "--tokens", prompt, "--model-id", "llama-3-8b")["coverage"])
	for _, n := range nodes[1:] {
		n.signal(t, syscall.SIGTERM)
	}
	for _, n := range nodes[1:] {
		assert.Zero(t, n.wait(t))
	}
}

// The home page's way to listen beyond loopback.
func TestKeysBeyondLoopback(t *testing.T) {
	t.Parallel()
	made := finish(t, "keys", "generate", "--subject", "ops", "--scope", "admin")
	require.Zero(t, made.status)
	lines := strings.Split(made.out, "\n")
	require.Len(t, lines, 3)
	file := filepath.Join(t.TempDir(), "api-keys")
	require.NoError(t, os.WriteFile(file, []byte(lines[1]+"\n"), 0o600))

	refused := finish(t, "serve", "--host", "0.0.0.0", "--port", "0")
	assert.Equal(t, 2, refused.status)
	assert.Contains(t, refused.err, "--api-key-file")

	n := startNode(t, "--host", "0.0.0.0", "--api-key-file", file, "--daemon")
	_, p, _ := net.SplitHostPort(n.fields["http"])
	n.fields["http"] = "127.0.0.1:" + p
	assert.Equal(t, 401, n.status(t, "/inventory"))
	assert.Equal(t, 200, n.status(t, "/readyz"))
	denied := finish(t, "client", "inventory", "--base-url", n.url())
	assert.Equal(t, 1, denied.status)
	assert.Contains(t, denied.err, "401")
	assert.Contains(t, n.client(t, "prefill", "--prompt-tokens", "1", "--api-key", lines[0]), "success")
	cmd := command(t, "client", "inventory", "--base-url", n.url())
	cmd.Env = append(cmd.Env, "MEMBRANE_API_KEY="+lines[0])
	got := finishCommand(t, cmd)
	require.Zero(t, got.status, got.err)
	assert.Contains(t, got.out, `"ops:`)
	assert.NotContains(t, n.text(), lines[0])
}

func TestClusterKeyKeepsStrangersOut(t *testing.T) {
	t.Parallel()
	key := finish(t, "keys", "cluster")
	require.Zero(t, key.status)
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte(key.out), 0o600))
	a := startNode(t, "-n", "a", "--cluster-key-file", file)
	b := startNode(t, "-n", "b", "--cluster-key-file", file, "--peer", a.fields["http"])
	stranger := startNode(t, "-n", "s", "--peer", a.fields["http"], "--join", a.fields["gossip"])
	a.meets(t, 1)
	b.meets(t, 1)
	require.Eventually(t, func() bool { return strings.Contains(stranger.text(), "cannot join yet") }, timeout, tick)
	assert.Contains(t, finish(t, "cluster-status", "--port", port(stranger)).out, "\nno peers\n")
	a.meets(t, 1)
}

// attach connects an engine that holds a lease, over the localhost port.
func attach(t *testing.T, n *node) (*kvwire.Client, uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	t.Cleanup(cancel)
	c, err := kvwire.Dial(ctx, n.fields["engine_addr"], kvwire.ClientOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	reg, err := c.Register(ctx, kvwire.Register{
		Engine: "e", Role: kvwire.RoleBoth, InboxSlots: 2,
		Model:      kvwire.ModelFacts{WeightsID: "w", DType: "u8", RoPE: "none", Layers: 1, KVHeads: 1, HeadSize: 1},
		Descriptor: kvwire.Descriptor{Layout: "bytes", DType: "u8", BlockTokens: 64, BlockBytes: 4096, TPSize: 1, PPSize: 1, Layers: [2]int{0, 1}, Heads: [2]int{0, 1}},
	})
	require.NoError(t, err)
	require.True(t, reg.SharedMemory)
	tokens := make([]byte, 64*4)
	m, err := c.Match(ctx, kvwire.Match{Tokens: tokens}, nil)
	require.NoError(t, err)
	slots, err := c.Reserve(ctx, []kvwire.PageRef{{Handle: m.Handle}}, nil)
	require.NoError(t, err)
	copy(c.Slot(slots[0].Slot), "page")
	done, err := c.Commit(ctx, []kvwire.Commit{{PageRef: kvwire.PageRef{Handle: m.Handle}, Slot: slots[0].Slot}}, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.StoreStored, done[0].Status)
	l, err := c.Match(ctx, kvwire.Match{Tokens: tokens, LeaseMS: 60000}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, l.Pages)
	require.Equal(t, "page", string(c.Arena()[l.Locations[0].Offset:][:4]))
	return c, l.Lease
}

func TestSIGTERMDrains(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	c, lease := attach(t, n)
	n.signal(t, syscall.SIGTERM)
	require.Eventually(t, func() bool { return n.status(t, "/readyz") == 503 }, timeout, tick)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	out, err := c.Release(ctx, kvwire.Release{Lease: lease})
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReleaseLive, out)
	assert.Zero(t, n.wait(t))
	_, err = os.Lstat(n.fields["engine_socket"])
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func TestSecondSignalStopsAtOnce(t *testing.T) {
	t.Parallel()
	n := startNode(t, "--drain-timeout", "1h")
	attach(t, n)
	n.signal(t, syscall.SIGINT)
	require.Eventually(t, func() bool { return n.status(t, "/readyz") == 503 }, timeout, tick)
	n.signal(t, syscall.SIGTERM)
	assert.Equal(t, 1, n.wait(t))
}

func TestWhatEndsWithStatus2(t *testing.T) {
	t.Parallel()
	f := func(message string, args ...string) {
		t.Helper()
		got := finish(t, args...)
		assert.Equal(t, 2, got.status, "%v: %s", args, got.err)
		assert.Contains(t, got.err, message)
		assert.Empty(t, got.out)
		assert.Equal(t, 1, strings.Count(got.err, "\n"), "one sentence: %s", got.err)
	}
	f("unknown flag: --what", "serve", "--what")
	f(`"extra" is not a command`, "serve", "extra")
	f(`"nonsense" is not a command`, "nonsense")
	f("--memory", "serve", "--memory", "much")
	f("--port", "serve", "--port", "99999")
	f("--port", "serve", "--port", "eighty")
	f("--page-tokens", "serve", "--page-tokens", "0")
	f("--log-level", "serve", "--log-level", "loud")
	f("--data-addr", "serve", "--data-addr", "0.0.0.0:1")
	f("--gossip-addr", "serve", "--gossip-addr", "0.0.0.0:1")
	f("--engine-addr", "serve", "--engine-addr", "0.0.0.0:1")
	f(`--advertise-host ":": cannot be resolved`, "serve", "-p", "0", "--memory", "4MiB", "--log-level", "error", "--advertise-host", ":")
	f("--api-key-file", "serve", "--api-key-file", "/nowhere")
	f("needs a command", "client")
	f("--prompt-tokens is empty", "client", "prefill")
	f(`"x" at position 1`, "client", "prefill", "--prompt-tokens", "1 x")
	f("--hash is empty", "client", "retrieve")
	f("--scope", "keys", "generate", "--subject", "a", "--scope", "root")
	f("--subject", "keys", "generate", "--subject", "a:b")

	cmd := command(t, "serve")
	cmd.Env = append(cmd.Env, "MEMBRANE_PORT=tcp://10.0.0.1:8080")
	got := finishCommand(t, cmd)
	assert.Equal(t, 2, got.status)
	assert.Contains(t, got.err, "MEMBRANE_PORT")

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	_, p, _ := net.SplitHostPort(taken.Addr().String())
	f("address already in use", "serve", "--port", p)
}

func TestWhatEndsWithStatus1(t *testing.T) {
	t.Parallel()
	nobody := freePorts(t, 1)[0]
	for _, args := range [][]string{
		{"client", "inventory", "--base-url", "http://127.0.0.1:" + nobody},
		{"cluster-status", "--port", nobody},
	} {
		got := finish(t, args...)
		assert.Equal(t, 1, got.status)
		assert.Contains(t, got.err, "cannot reach the sidecar")
	}
}

func TestHelpVersionAndKeys(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"--version"}} {
		got := finish(t, args...)
		assert.Zero(t, got.status)
		assert.Regexp(t, `^membrane \S+\n$`, got.out)
	}
	help := finish(t, "serve", "--help")
	assert.Zero(t, help.status)
	for _, want := range []string{"MEMBRANE_PAGE_TOKENS", "MEMBRANE_PEERS", "Examples:", "--drain-timeout"} {
		assert.Contains(t, help.out, want)
	}
	assert.Zero(t, finish(t, "completion", "bash").status)
	got := finish(t, "keys", "generate", "-s", "acme", "--scope", "write", "--scope", "engine", "--json")
	assert.Regexp(t, `^\{"key":"mbr_[\w-]{43}","keyfile_line":"sha256:[0-9a-f]{64}:acme:write,engine"\}\n$`, got.out)
}
