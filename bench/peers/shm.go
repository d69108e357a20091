package peers

import (
	"context"
	"errors"
	"fmt"

	"membrane/kvwire"
)

// shmSlots is how many pages a stream stores at a time.
const shmSlots = 8

// shmConn is an engine on the engine socket: it copies leased pages out of the
// sidecar's arena and writes into its inbox. Every stream is an engine of its
// own, of the same model.
type shmConn struct {
	client  *kvwire.Client
	handles map[int]uint64
	leased  []kvwire.Location
	slots   []kvwire.Reservation
	done    []kvwire.Committed
}

func dialShm(ctx context.Context, socket, name string, size, slots int) (*shmConn, error) {
	client, err := kvwire.Dial(ctx, socket, kvwire.ClientOptions{Name: name, Populate: true})
	if err != nil {
		return nil, err
	}
	reg, err := client.Register(ctx, registration(name, size, slots, false))
	if err == nil && !reg.SharedMemory {
		err = errors.New("the sidecar gives no shared memory")
	}
	if err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("cannot attach to the sidecar at %q: %w", socket, err)
	}
	return &shmConn{client: client, handles: map[int]uint64{}}, nil
}

func (c *shmConn) place(ctx context.Context, key int) (uint64, uint32, error) {
	chain := key / chainPages
	handle, ok := c.handles[chain]
	if !ok {
		if len(c.handles) >= maxHandles {
			for chain, h := range c.handles {
				if err := c.client.Drop(ctx, h); err != nil {
					return 0, 0, err
				}
				delete(c.handles, chain)
			}
		}
		l, err := c.client.Match(ctx, kvwire.Match{
			DeadlineUS: engineDeadlineUS, LeaseMS: engineLeaseMS, Flags: kvwire.MatchLocal | kvwire.MatchPresence, Tokens: prompt(chain),
		}, nil)
		if err != nil {
			return 0, 0, err
		}
		handle = l.Handle
		c.handles[chain] = handle
	}
	return handle, uint32(key % chainPages), nil
}

// lease leases a run of pages.
func (c *shmConn) lease(ctx context.Context, first, n int) (kvwire.Leased, error) {
	handle, page, err := c.place(ctx, first)
	if err != nil {
		return kvwire.Leased{}, err
	}
	l, err := c.client.Lease(ctx, kvwire.LeaseRequest{
		Handle: handle, First: page, Pages: uint32(n), DeadlineUS: engineDeadlineUS, LeaseMS: engineLeaseMS, Flags: kvwire.MatchLocal,
	}, c.leased[:0])
	c.leased = l.Locations
	return l, err
}

// Get leases the run, copies it and gives the lease back, which must have held.
func (c *shmConn) Get(first int, dst [][]byte, got []bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), ioTime)
	defer cancel()
	clear(got)
	l, err := c.lease(ctx, first, len(dst))
	if err != nil || l.Lease == 0 {
		return err
	}
	arena := c.client.Arena()
	for i, at := range l.Locations {
		if at.Length != uint64(len(dst[i])) {
			return fmt.Errorf("key %d has %d bytes instead of %d", first+i, at.Length, len(dst[i]))
		}
		copy(dst[i], arena[at.Offset:at.Offset+at.Length])
		got[i] = true
	}
	return c.release(ctx, l.Lease, first)
}

func (c *shmConn) release(ctx context.Context, lease uint64, key int) error {
	outcome, err := c.client.Release(ctx, kvwire.Release{Lease: lease})
	if err == nil && outcome != kvwire.ReleaseLive {
		err = fmt.Errorf("the lease of key %d did not hold: outcome %d", key, outcome)
	}
	return err
}

// Set writes the values into inbox slots and commits them together.
func (c *shmConn) Set(first int, values [][]byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), ioTime)
	defer cancel()
	for at := 0; at < len(values); at += shmSlots {
		if err := c.store(ctx, first+at, values[at:min(at+shmSlots, len(values))]); err != nil {
			return err
		}
	}
	return nil
}

func (c *shmConn) store(ctx context.Context, first int, values [][]byte) error {
	handle, page, err := c.place(ctx, first)
	if err != nil {
		return err
	}
	refs := make([]kvwire.PageRef, len(values))
	for i := range values {
		refs[i] = kvwire.PageRef{Handle: handle, Page: page + uint32(i)}
	}
	if c.slots, err = c.client.Reserve(ctx, refs, c.slots[:0]); err != nil {
		return err
	}
	commits := make([]kvwire.Commit, 0, len(values))
	for i, s := range c.slots {
		switch s.Status {
		case kvwire.StoreExists:
		case kvwire.StoreSlot:
			copy(c.client.Slot(s.Slot), values[i])
			commits = append(commits, kvwire.Commit{PageRef: refs[i], Slot: s.Slot})
		default:
			return fmt.Errorf("key %d gets no slot: %s", first+i, s.Reason)
		}
	}
	if c.done, err = c.client.Commit(ctx, commits, c.done[:0]); err != nil {
		return err
	}
	for i, d := range c.done {
		if d.Status != kvwire.StoreStored && d.Status != kvwire.StoreExists {
			return fmt.Errorf("key %d is not stored: %s", first+int(commits[i].Page-page), d.Reason)
		}
	}
	return nil
}

// Drop forgets everything of this size.
func (c *shmConn) Drop(int, int) error {
	ctx, cancel := context.WithTimeout(context.Background(), ioTime)
	defer cancel()
	_, err := c.client.Reset(ctx)
	return err
}

// Close detaches.
func (c *shmConn) Close() error { return c.client.Close() }
