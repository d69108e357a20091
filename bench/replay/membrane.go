package replay

import (
	"encoding/binary"
	"fmt"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// slotBytes stands for a page of KV: what a slot of the arena takes at least.
// Of small caches the pages are larger, as an arena has a least size.
const (
	slotBytes = 256
	maxSlot   = 64 << 10
)

// node is the project's cache, used as a sidecar does for its engine: the
// prefix is leased and every page of it compared with what was stored, the
// lease released, and the missing pages stored in their order.
type node struct {
	cache *cache.Cache
	space *cache.Space
	locs  []cache.Location
	hash  []kvwire.Hash
	page  []byte
	// refused counts stores that the cache refused.
	refused uint64
}

var (
	wholePage = kvwire.Shard{Index: 0, Count: 1}
	pageForm  = kvwire.Form{1}
)

func newMembrane(_ *Trace, capacity int) (policy, error) {
	page := int64(slotBytes)
	for int64(capacity)*page < cache.MinBudget {
		page *= 2
	}
	if page > maxSlot {
		return nil, fmt.Errorf("cannot replay with %d blocks: below %d", capacity, cache.MinBudget/maxSlot)
	}
	budget := int64(capacity) * page
	c, err := cache.New(cache.Config{
		// Not rounded up: the policies beside it have no more.
		Budget:        budget / 4096 * 4096,
		ExpectedPages: int64(capacity),
		// The trace is played as fast as it goes; real requests do not come
		// faster than the cache makes room.
		AllocWait: 10 * time.Second,
	})
	if err != nil {
		return nil, fmt.Errorf("cannot replay with %d blocks: %w", capacity, err)
	}
	n := &node{cache: c, page: make([]byte, page)}
	if n.space, err = c.Space("replay", kvwire.Namespace{1}); err != nil {
		return nil, err
	}
	return n, nil
}

// hashOf returns the content hash of a block.
func hashOf(block uint64) (h kvwire.Hash) {
	for i := range 4 {
		binary.LittleEndian.PutUint64(h[8*i:], mix(block+uint64(i)))
	}
	return h
}

// write fills a page with bytes that only this block has.
func write(page []byte, block uint64) {
	for i := 0; i+8 <= len(page); i += 8 {
		binary.LittleEndian.PutUint64(page[i:], mix(block^uint64(i)))
	}
}

// compare reports whether a page has the bytes that write gave it.
func compare(page []byte, block uint64) bool {
	for i := 0; i+8 <= len(page); i += 8 {
		if binary.LittleEndian.Uint64(page[i:]) != mix(block^uint64(i)) {
			return false
		}
	}
	return true
}

func (n *node) request(blocks []uint64) (held int, err error) {
	n.hash = n.hash[:0]
	for _, b := range blocks {
		n.hash = append(n.hash, hashOf(b))
	}
	if held, err = n.load(blocks); err != nil {
		return held, err
	}
	for i := held; i < len(blocks); i++ {
		write(n.page, blocks[i])
		res, err := n.space.Put(wholePage, pageForm, n.hash[i], n.page)
		if err != nil {
			return held, err
		}
		if !res.Stored && !res.Exists {
			n.refused++
		}
	}
	return held, nil
}

// load leases the held prefix, compares its bytes and releases it.
func (n *node) load(blocks []uint64) (int, error) {
	prefix, _, err := n.space.Hold(cache.LeaseRequest{
		Form: pageForm, Shards: 1, Hashes: n.hash, Client: 1, TTL: time.Minute, Holders: 1,
	}, n.locs[:0])
	if err != nil {
		return 0, err
	}
	lease, locs, _ := prefix.Lease(len(blocks))
	n.locs = locs
	if lease.Pages == 0 {
		return 0, nil
	}
	for i, at := range locs {
		if !compare(n.cache.Arena().Bytes(at.Offset, at.Length), blocks[i]) {
			return 0, fmt.Errorf("cannot load block %d of %d: it has other bytes than were stored", i, len(blocks))
		}
	}
	res, err := n.cache.Release(lease.ID, 0, false)
	if err == nil && res.State != cache.ReleaseLive {
		err = fmt.Errorf("cannot load %d blocks: their lease did not hold", lease.Pages)
	}
	return lease.Pages, err
}

func (n *node) evictions() uint64 {
	s := n.cache.Stats()
	return s.Evictions.Total()
}

func (n *node) close() error { return n.cache.Close() }
