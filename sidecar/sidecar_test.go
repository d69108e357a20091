package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

const (
	timeout = 20 * time.Second
	tick    = 10 * time.Millisecond
)

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: timeout}

func testSettings(t *testing.T, name string) Settings {
	t.Helper()
	dir, err := os.MkdirTemp("", "mb")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := DefaultSettings()
	s.NodeID, s.Port, s.Memory, s.Inbox = name, 0, 16<<20, 1<<20
	s.EngineAddr, s.EngineSocket = "127.0.0.1:0", filepath.Join(dir, "engine.sock")
	s.DrainTimeout = Seconds(5 * time.Second)
	return s
}

type running struct {
	*Sidecar
	cancel context.CancelFunc
	done   chan error
}

func run(t *testing.T, s Settings) *running {
	t.Helper()
	n, err := New(s, "test", zerolog.Nop())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{n, cancel, make(chan error, 1)}
	go func() {
		r.done <- n.Run(ctx)
		close(r.done)
	}()
	select {
	case <-n.Ready():
	case err := <-r.done:
		t.Fatalf("did not start: %v", err)
	}
	t.Cleanup(func() {
		cancel()
		<-r.done
	})
	return r
}

func (r *running) stop(t *testing.T) error {
	t.Helper()
	r.cancel()
	select {
	case err := <-r.done:
		return err
	case <-time.After(timeout):
		t.Fatal("does not stop")
		return nil
	}
}

func (r *running) get(t *testing.T, path string) (int, map[string]any) {
	t.Helper()
	res, err := client.Get("http://" + r.Addresses().HTTP + path)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	var v map[string]any
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &v), "%s", b)
	return res.StatusCode, v
}

func (r *running) post(t *testing.T, path, body string) map[string]any {
	t.Helper()
	res, err := client.Post("http://"+r.Addresses().HTTP+path, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	var v map[string]any
	require.NoError(t, json.NewDecoder(res.Body).Decode(&v))
	require.Equal(t, 200, res.StatusCode, "%v", v)
	return v
}

func TestTwoNodesShareFragments(t *testing.T) {
	t.Parallel()
	a := run(t, testSettings(t, "a"))
	s := testSettings(t, "b")
	s.Peers = List{a.Addresses().HTTP}
	b := run(t, s)
	for _, n := range []*running{a, b} {
		require.Eventually(t, func() bool {
			_, v := n.get(t, "/peers")
			list := v["peers"].([]any)
			return len(list) == 1 && list[0].(map[string]any)["healthy"] == true
		}, timeout, tick)
	}
	_, peers := a.get(t, "/peers")
	peer := peers["peers"].([]any)[0].(map[string]any)
	assert.Equal(t, "b", peer["node_id"])
	host, port, _ := net.SplitHostPort(b.Addresses().HTTP)
	assert.Equal(t, host, peer["host"])
	assert.Equal(t, port, json.Number(jsonText(peer["port"])).String())
	assert.NotEqual(t, "b", peer["name"], "the mesh needs a name that was never used before")

	a.post(t, "/prefill", `{"prompt_tokens":[1,2,3,4,5]}`)
	require.Eventually(t, func() bool {
		return b.post(t, "/reconstruct", `{"tokens":[1,2,3,4,5]}`)["coverage"] == 1.0
	}, timeout, tick)
	var text bytes.Buffer
	require.Eventually(t, func() bool { // counted once they are sent, which is after they have arrived
		text.Reset()
		a.writeMetrics(&text)
		return strings.Contains(text.String(), "membrane_peer_served_pages_total 1\n")
	}, timeout, tick)
	assert.Contains(t, text.String(), `membrane_corrupt_total{where="peer"} 0`)
	_, status := b.get(t, "/statusz")
	assert.Equal(t, "b", status["node_id"])
	_, summary := b.get(t, "/metrics.json")
	assert.Equal(t, 1.0, summary["fragment_count"])

	require.NoError(t, b.stop(t))
	require.Eventually(t, func() bool {
		_, v := a.get(t, "/peers")
		return v["peers"].([]any)[0].(map[string]any)["status"] == "left"
	}, timeout, tick, "it says goodbye")
}

// Invariant 8: a sidecar without peers, with one that never answers, or whose
// peer is gone, is ready and serves.
func TestLoneNodeServes(t *testing.T) {
	t.Parallel()
	serves := func(n *running) {
		t.Helper()
		code, _ := n.get(t, "/readyz")
		assert.Equal(t, 200, code)
		n.post(t, "/prefill", `{"prompt_tokens":[1,2,3,4,5]}`)
		assert.Equal(t, 1.0, n.post(t, "/reconstruct", `{"tokens":[1,2,3,4,5]}`)["coverage"])
		c, lease := holdLease(t, n)
		_, err := c.Release(t.Context(), kvwire.Release{Lease: lease})
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	serves(run(t, testSettings(t, "alone")))

	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never says anything
	require.NoError(t, err)
	defer func() { _ = silent.Close() }()
	s := testSettings(t, "hopeful")
	s.Peers = List{silent.Addr().String(), "127.0.0.1:1"}
	serves(run(t, s))

	s = testSettings(t, "left")
	peer := run(t, testSettings(t, "gone"))
	s.Peers = List{peer.Addresses().HTTP}
	n := run(t, s)
	status := func() any {
		_, v := n.get(t, "/peers")
		if list := v["peers"].([]any); len(list) > 0 {
			return list[0].(map[string]any)["status"]
		}
		return nil
	}
	require.Eventually(t, func() bool { return status() == "alive" }, timeout, tick)
	require.NoError(t, peer.stop(t))
	require.Eventually(t, func() bool { return status() == "left" }, timeout, tick)
	serves(n)
}

func jsonText(v any) string { b, _ := json.Marshal(v); return string(b) }

func registration() kvwire.Register {
	return kvwire.Register{
		Engine: "e", Role: kvwire.RoleBoth, InboxSlots: 2,
		Model:      kvwire.ModelFacts{WeightsID: "w", DType: "u8", RoPE: "none", Layers: 1, KVHeads: 1, HeadSize: 1},
		Descriptor: kvwire.Descriptor{Layout: "bytes", DType: "u8", BlockTokens: 64, BlockBytes: 4096, TPSize: 1, PPSize: 1, Layers: [2]int{0, 1}, Heads: [2]int{0, 1}},
	}
}

// holdLease attaches an engine that holds a lease.
func holdLease(t *testing.T, n *running) (*kvwire.Client, uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	t.Cleanup(cancel)
	c, err := kvwire.Dial(ctx, n.Addresses().EngineAddr, kvwire.ClientOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	reg, err := c.Register(ctx, registration())
	require.NoError(t, err)
	require.True(t, reg.SharedMemory, "the port leads to the socket")
	tokens := make([]byte, 64*4)
	m, err := c.Match(ctx, kvwire.Match{Tokens: tokens}, nil)
	require.NoError(t, err)
	done, err := c.Write(ctx, kvwire.PageRef{Handle: m.Handle}, make([]byte, 4096))
	require.NoError(t, err)
	require.Equal(t, kvwire.StoreStored, done.Status)
	l, err := c.Match(ctx, kvwire.Match{Tokens: tokens, LeaseMS: 60000}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, l.Pages)
	return c, l.Lease
}

func TestDrainWaitsForALease(t *testing.T) {
	t.Parallel()
	n := run(t, testSettings(t, "n"))
	c, lease := holdLease(t, n)
	n.cancel()
	require.Eventually(t, func() bool { code, _ := n.get(t, "/readyz"); return code == 503 }, timeout, tick)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	_, err := c.Match(ctx, kvwire.Match{}, nil)
	assert.Equal(t, kvwire.CodeDraining, kvwire.CodeOf(err))
	out, err := c.Release(ctx, kvwire.Release{Lease: lease})
	require.NoError(t, err)
	assert.Equal(t, kvwire.ReleaseLive, out)
	require.NoError(t, n.stop(t))
	_, err = os.Stat(n.settings.EngineSocket)
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func TestDrainEndsAtItsTimeout(t *testing.T) {
	t.Parallel()
	s := testSettings(t, "n")
	s.DrainTimeout = Seconds(100 * time.Millisecond)
	n := run(t, s)
	holdLease(t, n)
	require.NoError(t, n.stop(t))
}

func TestStopNowCutsTheDrainShort(t *testing.T) {
	t.Parallel()
	s := testSettings(t, "n")
	s.DrainTimeout = Seconds(time.Hour)
	n := run(t, s)
	holdLease(t, n)
	n.cancel()
	require.Eventually(t, func() bool { code, _ := n.get(t, "/readyz"); return code == 503 }, timeout, tick)
	n.StopNow()
	require.ErrorIs(t, n.stop(t), ErrStopped)
}

func TestFailedStartLeavesNothingOpen(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	f := func(flag string, change func(*Settings)) {
		t.Helper()
		s := testSettings(t, "n")
		change(&s)
		_, err := New(s, "test", zerolog.Nop())
		var e *SettingError
		require.ErrorAs(t, err, &e)
		assert.Equal(t, flag, e.Flag)
		_, err = os.Lstat(s.EngineSocket)
		assert.ErrorIs(t, err, os.ErrNotExist)
	}
	f("engine-addr", func(s *Settings) { s.EngineAddr, s.engineAddrIsFree = taken.Addr().String(), false })
	f("resp-addr", func(s *Settings) { s.RESPAddr = taken.Addr().String() })
	f("lm-addr", func(s *Settings) { s.LMAddr = taken.Addr().String() })
	f("port", func(s *Settings) { s.Port = taken.Addr().(*net.TCPAddr).Port })
	f("engine-socket", func(s *Settings) { s.EngineSocket = "/" + strings.Repeat("x", 200) })
	f("http-socket", func(s *Settings) { s.HTTPSocket = "/proc/nothing/s" })

	s := testSettings(t, "n") // a port that nobody asked for by name gives way
	s.EngineAddr = taken.Addr().String()
	n := run(t, s)
	assert.NotEqual(t, s.EngineAddr, n.Addresses().EngineAddr)

	s = testSettings(t, "n")
	s.DataAddr = taken.Addr().String()
	m, err := New(s, "test", zerolog.Nop())
	require.NoError(t, err)
	require.Error(t, m.Run(context.Background()))
	_, err = os.Lstat(s.EngineSocket)
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func TestRedisClients(t *testing.T) {
	t.Parallel()
	s := testSettings(t, "n")
	s.RESPAddr = "127.0.0.1:0"
	n := run(t, s)
	c, err := net.Dial("tcp", n.Addresses().RESP)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	require.NoError(t, c.SetDeadline(time.Now().Add(timeout)))
	say := func(line, want string) {
		t.Helper()
		_, err := io.WriteString(c, line+"\r\n")
		require.NoError(t, err)
		b := make([]byte, len(want))
		_, err = io.ReadFull(c, b)
		require.NoError(t, err)
		assert.Equal(t, want, string(b))
	}
	say("SET a b", "+OK\r\n")
	say("GET a", "$1\r\nb\r\n")
	res, err := client.Get("http://" + n.Addresses().HTTP + "/metrics")
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	for _, line := range []string{
		`membrane_resp_requests_total{command="get"} 1`, "membrane_resp_hits_total 1", "membrane_resp_stored_total 1",
		"membrane_resp_connections 1", `membrane_evictions_total{reason="deleted"} 0`, "membrane_cache_pages 1",
	} {
		assert.Contains(t, string(text), line+"\n")
	}
	// An idle connection holds up no drain.
	require.NoError(t, n.stop(t))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

func TestLMClients(t *testing.T) {
	t.Parallel()
	s := testSettings(t, "n")
	s.LMAddr = "127.0.0.1:0"
	n := run(t, s)
	c, err := net.Dial("tcp", n.Addresses().LM)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	require.NoError(t, c.SetDeadline(time.Now().Add(timeout)))
	ask := func(command byte, value string) {
		t.Helper()
		b := append(make([]byte, 36), fmt.Sprintf("%-150s", "model@1@0@ab@half")...)
		b[0], b[4], b[8], b[12], b[20] = command, byte(len(value)), 1, 2, 7
		_, err := c.Write(append(b, value...))
		require.NoError(t, err)
	}
	ask(1, "value")
	ask(2, "")
	got := make([]byte, 41)
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	assert.Equal(t, "\xc8\x00\x00\x00\x05\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x07", string(got[:17]))
	assert.Equal(t, "value", string(got[36:]))
	res, err := client.Get("http://" + n.Addresses().HTTP + "/metrics")
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	for _, line := range []string{
		`membrane_lm_requests_total{command="get"} 1`, "membrane_lm_hits_total 1", "membrane_lm_stored_total 1", "membrane_lm_connections 1",
	} {
		assert.Contains(t, string(text), line+"\n")
	}
	// An idle connection holds up no drain.
	require.NoError(t, n.stop(t))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

func TestHTTPOnASocketAndNoEnginePort(t *testing.T) {
	t.Parallel()
	s := testSettings(t, "n")
	s.HTTPSocket, s.EngineAddr = s.EngineSocket+".http", engineAddrOff
	n := run(t, s)
	assert.Empty(t, n.Addresses().EngineAddr)
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", s.HTTPSocket)
	}}
	res, err := (&http.Client{Transport: tr}).Get("http://n/readyz")
	require.NoError(t, err)
	_ = res.Body.Close()
	assert.Equal(t, 200, res.StatusCode)
}

func TestUserDirectory(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/1")
	dir, err := userDir()
	require.NoError(t, err)
	assert.Equal(t, "/run/user/1/membrane", dir)
	tmp := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv("TMPDIR", tmp)
	dir, err = userDir()
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o777))
	_, err = userDir()
	require.ErrorContains(t, err, "not only this user's")
	require.NoError(t, os.Remove(dir))
	require.NoError(t, os.Symlink(tmp, dir))
	_, err = userDir()
	require.ErrorContains(t, err, "not only this user's")
}
