package sidecar

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/roles"
)

// storeSalted attaches an engine to a node and stores the pages of a prompt
// under a salt, from the page first on.
func storeSalted(t *testing.T, n *running, salt string, tokens []uint32, first int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err := kvwire.Dial(ctx, n.Addresses().EngineAddr, kvwire.ClientOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = c.Register(ctx, registration())
	require.NoError(t, err)
	var b []byte
	for _, id := range tokens {
		b = append(b, byte(id), byte(id>>8), 0, 0)
	}
	m, err := c.Match(ctx, kvwire.Match{Tokens: b, Scope: kvwire.Scope{CacheSalt: &salt}}, nil)
	require.NoError(t, err)
	for page := first; page < len(tokens)/64; page++ {
		done, err := c.Write(ctx, kvwire.PageRef{Handle: m.Handle, Page: uint32(page)}, []byte(strings.Repeat(string(rune('a'+page)), 4096)))
		require.NoError(t, err)
		require.Equal(t, kvwire.StoreStored, done.Status)
	}
}

func promptIDs(n int) (out []uint32) {
	for i := range n {
		out = append(out, uint32(i))
	}
	return out
}

func TestPrefixIsHereAtAPeerOrFetched(t *testing.T) {
	t.Parallel()
	a := run(t, testSettings(t, "a"))
	s := testSettings(t, "b")
	s.Peers = List{a.Addresses().HTTP}
	b := run(t, s)
	p := &prompts{b.Sidecar}
	tokens := promptIDs(64*5 + 10)
	assert.Nil(t, p.Prefix("s", tokens), "no engine has registered")

	storeSalted(t, a, "s", tokens, 0)
	storeSalted(t, b, "s", tokens[:64], 0)
	peer := a.mesh.Name()
	require.Eventually(t, func() bool { return p.Prefix("s", tokens).At(peer) == 320 }, timeout, tick, "the directory tells")
	found := p.Prefix("s", tokens)
	assert.Equal(t, 64, found.Here())
	assert.Zero(t, found.At("nobody"))
	assert.Zero(t, p.Prefix("another", tokens).At(peer), "salts do not share")
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	assert.Equal(t, 320, found.Fetch(ctx, peer))
	assert.Equal(t, 320, p.Prefix("s", tokens).Here())
	assert.False(t, p.PinsFull())

	// Pages that come while they are waited for; those that do not end the wait.
	late := promptIDs(64 * 6)
	began := time.Now()
	assert.Equal(t, 320, p.Prefix("s", late).Fetch(ctx, peer))
	assert.GreaterOrEqual(t, time.Since(began), fetchSilent)
	got := make(chan int, 1)
	waits := p.Prefix("s", late)
	go func() { got <- waits.Fetch(ctx, peer) }()
	storeMore(t, a, late)
	assert.Equal(t, 384, <-got)
	cancelled, end := context.WithCancel(ctx)
	end()
	assert.Equal(t, 384, p.Prefix("s", promptIDs(64*7)).Fetch(cancelled, peer))
}

// storeMore stores the last page of a longer prompt through a second engine of
// the same model.
func storeMore(t *testing.T, n *running, tokens []uint32) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err := kvwire.Dial(ctx, n.Addresses().EngineAddr, kvwire.ClientOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	reg := registration()
	reg.Engine = "second"
	_, err = c.Register(ctx, reg)
	require.NoError(t, err)
	var b []byte
	for _, id := range tokens {
		b = append(b, byte(id), byte(id>>8), 0, 0)
	}
	salt := "s"
	m, err := c.Match(ctx, kvwire.Match{Tokens: b, Scope: kvwire.Scope{CacheSalt: &salt}}, nil)
	require.NoError(t, err)
	_, err = c.Write(ctx, kvwire.PageRef{Handle: m.Handle, Page: uint32(len(tokens)/64 - 1)}, make([]byte, 4096))
	require.NoError(t, err)
	assert.Len(t, n.engines.Models(), 1, "engines that share pages are one model")
}

func TestServingPodsAreThoseOfTheMesh(t *testing.T) {
	t.Parallel()
	members := []mesh.Member{
		{Name: "self", Self: true, Status: mesh.StatusAlive, Tags: map[string]string{tagServe: "h:1"}},
		{Name: "p", Role: "prefill", Status: mesh.StatusAlive, Tags: map[string]string{tagServe: "h:2"}},
		{Name: "suspect", Role: "prefill", Status: mesh.StatusSuspect, Tags: map[string]string{tagServe: "h:3"}},
		{Name: "down", Status: mesh.StatusAlive, Down: true, Tags: map[string]string{tagServe: "h:4"}},
		{Name: "failed", Status: mesh.StatusFailed, Tags: map[string]string{tagServe: "h:5"}},
		{Name: "leaving", Status: mesh.StatusAlive, Tags: map[string]string{tagServe: ""}},
		{Name: "odd", Status: mesh.StatusAlive, Tags: map[string]string{tagServe: "h:x"}},
		{Name: "none", Status: mesh.StatusAlive},
	}
	asked := 0
	pods := &servingPods{members: func() []mesh.Member { asked++; return members }}
	list := pods.list()
	require.Len(t, list, 3)
	assert.Equal(t, "h:2", list[0].Addr)
	assert.Equal(t, roles.RolePrefill, list[0].Role)
	assert.False(t, list[0].Suspect)
	assert.True(t, list[1].Suspect)
	assert.True(t, list[2].Suspect)
	pods.list()
	assert.Equal(t, 1, asked, "the list is kept for a moment")
}

func TestServingPortServesAndDrains(t *testing.T) {
	t.Parallel()
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"data":[]}`) }))
	defer engine.Close()
	s := testSettings(t, "n")
	s.ServePort, s.EngineURL = 0, engine.URL
	n := run(t, s)
	get := func() int {
		res, err := client.Get("http://" + n.Addresses().Serve + "/health")
		require.NoError(t, err)
		_ = res.Body.Close()
		return res.StatusCode
	}
	assert.Equal(t, 200, get())
	tag := func() string {
		for _, m := range n.mesh.Members() {
			if m.Self {
				return m.Tags[tagServe]
			}
		}
		return ""
	}
	assert.Equal(t, n.Addresses().Serve, tag(), "peers are told")
	n.post(t, "/drain", "")
	assert.Equal(t, 503, get())
	require.NoError(t, n.stop(t))
}
