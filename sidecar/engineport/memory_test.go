package engineport

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// onePerToken is an engine whose pages are one token each: the chains of its
// prompts are as long as they can be.
func onePerToken(t *testing.T, p *port, name string) *kvwire.Client {
	t.Helper()
	reg := registration(name)
	reg.Descriptor.BlockTokens = 1
	return attach(t, p.socket, reg)
}

func tokenPages(c *Config) { c.PageTokens = 1 }

func TestChainsAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	p := newPort(t, tokenPages)
	long := tokens(kvwire.MaxTokens/4, 0)
	fill := func(c *kvwire.Client) (handles []uint64, err error) {
		for {
			l, err := c.Match(within(t), kvwire.Match{Tokens: long, Flags: kvwire.MatchLocal}, nil)
			if err != nil {
				return handles, err
			}
			handles = append(handles, l.Handle)
			require.Less(t, len(handles), 100, "chains without end")
		}
	}
	first := onePerToken(t, p, "e1")
	handles, err := fill(first)
	wantError(t, err, kvwire.CodeBusy, "handle")
	assert.Len(t, handles, MaxEngineMemory/(len(long)/4*kvwire.HashSize)-1)
	held := p.memory.used.Load()
	_, err = first.Extend(within(t), handles[0], long)
	wantError(t, err, kvwire.CodeBusy, "handle")
	assert.Equal(t, held, p.memory.used.Load(), "a refused request changed something")

	// Another engine has room, the third none.
	second := onePerToken(t, p, "e2")
	_, err = fill(second)
	wantError(t, err, kvwire.CodeBusy, "handle")
	assert.LessOrEqual(t, p.memory.used.Load(), int64(MaxMemory))

	require.NoError(t, first.Drop(within(t), handles[0]))
	_, err = first.Match(within(t), kvwire.Match{Tokens: long, Flags: kvwire.MatchLocal}, nil)
	require.NoError(t, err, "a dropped chain made no room")
	require.NoError(t, second.Close())
	require.Eventually(t, func() bool { return p.memory.used.Load() <= MaxEngineMemory }, 5*time.Second, time.Millisecond)
}

func TestLeasesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	c := attach(t, p.socket, registration("e1"))
	m := match(t, c, kvwire.Match{Tokens: tokens(1024*64, 0)})
	store(t, c, m.Handle, 1)
	held := p.memory.used.Load()
	one, err := c.Lease(within(t), kvwire.LeaseRequest{Handle: m.Handle, Pages: 1024}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, one.Pages)
	// What a lease keeps is its own pages and not the chain's.
	assert.Equal(t, held+leaseCost(1), p.memory.used.Load())
	require.NoError(t, c.Drop(within(t), m.Handle))
	assert.Equal(t, leaseCost(1), p.memory.used.Load())
	assert.Equal(t, kvwire.ReleaseLive, release(t, c, one.Lease, false))
	assert.Zero(t, p.memory.used.Load())
}

func TestExpiredLeasesMakeRoom(t *testing.T) {
	t.Parallel()
	p := newPort(t, tokenPages)
	c := onePerToken(t, p, "e1")
	m := match(t, c, kvwire.Match{Tokens: tokens(1, 0)})
	_, err := c.Write(within(t), kvwire.PageRef{Handle: m.Handle}, make([]byte, 1024))
	require.NoError(t, err)
	short, err := c.Lease(within(t), kvwire.LeaseRequest{Handle: m.Handle, Pages: 1, LeaseMS: 1}, nil)
	require.NoError(t, err)
	require.NotZero(t, short.Lease)
	require.Eventually(t, func() bool { _, live := p.cache.LeaseClient(short.Lease); return !live }, 5*time.Second, time.Millisecond)
	p.mu.Lock()
	e := p.engines[engineKey{"public", "e1"}]
	p.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	require.Equal(t, 1, e.live)
	left := MaxEngineMemory - e.kept
	require.NoError(t, e.take("lease", left+leaseCost(1)))
	assert.Zero(t, e.live)
	e.giveBack(left + leaseCost(1))
}
