package mesh

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

type followed struct {
	pages int
	why   kvwire.Reason
}

// follow runs a Follow and returns what it told of, and its end.
func (n *node) follow(ctx context.Context, req FillRequest) (told chan int, end chan followed) {
	told, end = make(chan int, len(req.Hashes)+1), make(chan followed, 1)
	go func() {
		pages, why := n.Follow(ctx, req, func(pages int) { told <- pages })
		end <- followed{pages, why}
	}()
	return told, end
}

func receive[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(15 * time.Second):
		require.FailNow(t, "nothing came")
	}
	panic("unreachable")
}

func TestFollowTakesPagesAsTheyAreMade(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	hashes := testHashes("chain", 6)
	put(t, reader, hashes[:1], 2, 500) // the first is here already
	req := reader.request(hashes, 2)
	req.From = holder.Name()
	told, end := reader.follow(within(t, 30*time.Second), req)
	assert.Equal(t, 1, receive(t, told))
	for i := 1; i < 5; i++ {
		put(t, holder, hashes[i:i+1], 2, 500)
		assert.Equal(t, i+1, receive(t, told), "a page is here before the next is made")
	}
	// A page of which one shard is missing is none yet.
	_, err := holder.space.Put(kvwire.Shard{Index: 0, Count: 2}, testForm, hashes[5], payload(hashes[5], 0, 500))
	require.NoError(t, err)
	assert.Empty(t, end)
	_, err = holder.space.Put(kvwire.Shard{Index: 1, Count: 2}, testForm, hashes[5], payload(hashes[5], 1, 500))
	require.NoError(t, err)
	assert.Equal(t, 6, receive(t, told))
	assert.Equal(t, followed{6, kvwire.ReasonNone}, receive(t, end))
	requireHeld(t, reader, hashes, 2, 500)
	assert.EqualValues(t, 5, reader.Stats().Followed)
	eventually(t, func() bool { return holder.data.waits.Load() == 0 }, "a wait is left")
}

// A page behind one that is not there yet is not taken, and neither is one that
// the directory lists at another peer only.
func TestFollowKeepsTheOrder(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	hashes := testHashes("order", 3)
	put(t, holder, hashes[1:], 1, 100)
	req := reader.request(hashes, 1)
	req.From = holder.Name()
	told, end := reader.follow(within(t, 30*time.Second), req)
	eventually(t, func() bool { return holder.data.waits.Load() == 1 }, "nothing waits")
	assert.Empty(t, told)
	put(t, holder, hashes[:1], 1, 100)
	assert.Equal(t, followed{3, kvwire.ReasonNone}, receive(t, end))
}

func TestFollowEndsWithItsContextAndItsPeer(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	hashes := testHashes("never", 2)
	req := reader.request(hashes, 1)
	req.From = holder.Name()

	began := time.Now()
	_, end := reader.follow(within(t, 200*time.Millisecond), req)
	assert.Equal(t, followed{0, kvwire.ReasonDeadline}, receive(t, end))
	assert.Less(t, time.Since(began), 5*time.Second)

	ctx, cancel := context.WithCancel(within(t, time.Minute))
	_, end = reader.follow(ctx, req)
	eventually(t, func() bool { return holder.data.waits.Load() == 1 }, "nothing waits")
	cancel()
	assert.Equal(t, followed{0, kvwire.ReasonDeadline}, receive(t, end))
	eventually(t, func() bool { return holder.data.waits.Load() == 0 }, "the peer does not notice that nobody waits any more")

	// One page comes, then the peer goes away.
	put(t, holder, hashes[:1], 1, 100)
	told, end := reader.follow(within(t, time.Minute), req)
	assert.Equal(t, 1, receive(t, told))
	eventually(t, func() bool { return holder.data.waits.Load() == 1 }, "nothing waits")
	holder.stop()
	assert.Equal(t, followed{1, kvwire.ReasonPeer}, receive(t, end))

	req.From = "nobody"
	_, end = reader.follow(within(t, time.Minute), req)
	assert.Equal(t, followed{1, kvwire.ReasonPeer}, receive(t, end))
}

func TestFollowGivesUpOnAPeerThatDoesNotGive(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	hashes := testHashes("long", 2)
	put(t, holder, hashes, 1, 100)
	req := reader.request(hashes, 1)
	req.From, req.ObjectBytes = holder.Name(), []int64{99} // it has others
	_, end := reader.follow(within(t, time.Minute), req)
	got := receive(t, end)
	assert.Equal(t, 0, got.pages)
	assert.NotEqual(t, kvwire.ReasonNone, got.why)
	assert.NotEqual(t, kvwire.ReasonDeadline, got.why)
}

func TestAwaitsHaveALimit(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	holder.data.waits.Store(maxWaits)
	p := reader.peerOf(t, holder.Name())
	began := time.Now()
	n, err := p.await(within(t, time.Minute), reader.request(nil, 1), testHashes("x", 1))
	require.NoError(t, err)
	assert.Zero(t, n)
	assert.Less(t, time.Since(began), 10*time.Second, "it is answered at once")
	assert.EqualValues(t, maxWaits, holder.data.waits.Load())

	_, err = p.await(within(t, time.Minute), reader.request(nil, 1), testHashes("x", kvwire.MaxAwait+1))
	assert.Equal(t, kvwire.CodeTooLarge, kvwire.CodeOf(err), "%v", err)
}

func TestManifestsAreWaitedFor(t *testing.T) {
	t.Parallel()
	s := &shelf{bodies: map[kvwire.Hash][]byte{}, ended: make(chan struct{})}
	holder, reader := pair(t, func(c *Config) { c.Manifests = s })
	handle, running := testManifest(t, holder.Name())
	m, err := kvwire.ParseManifest(running)
	require.NoError(t, err)
	m.Created = 1000
	done := kvwire.AppendManifest(nil, m)
	s.bodies[handle] = running

	_, err = reader.WaitManifest(within(t, 100*time.Millisecond), holder.Name(), "acme", handle)
	assert.Error(t, err)
	type answer struct {
		body []byte
		err  error
	}
	ask := func() chan answer {
		out := make(chan answer, 1)
		go func() {
			b, err := reader.WaitManifest(within(t, time.Minute), holder.Name(), "acme", handle)
			out <- answer{b, err}
		}()
		return out
	}
	got := ask()
	eventually(t, func() bool { return holder.data.waits.Load() == 1 }, "nothing waits")
	s.mu.Lock()
	s.bodies[handle] = done
	s.mu.Unlock()
	close(s.ended)
	assert.Equal(t, answer{done, nil}, receive(t, got))

	s.mu.Lock()
	delete(s.bodies, handle)
	s.mu.Unlock()
	assert.Equal(t, answer{}, receive(t, ask()), "the prefill came to nothing")
	_, err = reader.WaitManifest(within(t, time.Minute), "nobody", "acme", handle)
	assert.ErrorIs(t, err, errNoPeer)
	s.waits.Wait()
}

func TestQueuesAreTold(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, func(c *Config) { c.Queues = func() (int, int) { return 7, -1 } })
	q, err := reader.QueuesOf(within(t, 10*time.Second), holder.Name())
	require.NoError(t, err)
	assert.Equal(t, Queues{Prefill: 7}, q)
	_, err = reader.QueuesOf(within(t, 10*time.Second), "nobody")
	assert.ErrorIs(t, err, errNoPeer)
}
