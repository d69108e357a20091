package doctor_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"membrane/engines/doctor"
	"membrane/engines/layout"
	"membrane/kvwire"
	"membrane/sidecar"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"), // sleeps ten seconds, then ends
	)
}

// start runs a sidecar until the test ends.
func start(t *testing.T, change func(*sidecar.Settings)) *sidecar.Sidecar {
	t.Helper()
	dir, err := os.MkdirTemp("", "mb")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := sidecar.DefaultSettings()
	s.NodeID, s.Port, s.Memory, s.Inbox = "n", 0, 16<<20, 4<<20
	s.EngineAddr, s.EngineSocket = "127.0.0.1:0", filepath.Join(dir, "engine.sock")
	if change != nil {
		change(&s)
	}
	n, err := sidecar.New(s, "test", zerolog.Nop())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	<-n.Ready()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
	return n
}

func examine(t *testing.T, opts doctor.Options) (string, error) {
	t.Helper()
	var out strings.Builder
	if opts.Timeout == 0 {
		opts.Timeout = 20 * time.Second
	}
	err := doctor.Run(t.Context(), opts, &out)
	return out.String(), err
}

func engine(t *testing.T, addr, id string, role kvwire.Role, change func(*kvwire.Register)) *kvwire.Client {
	t.Helper()
	r := kvwire.Register{
		Engine: id, Role: role, Model: kvwire.ModelFacts{WeightsID: "w", DType: "float32", RoPE: "none", Layers: 2, KVHeads: 2, HeadSize: 32},
		Descriptor: kvwire.Descriptor{Layout: "vllm-lbhnc", DType: "float32", BlockTokens: 16, TPSize: 1, PPSize: 1, Layers: [2]int{0, 2}, Heads: [2]int{0, 2}},
		Inline:     true,
	}
	if change != nil {
		change(&r)
	}
	if sized, err := layout.Sized(r.Model, r.Descriptor); err == nil {
		r.Descriptor = sized
	} else {
		r.Descriptor.BlockBytes = 64
	}
	c, err := kvwire.Dial(t.Context(), addr, kvwire.ClientOptions{Inline: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = c.Register(t.Context(), r)
	require.NoError(t, err)
	return c
}

func TestAllIsWell(t *testing.T) {
	n := start(t, nil)
	engine(t, n.Addresses().EngineSocket, "vllm-0", kvwire.RoleBoth, nil)
	for _, addr := range []string{n.Addresses().EngineSocket, n.Addresses().EngineAddr} {
		out, err := examine(t, doctor.Options{Addr: addr})
		require.NoError(t, err, out)
		for _, line := range []string{"node n, membrane test", "arena of 16 MiB mapped", "through shared memory", "read it inline", "layout vllm-lbnhc", `engine "vllm-0": layout vllm-lbhnc`, "no request of it has come through yet"} {
			assert.Contains(t, out, line)
		}
	}
	_, err := examine(t, doctor.Options{Addr: n.Addresses().EngineSocket, Engine: "vllm-0"})
	assert.NoError(t, err)
	_, err = examine(t, doctor.Options{Addr: n.Addresses().EngineSocket, Engine: "other"})
	assert.ErrorContains(t, err, `no engine "other" is registered`)
}

// Every page size of a sidecar has one page for the doctor.
func TestPageSizesAreNoMatter(t *testing.T) {
	n := start(t, func(s *sidecar.Settings) { s.PageTokens = 24 })
	out, err := examine(t, doctor.Options{Addr: n.Addresses().EngineSocket})
	assert.ErrorContains(t, err, "no engine is registered")
	assert.Contains(t, out, "one page of 24 tokens")
}

func TestWhatIsWrongIsSaidInOneSentence(t *testing.T) {
	n := start(t, nil)
	addr := n.Addresses().EngineSocket
	wrong := func(says string) {
		t.Helper()
		out, err := examine(t, doctor.Options{Addr: addr})
		require.ErrorContains(t, err, says, out)
		assert.NotContains(t, err.Error(), "\n")
	}
	_, err := examine(t, doctor.Options{Addr: filepath.Join(t.TempDir(), "none.sock")})
	assert.ErrorContains(t, err, "there is no engine socket at")
	_, err = examine(t, doctor.Options{Addr: "127.0.0.1:1"})
	assert.ErrorContains(t, err, "cannot reach the sidecar")

	wrong("no engine is registered")
	half := func(id string, rank int) *kvwire.Client {
		return engine(t, addr, id, kvwire.RoleWorker, func(r *kvwire.Register) {
			r.Descriptor.TPSize, r.Descriptor.TPRank, r.Descriptor.Heads = 2, rank, [2]int{rank, rank + 1}
		})
	}
	w := half("two", 0)
	wrong(`engine "two" has 1 of its 2 worker processes attached`)
	w2 := half("two", 1)
	wrong(`no scheduler`)
	require.NoError(t, w.Close())
	require.NoError(t, w2.Close())
	gone(t, addr)

	c := engine(t, addr, "swapped", kvwire.RoleBoth, func(r *kvwire.Register) { r.Descriptor.Heads = [2]int{0, 1} })
	wrong(`descriptor.heads is [0, 1), must be [0, 2)`)
	require.NoError(t, c.Close())
	gone(t, addr)

	c = engine(t, addr, "own", kvwire.RoleBoth, func(r *kvwire.Register) { r.Descriptor.Layout = "my-own" })
	wrong(`descriptor.layout is "my-own"`)
	require.NoError(t, c.Close())
	gone(t, addr)

	// The same tokens under another RoPE base.
	a := engine(t, addr, "a", kvwire.RoleBoth, nil)
	b := engine(t, addr, "b", kvwire.RoleBoth, func(r *kvwire.Register) { r.Model.RoPE = "base=1" })
	prompt := make([]byte, 64*4)
	l, err := a.Match(t.Context(), kvwire.Match{Tokens: prompt}, nil)
	require.NoError(t, err)
	_, err = a.Write(t.Context(), kvwire.PageRef{Handle: l.Handle}, make([]byte, 64*1024))
	require.NoError(t, err)
	for range 8 {
		_, err = b.Match(t.Context(), kvwire.Match{Tokens: prompt}, nil)
		require.NoError(t, err)
	}
	wrong(`engine "b" has never hit a page, mostly for the reason namespace: the same tokens are here`)
	out, err := examine(t, doctor.Options{Addr: addr})
	require.Error(t, err)
	assert.Contains(t, out, `engine "b": 0 pages hit, 8 missed (namespace 8), 0 stored`)
}

// gone waits until no engine is attached.
func gone(t *testing.T, addr string) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := examine(t, doctor.Options{Addr: addr})
		return err != nil && strings.Contains(err.Error(), "no engine is registered")
	}, 20*time.Second, 10*time.Millisecond)
}

func TestAStoppedSidecarIsSaidToBeStopped(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	_, err = examine(t, doctor.Options{Addr: l.Addr().String(), Timeout: 50 * time.Millisecond})
	assert.ErrorContains(t, err, "did not answer within 50ms")
}

// A sidecar that does not let a user in closes at once: the greeting fails, or its answer.
func TestASidecarThatHangsUpIsAskedAboutUIDs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "e.sock")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	for range 50 {
		_, err := examine(t, doctor.Options{Addr: path})
		require.ErrorContains(t, err, "in its --engine-uids")
	}
	require.NoError(t, l.Close())
	<-closed
}

func TestAKeyIsAskedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(path, []byte("sha256:"+strings.Repeat("0", 64)+":acme:engine\n"), 0o600))
	n := start(t, func(s *sidecar.Settings) { s.APIKeyFile = path })
	_, err := examine(t, doctor.Options{Addr: n.Addresses().EngineAddr})
	assert.ErrorContains(t, err, "wants an API key with the scope engine")
}
