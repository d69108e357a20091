package cache

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// Invariant 4: no slot is freed or overwritten while it is leased, pinned or
// viewed, whatever else happens: stores of many sizes, resets, expiry, lost
// clients.
func TestBytesInUseNeverChange(t *testing.T) {
	c := open(t, Config{Budget: 4 << 20})
	spaces := []*Space{space(t, c, "a"), space(t, c, "b")}
	sizes := []int{300, 5000, 40 << 10, 200 << 10}
	const keys = 150
	var bytes [keys][]byte
	for k := range bytes {
		bytes[k] = content(k, sizes[k%len(sizes)])
	}
	form := func(i int) kvwire.Form { return kvwire.Form{byte(i % 2)} }
	stop := time.Now().Add(time.Second)
	var wg sync.WaitGroup
	worker := func(seed uint64, step func(*rand.Rand)) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, 0))
			for time.Now().Before(stop) {
				step(r)
				runtime.Gosched()
			}
		})
	}
	run := func(r *rand.Rand) []kvwire.Hash {
		from := r.IntN(keys)
		return hashes(from, from+1+r.IntN(8))
	}
	for i := range 3 {
		worker(uint64(i), func(r *rand.Rand) { // stores, two shards to a page
			k := r.IntN(keys)
			sh := kvwire.Shard{Index: uint16(r.IntN(2)), Count: 2}
			_, err := spaces[r.IntN(2)].Put(sh, form(r.IntN(2)), hash(k), bytes[k])
			assert.NoError(t, err)
		})
	}
	for i := range 3 {
		worker(uint64(10+i), func(r *rand.Rand) { // leases: read twice in place
			s := spaces[r.IntN(2)]
			hs := run(r)
			s.Match(form(0), hs)
			l, locs, _, err := s.Lease(LeaseRequest{
				Form: form(r.IntN(2)), Shards: 2, Hashes: hs, Client: ClientID(i),
				TTL: time.Minute, Holders: 1, Matched: true,
			}, nil)
			if !assert.NoError(t, err) || l.ID == 0 {
				return
			}
			for range 2 {
				for _, at := range locs {
					assert.Equal(t, at.Sum, kvwire.Sum(c.Arena().Bytes(at.Offset, at.Length)))
				}
			}
			switch r.IntN(3) {
			case 0:
				assert.NoError(t, c.Cancel(l.ID))
			case 1:
				c.EndClient(ClientID(i))
			default:
				res, err := c.Release(l.ID, 0, true)
				assert.NoError(t, err)
				assert.Equal(t, ReleaseLive, res.State)
			}
		})
	}
	worker(20, func(r *rand.Rand) { // leases that expire at any moment
		l, _, _, err := spaces[0].Lease(LeaseRequest{
			Form: form(0), Shards: 2, Hashes: run(r), Client: 99,
			TTL: time.Duration(1 + r.IntN(300_000)), Holders: 1,
		}, nil)
		if assert.NoError(t, err) && l.ID != 0 && r.IntN(2) == 0 {
			_, err := c.Release(l.ID, 0, true)
			assert.NoError(t, err)
		}
	})
	worker(30, func(r *rand.Rand) { // views
		k := r.IntN(keys)
		v, _ := spaces[r.IntN(2)].View(kvwire.Shard{Index: uint16(r.IntN(2)), Count: 2}, form(0), hash(k), r.IntN(2) == 0)
		if v != nil {
			assert.Equal(t, kvwire.Sum(bytes[k]), kvwire.Sum(v.Bytes()))
			v.Close()
		}
	})
	worker(40, func(r *rand.Rand) { // slots: garbage that is given up, or a whole store
		k := r.IntN(keys)
		sl, _, err := spaces[1].Reserve(kvwire.Shard{Index: 0, Count: 2}, form(1), hash(k), int64(sizes[k%len(sizes)]))
		if !assert.NoError(t, err) || sl == nil {
			return
		}
		b := bytes[k]
		copy(sl.Bytes(), b)
		if r.IntN(2) == 0 {
			sl.Abort()
			return
		}
		sum := kvwire.Sum(b)
		sl.Publish(sum, c.auth.Sign(sl.Key(), uint64(len(b)), sum))
	})
	worker(50, func(r *rand.Rand) { // pins, resets
		if p, _, err := spaces[0].Pin(form(0), run(r), time.Minute); assert.NoError(t, err) && p.ID != 0 {
			assert.NoError(t, c.Unpin(p.ID))
		}
		if r.IntN(2000) == 0 {
			spaces[r.IntN(2)].Reset()
		}
	})
	var m mirror
	c.Subscribe(m.apply)
	wg.Wait()

	c.EndClient(99)
	settled(t, c)
	balanced(t, c)
	st := c.Stats()
	assert.Zero(t, st.Corrupt, "nothing rots by itself")
	assert.Zero(t, st.Refused[kvwire.ReasonCorrupt])
	assert.Zero(t, st.PinnedBytes)
	assert.Zero(t, st.Leases+st.Pins+st.Held)
	assert.Equal(t, c.arena.Size(), st.FreeBytes+st.ResidentBytes, "no slot leaked")
	assert.NotZero(t, st.Granted)
	for _, s := range spaces {
		s.Reset()
	}
	require.Equal(t, c.arena.Size(), c.Stats().FreeBytes)
	require.Nil(t, c.alloc.x.head.next, "one extent")
	t.Logf("%+v", st)
}
