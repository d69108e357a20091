package roles_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/cache"
	"membrane/mesh"
	"membrane/sidecar/roles"
)

// member is an auto node of a real mesh, with short times.
type member struct {
	id     string
	mesh   *mesh.Mesh
	keeper *roles.Keeper
	stop   func()
}

func start(t *testing.T, id string, ratio float64, join ...string) *member {
	t.Helper()
	c, err := cache.New(cache.Config{Budget: cache.MinBudget})
	require.NoError(t, err)
	m := &member{id: id}
	m.mesh, err = mesh.New(mesh.Config{
		NodeID: id + "-x", ClusterName: t.Name(), GossipAddr: "127.0.0.1:0", DataAddr: "127.0.0.1:0", Join: join,
		TagPause: 100 * time.Millisecond, Logger: zerolog.Nop(), Store: c,
	})
	require.NoError(t, err)
	m.mesh.SetTags(map[string]string{"id": id, "auto": "1"})
	m.keeper, err = roles.New(roles.Config{
		Setting: roles.Auto, Hold: 300 * time.Millisecond, Pause: 500 * time.Millisecond, Every: 20 * time.Millisecond,
		Self: func() roles.Node { return roles.Node{ID: id, Name: m.mesh.Name()} },
		Live: func() (out []roles.Node) {
			for _, o := range m.mesh.Members() {
				if o.Tags["auto"] != "" && (o.Status == mesh.StatusAlive || o.Status == mesh.StatusSuspect) {
					out = append(out, roles.Node{ID: o.Tags["id"], Name: o.Name})
				}
			}
			return out
		},
		Ratio:   func() float64 { return ratio },
		Publish: func(s roles.State) { m.mesh.SetTags(map[string]string{"role": string(s.Role)}) },
	})
	require.NoError(t, err)
	require.NoError(t, m.mesh.Start(context.Background()))
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { m.keeper.Run(ctx) })
	m.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		end, done := context.WithTimeout(context.Background(), 10*time.Second)
		defer done()
		assert.NoError(t, m.mesh.Close(end))
		assert.NoError(t, c.Close())
	})
	t.Cleanup(m.stop)
	return m
}

// settled waits until so many of the members prefill and the others decode,
// and each member's tags say the same to the first one.
func settled(t *testing.T, members []*member, prefill int) {
	t.Helper()
	require.Eventually(t, func() bool {
		n := 0
		told := map[string]string{}
		for _, o := range members[0].mesh.Members() {
			if o.Status == mesh.StatusAlive {
				told[o.Tags["id"]] = o.Role
			}
		}
		for _, m := range members {
			s := m.keeper.State()
			if s.Role == roles.RolePrefill {
				n++
			}
			if s.Role == roles.RoleBoth && len(members) > 1 || told[m.id] != string(s.Role) {
				return false
			}
		}
		return n == prefill
	}, 20*time.Second, 20*time.Millisecond)
}

func TestNodesOfARealMeshShareThePhases(t *testing.T) {
	t.Parallel()
	members := []*member{start(t, "n0", 0.4)}
	require.Equal(t, roles.RoleBoth, members[0].keeper.State().Role)
	for i := range 4 {
		members = append(members, start(t, fmt.Sprint("n", i+1), 0.4, members[0].mesh.GossipAddr()))
	}
	settled(t, members, 2)

	// All that prefill go away: others take over.
	var left []*member
	for _, m := range members {
		if m.keeper.State().Role == roles.RolePrefill {
			m.stop()
		} else {
			left = append(left, m)
		}
	}
	settled(t, left, 1)

	// The last one alone serves both phases.
	for _, m := range left[1:] {
		m.stop()
	}
	require.Eventually(t, func() bool { return left[0].keeper.State().Role == roles.RoleBoth }, 20*time.Second, 20*time.Millisecond)
}
