package embedded

import (
	"context"
	"errors"
	"fmt"
	"time"

	"membrane/engines/llama"
	"membrane/kvwire"
)

// load fills kv with what the sidecar has leased and returns the handle of the
// prompt's chain, 0 without a sidecar. Pages count only if the lease was live
// until they were copied. One absolute deadline bounds all of it but the copy
// out of shared memory, which nothing can hold up.
func (e *Engine) load(ctx context.Context, req Request, kv *llama.KV, res *Result) (handle uint64) {
	res.Reason = kvwire.ReasonUnreachable
	if e.session == nil {
		return 0
	}
	began := time.Now()
	until := began.Add(e.cfg.Deadline)
	if !guard.loadDeadline() {
		until = until.Add(3 * e.cfg.Deadline)
	}
	err := e.session.Use(func(c *kvwire.Client, reg kvwire.Registered) error {
		l, err := e.match(ctx, c, req, until)
		if err != nil {
			return err
		}
		handle = l.Handle
		res.Reason, res.FromPeers = l.Reason, int(l.FromPeers)
		if l.Lease == 0 {
			return nil
		}
		copyErr := e.copyIn(ctx, c, reg, l, kv, until)
		live, err := e.release(ctx, c, l.Lease, until)
		if err != nil || !live || copyErr != nil {
			res.Reason = kvwire.ReasonExpired
			if err := kv.Truncate(0); err != nil {
				return err
			}
		}
		return errors.Join(copyErr, err)
	})
	res.Load = time.Since(began)
	if err != nil && !errors.Is(err, errDetached) {
		e.cfg.Log.Warn().Err(err).Msg("prompt not loaded")
	}
	return handle
}

func (e *Engine) match(ctx context.Context, c *kvwire.Client, req Request, until time.Time) (kvwire.Leased, error) {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	// The answer may take all the time that it is given; then it has to be
	// read, copied and released.
	return c.Match(ctx, kvwire.Match{
		DeadlineUS: uint32(max(time.Until(until)*4/5, 0).Microseconds()), LeaseMS: uint32(e.cfg.Lease.Milliseconds()),
		Scope: kvwire.Scope{CacheSalt: req.CacheSalt}, Tokens: wire(req.Tokens),
	}, nil)
}

// release gives the lease back. A copy that went beyond the deadline has to be
// told, too, so a tenth of the deadline is left for it in any case.
func (e *Engine) release(ctx context.Context, c *kvwire.Client, lease uint64, until time.Time) (live bool, err error) {
	if least := time.Now().Add(e.cfg.Deadline / 10); until.Before(least) {
		until = least
	}
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	outcome, err := c.Release(ctx, kvwire.Release{Lease: lease, Verify: e.cfg.Verify})
	return err == nil && outcome == kvwire.ReleaseLive, err
}

// copyIn copies leased pages into kv, each a whole number of the engine's
// blocks.
func (e *Engine) copyIn(ctx context.Context, c *kvwire.Client, reg kvwire.Registered, l kvwire.Leased, kv *llama.KV, until time.Time) error {
	arena := c.Arena()
	if arena == nil {
		return e.readInline(ctx, c, reg, l, kv, until)
	}
	for _, loc := range l.Locations {
		end := loc.Offset + loc.Length
		if loc.Length != uint64(reg.ObjectBytes) || end < loc.Offset || end > uint64(len(arena)) {
			return fmt.Errorf("cannot load a page at %d of %d bytes: it is not one of ours", loc.Offset, loc.Length)
		}
		if err := e.loadObject(kv, arena[loc.Offset:end]); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) readInline(ctx context.Context, c *kvwire.Client, reg kvwire.Registered, l kvwire.Leased, kv *llama.KV, until time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	pages := make([][]byte, l.Pages)
	err := c.Read(ctx, kvwire.Read{Lease: l.Lease, Pages: l.Pages}, func(i int, length int64) []byte {
		if length != reg.ObjectBytes {
			return nil
		}
		pages[i] = make([]byte, length)
		return pages[i]
	})
	for i := 0; err == nil && i < len(pages); i++ {
		err = e.loadObject(kv, pages[i])
	}
	return err
}

func (e *Engine) loadObject(kv *llama.KV, object []byte) error {
	block := e.cfg.Model.PageBytes(e.cfg.BlockTokens)
	for len(object) >= block {
		if err := kv.LoadPage(kv.Len()/e.cfg.BlockTokens, object[:block]); err != nil {
			return fmt.Errorf("cannot load a page: %w", err)
		}
		object = object[block:]
	}
	return nil
}

// store publishes the full pages that were computed here and returns how many
// the sidecar took.
func (e *Engine) store(ctx context.Context, handle uint64, prompt, generated []uint32, kv *llama.KV, loaded int) (stored int) {
	if handle == 0 {
		return 0
	}
	err := e.session.Use(func(c *kvwire.Client, reg kvwire.Registered) error {
		if computed := kv.Len() - len(prompt); computed > 0 {
			if err := e.extend(ctx, c, handle, generated[:computed]); err != nil {
				return err
			}
		}
		// A page that was loaded in part only is whole now.
		first, end := loaded/reg.PageTokens, kv.Len()/reg.PageTokens
		for first < end {
			n := min(end-first, max(reg.InboxSlots, 1))
			took, err := e.storeBatch(ctx, c, reg, handle, first, n, kv)
			stored += took
			if err != nil {
				return err
			}
			first += n
		}
		return nil
	})
	if err != nil && !errors.Is(err, errDetached) {
		e.cfg.Log.Warn().Err(err).Int("stored", stored).Msg("pages not stored")
	}
	return stored
}

func (e *Engine) extend(ctx context.Context, c *kvwire.Client, handle uint64, tokens []uint32) error {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.Deadline)
	defer cancel()
	_, err := c.Extend(ctx, handle, wire(tokens))
	return err
}

// storeTimeout bounds the store of one batch. It comes after the answer, so
// nobody waits for it but the next request.
const storeTimeout = 2 * time.Second

func (e *Engine) storeBatch(ctx context.Context, c *kvwire.Client, reg kvwire.Registered, handle uint64, first, n int, kv *llama.KV) (stored int, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	if reg.InboxSlots == 0 {
		return e.writeInline(ctx, c, reg, handle, first, n, kv)
	}
	refs := make([]kvwire.PageRef, n)
	for i := range refs {
		refs[i] = kvwire.PageRef{Handle: handle, Page: uint32(first + i)}
	}
	slots, err := c.Reserve(ctx, refs, nil)
	if err != nil {
		return 0, err
	}
	var commits []kvwire.Commit
	for i, s := range slots {
		if s.Status != kvwire.StoreSlot {
			continue
		}
		if err := e.readObject(kv, reg, first+i, c.Slot(s.Slot)); err != nil {
			return 0, err
		}
		commits = append(commits, kvwire.Commit{PageRef: refs[i], Slot: s.Slot})
	}
	if len(commits) == 0 {
		return 0, nil
	}
	done, err := c.Commit(ctx, commits, nil)
	for _, d := range done {
		if d.Status == kvwire.StoreStored {
			stored++
		}
	}
	return stored, err
}

func (e *Engine) writeInline(ctx context.Context, c *kvwire.Client, reg kvwire.Registered, handle uint64, first, n int, kv *llama.KV) (stored int, err error) {
	object := make([]byte, reg.ObjectBytes)
	for i := range n {
		if err := e.readObject(kv, reg, first+i, object); err != nil {
			return stored, err
		}
		done, err := c.Write(ctx, kvwire.PageRef{Handle: handle, Page: uint32(first + i)}, object)
		if err != nil {
			return stored, err
		}
		if done.Status == kvwire.StoreStored {
			stored++
		}
	}
	return stored, nil
}

// readObject copies page i out of kv, block by block.
func (e *Engine) readObject(kv *llama.KV, reg kvwire.Registered, i int, object []byte) error {
	block := e.cfg.Model.PageBytes(e.cfg.BlockTokens)
	if int64(len(object)) != reg.ObjectBytes {
		return fmt.Errorf("cannot store page %d: a slot of %d bytes instead of %d", i, len(object), reg.ObjectBytes)
	}
	perPage := reg.PageTokens / e.cfg.BlockTokens
	for b := range perPage {
		if err := kv.ReadPage(object[b*block:(b+1)*block], i*perPage+b); err != nil {
			return fmt.Errorf("cannot store page %d: %w", i, err)
		}
	}
	return nil
}

func (e *Engine) drop(ctx context.Context, handle uint64) {
	if handle == 0 {
		return
	}
	// Also when the request was given up: its pins must not stay.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.cfg.Deadline)
	defer cancel()
	_ = e.session.Use(func(c *kvwire.Client, _ kvwire.Registered) error { return c.Drop(ctx, handle) })
}
