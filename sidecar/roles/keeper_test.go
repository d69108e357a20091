package roles

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// view is the members that a keeper is told of, under test control.
type view struct {
	mu    sync.Mutex
	live  []Node
	ratio float64
	told  []State
}

func (v *view) set(live []Node, ratio float64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.live, v.ratio = live, ratio
}

// among returns members of which a is to be that.
func among(t *testing.T, want Role) ([]Node, float64) {
	t.Helper()
	for i := range 50 {
		live := nodes("a", fmt.Sprint("other", i))
		if Decide(live[0], live, 0.5).Role == want {
			return live, 0.5
		}
	}
	require.FailNow(t, "no such members")
	return nil, 0
}

// keep runs a keeper of node a in a bubble until the test ends.
func keep(t *testing.T, change func(*Config)) (*Keeper, *view) {
	t.Helper()
	v := &view{live: nodes("a"), ratio: 0.5}
	cfg := Config{
		Setting: Auto, Self: func() Node { return nodes("a")[0] },
		Live:    func() []Node { v.mu.Lock(); defer v.mu.Unlock(); return v.live },
		Ratio:   func() float64 { v.mu.Lock(); defer v.mu.Unlock(); return v.ratio },
		Publish: func(s State) { v.mu.Lock(); defer v.mu.Unlock(); v.told = append(v.told, s) },
	}
	if change != nil {
		change(&cfg)
	}
	k, err := New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); k.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return k, v
}

// pass lets virtual time go by.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestAnAnswerMustHold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k, v := keep(t, nil)
		pass(time.Hour)
		assert.Equal(t, RoleBoth, k.State().Role, "alone")

		live, ratio := among(t, RolePrefill)
		for range 5 { // a member that flaps changes nothing
			v.set(live, ratio)
			pass(29 * time.Second)
			v.set(nodes("a"), ratio)
			pass(5 * time.Second)
		}
		assert.Equal(t, RoleBoth, k.State().Role)
		assert.Empty(t, v.told)

		v.set(live, ratio)
		pass(29 * time.Second)
		assert.Equal(t, RoleBoth, k.State().Role)
		pass(3 * time.Second)
		s := k.State()
		assert.Equal(t, RolePrefill, s.Role)
		assert.True(t, s.Auto)
		assert.Contains(t, s.Why, "of 2 auto nodes")
		assert.WithinDuration(t, time.Now(), s.Since, 3*time.Second)
		assert.EqualValues(t, 1, s.Changes)
		require.Len(t, v.told, 1)
		assert.Equal(t, s, v.told[0])
	})
}

func TestAtMostOneChangeAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k, v := keep(t, func(c *Config) { c.Hold = 5 * time.Second })
		began := time.Now()
		for time.Since(began) < 10*time.Minute {
			v.set(among(t, RolePrefill))
			pass(7 * time.Second)
			v.set(among(t, RoleDecode))
			pass(7 * time.Second)
		}
		require.NotEmpty(t, v.told)
		for i, s := range v.told[1:] {
			assert.GreaterOrEqual(t, s.Since.Sub(v.told[i].Since), time.Minute)
		}
		assert.LessOrEqual(t, k.State().Changes, uint64(11))
	})
}

func TestTheOldPhaseDrainsFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k, v := keep(t, nil)
		end, err := k.Begin(Prefill)
		require.NoError(t, err)
		v.set(among(t, RoleDecode))
		pass(35 * time.Second)
		s := k.State()
		assert.Equal(t, RoleBoth, s.Role)
		assert.Equal(t, RoleDecode, s.Next)
		var refused *NotServedError
		_, err = k.Begin(Prefill)
		require.ErrorAs(t, err, &refused)
		assert.Contains(t, err.Error(), "changes from both to decode")
		endDecode, err := k.Begin(Decode)
		require.NoError(t, err)
		endDecode()
		endDecode() // counts once
		assert.Zero(t, k.InFlight(Decode))

		// The answer changes back: the old phase goes on.
		v.set(nodes("a"), 0.5)
		pass(2 * time.Second)
		again, err := k.Begin(Prefill)
		require.NoError(t, err)
		again()
		assert.Empty(t, k.State().Next)

		v.set(among(t, RoleDecode))
		pass(35 * time.Second)
		assert.Equal(t, RoleDecode, k.State().Next)
		end()
		pass(2 * time.Second)
		assert.Equal(t, RoleDecode, k.State().Role)
		assert.Empty(t, k.State().Next)
		_, err = k.Begin(Prefill)
		assert.ErrorContains(t, err, "this node's role is decode: send prefill to a node with the role prefill or both")
	})
}

func TestADrainThatDoesNotEndIsCutShort(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k, v := keep(t, func(c *Config) { c.Drain = 10 * time.Second })
		_, err := k.Begin(Prefill)
		require.NoError(t, err)
		v.set(among(t, RoleDecode))
		pass(45 * time.Second)
		assert.Equal(t, RoleDecode, k.State().Role)
	})
}

func TestFixedRolesStay(t *testing.T) {
	t.Parallel()
	k, err := New(Config{Setting: "prefill"})
	require.NoError(t, err)
	k.Run(context.Background()) // returns
	s := k.State()
	assert.Equal(t, RolePrefill, s.Role)
	assert.False(t, s.Auto)
	assert.Equal(t, "set with --role", s.Why)
	_, err = k.Begin(Decode)
	assert.ErrorContains(t, err, "role is prefill: send decode to a node with the role decode or both")
	_, err = New(Config{Setting: "worker"})
	assert.ErrorContains(t, err, "is not prefill, decode, both or auto")
	_, err = New(Config{Setting: Auto})
	assert.Error(t, err)
}
