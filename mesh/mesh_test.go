package mesh

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func alive(n *node) (names []string) {
	for _, m := range n.Members() {
		if m.Status == StatusAlive {
			names = append(names, m.Name)
		}
	}
	return names
}

func TestThreeNodesFindEachOther(t *testing.T) {
	t.Parallel()
	a := startNode(t, "a", func(c *Config) { c.Role, c.Version = "prefill", "1.2.3" })
	b := startNode(t, "b", func(c *Config) { c.Join = []string{a.GossipAddr()} })
	c := startNode(t, "c", func(c *Config) { c.Peers = []string{a.http} }) // through the HTTP listener
	for _, n := range []*node{a, b, c} {
		eventually(t, func() bool { return len(alive(n)) == 3 }, "not all members are seen")
		waitPeers(t, n, 2)
	}
	for _, m := range c.Members() {
		if m.Name != "a" {
			continue
		}
		require.Equal(t, a.GossipAddr(), m.GossipAddr)
		require.Equal(t, a.DataAddr(), m.DataAddr)
		require.Equal(t, a.http, m.HTTPAddr)
		require.Equal(t, "prefill", m.Role)
		require.Equal(t, "1.2.3", m.Version)
		require.False(t, m.Self)
		require.WithinDuration(t, time.Now(), m.Since, time.Minute)
	}
	s := c.Stats()
	require.Equal(t, 3, s.Members)
	require.Equal(t, 2, s.Peers)
}

func TestPeerIsRetriedUntilItIsThere(t *testing.T) {
	t.Parallel()
	a := startNode(t, "a", nil)
	hidden := newProxy(t, a.http)
	hidden.refuse.Store(true)
	b := startNode(t, "b", func(c *Config) { c.Peers = []string{hidden.addr} })
	eventually(t, func() bool { return b.Stats().JoinFailures >= 2 }, "no attempts")
	require.Len(t, b.Members(), 1)
	hidden.refuse.Store(false)
	eventually(t, func() bool { return len(alive(b)) == 2 }, "never joined")
}

func TestWrongClusterKeyLearnsNothingByHTTP(t *testing.T) {
	t.Parallel()
	a := startNode(t, "a", nil)
	b := startNode(t, "b", func(c *Config) { c.Peers, c.ClusterKey = []string{a.http}, []byte("another") })
	eventually(t, func() bool { return b.Stats().AuthFailures > 0 && a.Stats().AuthFailures > 0 }, "nobody refused")
	require.Len(t, a.Members(), 1)
	require.Len(t, b.Members(), 1)
}

// Gossip alone lets a node in; its data port and ours do not talk.
func TestWrongClusterKeyIsRefusedBothWays(t *testing.T) {
	t.Parallel()
	a := startNode(t, "a", nil)
	b := startNode(t, "b", func(c *Config) { c.Join, c.ClusterKey = []string{a.GossipAddr()}, []byte("another") })
	pages := testHashes("secret", 4)
	put(t, a, pages, 1, 1000)
	put(t, b, testHashes("other", 4), 1, 1000)
	eventually(t, func() bool { return a.Stats().AuthFailures > 0 && b.Stats().AuthFailures > 0 }, "nobody refused")
	for _, n := range []*node{a, b} {
		s := n.Stats()
		require.Equal(t, 1, s.Peers)
		require.Zero(t, s.DirectoryPulls)
		require.Zero(t, s.DirectoryServed)
		require.Zero(t, s.DirectoryPages)
	}
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Zero(t, got)
	require.Equal(t, kvwire.ReasonAbsent, why)
	require.Zero(t, a.Stats().Served)
}

func TestWrongGossipKeyOrClusterNameDoesNotJoin(t *testing.T) {
	t.Parallel()
	a := startNode(t, "a", func(c *Config) { c.GossipKey = []byte("0123456789abcdef") })
	for name, change := range map[string]func(*Config){
		"other-key":  func(c *Config) { c.GossipKey = []byte("fedcba9876543210") },
		"no-key":     func(c *Config) {},
		"other-mesh": func(c *Config) { c.GossipKey, c.ClusterName = []byte("0123456789abcdef"), "another" },
	} {
		b := startNode(t, name, func(c *Config) {
			change(c)
			c.Join = []string{a.GossipAddr()}
		})
		eventually(t, func() bool { return b.Stats().JoinFailures >= 2 }, "no attempts")
		require.Len(t, b.Members(), 1, name)
	}
	require.Len(t, a.Members(), 1)
	good := startNode(t, "good", func(c *Config) {
		c.GossipKey, c.Join = []byte("0123456789abcdef"), []string{a.GossipAddr()}
	})
	eventually(t, func() bool { return len(alive(good)) == 2 }, "the right key does not join")
}

func TestLeavingDropsTheDirectory(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	put(t, a, testHashes("x", 8), 1, 100)
	waitListed(t, b, "holder", testHashes("x", 8))
	require.Equal(t, 8, b.Stats().DirectoryPages)
	p := b.peerOf(t, "holder")
	a.stop()
	eventually(t, func() bool { return b.Stats().Peers == 0 }, "the peer is still there")
	require.Nil(t, p.directory())
	require.Zero(t, b.Stats().DirectoryBytes)
	eventually(t, func() bool {
		for _, m := range b.Members() {
			if m.Name == "holder" {
				return m.Status == StatusLeft
			}
		}
		return false
	}, "it is not seen as left")
}

// A node that vanishes without goodbye is out of fills at once and failed for
// all within 6 s.
func TestDeathIsBelieved(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	c := startNode(t, "third", func(c *Config) { c.Join = []string{a.GossipAddr()} })
	eventually(t, func() bool { return len(alive(b)) == 3 && len(alive(c)) == 3 }, "not all members are seen")
	waitPeers(t, b, 2)
	died := time.Now()
	s, _, _ := a.gossip.current()
	a.gossip.mu.Lock()
	a.gossip.closing = true // nothing is built anew
	a.gossip.mu.Unlock()
	require.NoError(t, s.Shutdown())
	a.data.close()
	lost := time.Now()
	eventually(t, b.peerOf(t, "holder").isDown, "still a candidate")
	require.Less(t, time.Since(lost), 500*time.Millisecond)
	for _, n := range []*node{b, c} {
		eventually(t, func() bool {
			for _, m := range n.Members() {
				if m.Name == "holder" {
					return m.Status == StatusFailed
				}
			}
			return false
		}, "not failed")
	}
	t.Logf("failed for all after %v", time.Since(died))
	require.Less(t, time.Since(died), 6*time.Second)
}

// Invariant 9: no node is a master. When the one through which all others
// joined is gone, they go on, and others join through any of them.
func TestMeshOutlivesItsFirstNode(t *testing.T) {
	t.Parallel()
	first := startNode(t, "first", nil)
	join := func(n *node) func(*Config) { return func(c *Config) { c.Join = []string{n.GossipAddr()} } }
	b, c := startNode(t, "second", join(first)), startNode(t, "third", join(first))
	for _, n := range []*node{first, b, c} {
		waitPeers(t, n, 2)
	}
	first.stop()
	for _, n := range []*node{b, c} {
		eventually(t, func() bool { return n.Stats().Peers == 1 }, "the first is still a peer")
	}
	exchange := func(from, to *node, name, chain string) {
		t.Helper()
		pages := testHashes(chain, 4)
		put(t, from, pages, 1, 1000)
		waitListed(t, to, name, pages)
		got, why := to.Fill(within(t, 10*time.Second), to.request(pages, 1))
		require.Equal(t, 4, got, why.String())
		requireHeld(t, to, pages, 1, 1000)
	}
	exchange(b, c, "second", "x")
	exchange(c, b, "third", "y")

	late := startNode(t, "late", join(c))
	waitPeers(t, late, 2)
	waitPeers(t, b, 2)
	exchange(late, b, "late", "z")
}

// Serf ends itself when it loses a vote about its name; the mesh goes on under
// another.
func TestGossipThatStopsIsBuiltAnew(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	addr := b.GossipAddr()
	s, name, _ := b.gossip.current()
	require.NoError(t, s.Shutdown())
	eventually(t, func() bool { return b.Name() != name }, "not built anew")
	require.Equal(t, uint64(1), b.Stats().Rebuilds)
	require.Equal(t, addr, b.GossipAddr())
	put(t, b, testHashes("y", 2), 1, 100)
	// a joins again: nobody but b had b's join list.
	eventually(t, func() bool {
		for _, m := range a.Members() {
			if m.Name == b.Name() && m.Status == StatusAlive {
				return true
			}
		}
		return false
	}, "it did not join again")
	waitListed(t, a, b.Name(), testHashes("y", 2))
}

func TestStartFailsOnTakenPorts(t *testing.T) {
	t.Parallel()
	a := startNode(t, "a", nil)
	for _, change := range []func(*Config){
		func(c *Config) { c.DataAddr = a.DataAddr() },
		func(c *Config) { c.GossipAddr = a.GossipAddr() },
	} {
		cfg := Config{NodeID: "b", GossipAddr: "127.0.0.1:0", DataAddr: "127.0.0.1:0", Store: a.cache}
		change(&cfg)
		m, err := New(cfg)
		require.NoError(t, err)
		require.Error(t, m.Start(context.Background()))
	}
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	a := startNode(t, "a", nil)
	good := Config{NodeID: "n", GossipAddr: "127.0.0.1:0", DataAddr: "127.0.0.1:0", Store: a.cache}
	_, err := New(good)
	require.NoError(t, err)
	for want, change := range map[string]func(*Config){
		"NodeID":                func(c *Config) { c.NodeID = "a b" },
		"NodeID \"\"":           func(c *Config) { c.NodeID = "" },
		"GossipAddr":            func(c *Config) { c.GossipAddr = "nowhere" },
		"port is not":           func(c *Config) { c.DataAddr = "127.0.0.1:70000" },
		"AdvertiseHost":         func(c *Config) { c.DataAddr = "0.0.0.0:0" },
		"GossipKey of 15 bytes": func(c *Config) { c.GossipKey = make([]byte, 15) },
		"without Store":         func(c *Config) { c.Store = nil },
		"FillTimeout":           func(c *Config) { c.FillTimeout = -1 },
		"MaxFills":              func(c *Config) { c.MaxFills = -1 },
		"ClusterName":           func(c *Config) { c.ClusterName = string(make([]byte, 256)) },
	} {
		c := good
		change(&c)
		_, err := New(c)
		require.ErrorContains(t, err, want)
	}
}

func TestTagPause(t *testing.T) {
	t.Parallel()
	require.Equal(t, 30*time.Second, tagPause(3))
	require.Equal(t, 100*time.Second, tagPause(300))
}

// A change of tags is told, but not before the pause since the last has passed.
func TestTagsChangeSlowly(t *testing.T) {
	t.Parallel()
	const pause = time.Second
	a, b := pair(t, nil)
	a.gossip.mu.Lock()
	a.gossip.pause = func(int) time.Duration { return pause }
	a.gossip.mu.Unlock()
	seen := func(want string) bool {
		for _, m := range b.Members() {
			if m.Name == "holder" {
				return m.Tags["ns"] == want && m.DataAddr == a.DataAddr()
			}
		}
		return false
	}
	a.SetTag("ns", "1")
	eventually(t, func() bool { return seen("1") }, "not told")
	told := func() time.Time {
		a.gossip.mu.Lock()
		defer a.gossip.mu.Unlock()
		return a.gossip.tagsAt
	}
	first := told()
	a.SetTag("ns", "2")
	a.SetTag("ns", "3") // told once, together
	a.SetTag("ns", "3")
	eventually(t, func() bool { return seen("3") }, "not told")
	require.GreaterOrEqual(t, told().Sub(first), pause)
}

// A peer that starts anew at its address, and asks for nobody, is found again by
// the one that was told of it, long before its next regular attempt.
func TestAPeerThatStartsAnewIsFoundSoon(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	gossip := a.GossipAddr()
	before := time.Now()
	a.stop()
	waitPeers(t, b, 0)
	startNode(t, "anew", func(c *Config) { c.GossipAddr = gossip })
	waitPeers(t, b, 1)
	require.Equal(t, "anew", b.peers.all()[0].name)
	require.Less(t, time.Since(before), joinRepeat/2)
}
