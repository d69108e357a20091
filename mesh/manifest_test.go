package mesh

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// shelf keeps manifests of the tenant acme.
type shelf struct {
	mu     sync.Mutex
	bodies map[kvwire.Hash][]byte
	pulled []kvwire.Hash
	ended  chan struct{} // closed when the prefills have ended; nil: none runs
	waits  sync.WaitGroup
}

func (s *shelf) WaitManifest(ctx context.Context, tenant string, handle kvwire.Hash) []byte {
	s.waits.Add(1)
	defer s.waits.Done()
	select {
	case <-s.ended:
	case <-ctx.Done():
	}
	return s.Manifest(tenant, handle)
}

func (s *shelf) Manifest(tenant string, handle kvwire.Hash) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if tenant != "acme" {
		return nil
	}
	return s.bodies[handle]
}

func (s *shelf) Pulled(_ string, handle kvwire.Hash) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pulled = append(s.pulled, handle)
}

func testManifest(t *testing.T, node string) (kvwire.Hash, []byte) {
	t.Helper()
	m := kvwire.Manifest{Namespace: testNS, Form: testForm, PageTokens: 4, Model: "m", Node: node, Tokens: make([]byte, 40), State: []byte("s")}
	_, handle, err := m.Check()
	require.NoError(t, err)
	return handle, kvwire.AppendManifest(nil, m)
}

func all(Member) bool { return true }

func TestManifestsAreFoundAtPeers(t *testing.T) {
	t.Parallel()
	s := &shelf{bodies: map[kvwire.Hash][]byte{}}
	holder, reader := pair(t, func(c *Config) { c.Manifests = s })
	handle, body := testManifest(t, holder.Name())
	ctx := within(t, 10*time.Second)
	assert.Equal(t, FoundManifest{Asked: 1}, reader.FindManifest(ctx, "acme", handle, all))
	s.bodies[handle] = body
	assert.Equal(t, FoundManifest{Manifest: body, Asked: 1}, reader.FindManifest(ctx, "acme", handle, all))
	assert.Equal(t, FoundManifest{Asked: 1}, reader.FindManifest(ctx, "other", handle, all), "another tenant's is not found")
	assert.Equal(t, FoundManifest{}, reader.FindManifest(ctx, "acme", handle, func(m Member) bool { return m.Self }), "nobody may be asked")

	require.NoError(t, reader.ManifestPulled(ctx, holder.Name(), "acme", handle))
	assert.Equal(t, []kvwire.Hash{handle}, s.pulled)
	require.NoError(t, reader.ManifestPulled(ctx, "gone", "acme", handle))

	// A manifest under a handle that it does not have, or that is none.
	for i, wrong := range [][]byte{body, []byte("no manifest, but as long as one has to be at the least, which is some seventy bytes")} {
		other := kvwire.Hash{byte(i), 9}
		s.bodies[other] = wrong
		assert.Equal(t, FoundManifest{Asked: 1}, reader.FindManifest(ctx, "acme", other, all))
		assert.EqualValues(t, i+1, reader.Stats().Lies)
	}
	assert.Equal(t, body, reader.FindManifest(ctx, "acme", handle, all).Manifest, "the connection goes on")
}

func TestSilentPeerEndsAtTheDeadline(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	require.NoError(t, err)
	defer ln.Close()
	reader.detour(t, holder.Name(), ln.Addr().String())
	handle, _ := testManifest(t, "x")
	began := time.Now()
	got := reader.FindManifest(within(t, 200*time.Millisecond), "acme", handle, all)
	assert.Equal(t, FoundManifest{Asked: 1, Silent: 1}, got)
	assert.Less(t, time.Since(began), 5*time.Second)
}

// A node that has just made pages is asked for them although its directory,
// as far as it is known here, does not list them.
func TestFillAsksWhomItIsTold(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	p := reader.peerOf(t, holder.Name())
	hashes := testHashes("told", 6)
	put(t, holder, hashes[:4], 1, 1000)
	waitListed(t, reader, holder.Name(), hashes[:4])
	p.filter.Store(nil) // as before the news came
	req := reader.request(hashes, 1)
	req.From = holder.Name()
	n, why := reader.Fill(within(t, 10*time.Second), req)
	assert.Equal(t, 4, n)
	assert.Equal(t, kvwire.ReasonAbsent, why, "the others it does not have, and is not asked again")
	requireHeld(t, reader, hashes[:4], 1, 1000)
}

func TestManifestFramesThatAreWrong(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	for _, body := range [][]byte{nil, make([]byte, 10), append([]byte{9}, make([]byte, 34)...), kvwire.AppendManifestRequest(nil, kvwire.ManifestRequest{Tenant: string(make([]byte, kvwire.MaxTenant+1))})} {
		c, err := dialData(within(t, 10*time.Second), holder.DataAddr(), holder.Name(), reader.Name(), testKey)
		require.NoError(t, err)
		_, err = c.call(kvwire.TypeManifest, body)
		assert.NotZero(t, kvwire.CodeOf(err), "%v", err)
		c.close()
	}
	eventually(t, func() bool { return holder.Stats().BadFrames == 4 }, "they are not counted")
}
