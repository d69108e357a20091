package cache

import (
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

var (
	formA = kvwire.Form{1}
	formB = kvwire.Form{2}
	one   = kvwire.Shard{Index: 0, Count: 1}
)

// open makes a cache that is closed when the test ends.
func open(t testing.TB, cfg Config) *Cache {
	t.Helper()
	return openWith(t, cfg, newPolicy)
}

func openWith(t testing.TB, cfg Config, maker policyMaker) *Cache {
	t.Helper()
	if cfg.Budget == 0 {
		cfg.Budget = 8 << 20
	}
	if cfg.AllocWait == 0 {
		cfg.AllocWait = settleTime // a loaded machine must not fail a test
	}
	c, err := newCache(cfg, maker)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	return c
}

func space(t testing.TB, c *Cache, tenant string) *Space {
	t.Helper()
	s, err := c.Space(tenant, kvwire.Namespace{7})
	require.NoError(t, err)
	return s
}

func hash(i int) (h kvwire.Hash) {
	binary.LittleEndian.PutUint64(h[:], uint64(i))
	h[31] = 1
	return h
}

func hashes(from, to int) []kvwire.Hash {
	var hs []kvwire.Hash
	for i := from; i < to; i++ {
		hs = append(hs, hash(i))
	}
	return hs
}

// content is n bytes that depend on i throughout.
func content(i, n int) []byte {
	b := make([]byte, n)
	for k := 0; k+8 <= n; k += 8 {
		binary.LittleEndian.PutUint64(b[k:], uint64(i)*0x9e3779b97f4a7c15+uint64(k))
	}
	return b
}

// put stores page i with one shard and requires that it was stored.
func put(t testing.TB, s *Space, i, n int) {
	t.Helper()
	res, err := s.Put(one, formA, hash(i), content(i, n))
	require.NoError(t, err)
	require.True(t, res.Stored, "page %d: %+v", i, res)
}

// pass lets d go by in a synctest bubble, and what is due then happen.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

const (
	settleTime = 5 * time.Second
	settleStep = time.Millisecond
)
