package engineport

import (
	"fmt"
	"io"

	"membrane/cache"
	"membrane/kvwire"
)

// ref is a page of a chain that a request names, resolved.
type ref struct {
	pageRef
	hash kvwire.Hash
}

// resolve finds the pages' hashes and appends them to c.refs. Field names the
// request's list.
func (c *conn) resolve(field string, i int, p kvwire.PageRef) (ref, error) {
	ch, err := c.eng.chainOf(fmt.Sprintf("%s[%d].handle", field, i), p.Handle)
	if err != nil {
		return ref{}, err
	}
	hashes := ch.hashes()
	if int64(p.Page) >= int64(len(hashes)) {
		return ref{}, kvwire.Errorf(kvwire.CodeBadField, fmt.Sprintf("%s[%d].page", field, i), "page %d is not one of the chain's %d full pages", p.Page, len(hashes))
	}
	return ref{pageRef{p.Handle, p.Page}, hashes[p.Page]}, nil
}

// stores reports whether this connection may store pages.
func (c *conn) stores() error {
	if c.role == kvwire.RoleScheduler {
		return kvwire.Errorf(kvwire.CodeBadField, "role", "a scheduler stores and reads no pages")
	}
	return nil
}

func (c *conn) handleReserve(body []byte) error {
	if err := c.stores(); err != nil {
		return err
	}
	pages, err := kvwire.ParseReserve(body, c.pages[:0])
	if err != nil {
		return err
	}
	c.pages = pages
	c.refs = c.refs[:0]
	for i, p := range pages {
		r, err := c.resolve("pages", i, p)
		if err != nil {
			return err
		}
		c.refs = append(c.refs, r)
	}
	e := c.eng
	e.state.mu.RLock()
	epoch := e.state.epoch
	e.state.mu.RUnlock()
	for _, r := range c.refs {
		answer := c.reserve(r, epoch)
		switch answer.Status {
		case kvwire.StoreExists:
			c.s.count.existing.Inc()
		case kvwire.StoreRefused:
			c.s.count.refused[answer.Reason].Inc()
			e.refused.add(answer.Reason, 1)
		}
		c.out = kvwire.AppendReservations(c.out, []kvwire.Reservation{answer})
	}
	return nil
}

func (c *conn) reserve(r ref, epoch uint64) kvwire.Reservation {
	refused := func(why kvwire.Reason) kvwire.Reservation {
		return kvwire.Reservation{Status: kvwire.StoreRefused, Reason: why}
	}
	if c.eng.odd.Load() != nil && guard.headWindow() {
		return refused(kvwire.ReasonLayout)
	}
	if c.eng.space.Has(c.eng.form, r.hash) {
		return kvwire.Reservation{Status: kvwire.StoreExists}
	}
	if c.object > c.s.cfg.Cache.Arena().Size() {
		return refused(kvwire.ReasonTooLarge)
	}
	if c.inbox == nil {
		return refused(kvwire.ReasonOverBudget)
	}
	before := len(c.inbox.reserved)
	slot, ok := c.inbox.reserve(r.pageRef, epoch)
	if !ok && c.sweepInbox() {
		slot, ok = c.inbox.reserve(r.pageRef, epoch)
	}
	c.s.slots.Add(int64(len(c.inbox.reserved) - before))
	if !ok {
		return refused(kvwire.ReasonOverBudget)
	}
	return kvwire.Reservation{Status: kvwire.StoreSlot, Slot: slot}
}

// sweepInbox gives back the slots that are reserved for chains which another
// connection of the engine has dropped, and reports whether there were any.
func (c *conn) sweepInbox() bool {
	e := c.eng
	e.mu.Lock()
	defer e.mu.Unlock()
	swept := false
	for slot, r := range c.inbox.reserved {
		if e.chains[r.handle] == nil {
			c.inbox.release(slot)
			swept = true
		}
	}
	return swept
}

func (c *conn) handleCommit(body []byte) error {
	if err := c.stores(); err != nil {
		return err
	}
	commits, err := kvwire.ParseCommits(body, c.commits[:0])
	if err != nil {
		return err
	}
	c.commits = commits
	c.refs = c.refs[:0]
	seen := make(map[uint32]struct{}, len(commits))
	for i, m := range commits {
		r, err := c.resolve("commits", i, m.PageRef)
		if err != nil {
			return err
		}
		_, twice := seen[m.Slot]
		if guard.reservedSlot() && (c.inbox == nil || twice || !c.inbox.holds(m.Slot, r.pageRef)) {
			return kvwire.Errorf(kvwire.CodeNotReserved, fmt.Sprintf("commits[%d].slot", i), "slot %d is not reserved for page %d of chain %d", m.Slot, m.Page, m.Handle)
		}
		seen[m.Slot] = struct{}{}
		c.refs = append(c.refs, r)
	}
	for i, m := range commits {
		answer, err := c.commit(c.refs[i], m.Slot)
		c.inbox.release(m.Slot)
		c.s.slots.Add(-1)
		if err != nil {
			return err
		}
		c.out = kvwire.AppendCommitted(c.out, []kvwire.Committed{answer})
	}
	return nil
}

func (c *conn) commit(r ref, slot uint32) (kvwire.Committed, error) {
	e := c.eng
	e.state.mu.RLock()
	defer e.state.mu.RUnlock()
	if c.inbox.reserved[slot].epoch != e.state.epoch {
		return c.stored(cache.PutResult{Reason: kvwire.ReasonReset}), nil
	}
	res, err := e.space.Put(c.shard, e.form, r.hash, c.inbox.bytes(slot))
	if err != nil {
		return kvwire.Committed{}, err
	}
	return c.stored(res), nil
}

// stored counts what became of a store and puts it into an answer.
func (c *conn) stored(res cache.PutResult) kvwire.Committed {
	switch {
	case res.Stored:
		c.s.count.storedPages.Inc()
		c.eng.stored.Add(1)
		c.s.count.storedBytes.AddInt64(c.object)
		return kvwire.Committed{Status: kvwire.StoreStored, Sum: res.Sum}
	case res.Exists:
		c.s.count.existing.Inc()
		return kvwire.Committed{Status: kvwire.StoreExists, Sum: res.Sum}
	}
	c.eng.refused.add(res.Reason, 1)
	if n := c.s.count.refused[res.Reason]; n != nil {
		n.Inc()
	}
	return kvwire.Committed{Status: kvwire.StoreRefused, Reason: res.Reason}
}

// handleWrite receives a page straight into the arena. Whatever is wrong with
// it, its bytes are read, so that the next frame is found.
func (c *conn) handleWrite(h kvwire.Header) error {
	if h.Length < kvwire.WriteHeaderSize {
		return closing{kvwire.Errorf(kvwire.CodeBadFrame, "length", "a write frame of %d bytes has no header", h.Length)}
	}
	c.hurry(int(h.Length))
	defer c.relax()
	var b [kvwire.WriteHeaderSize]byte
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return closing{err}
	}
	length := int64(h.Length) - kvwire.WriteHeaderSize
	slot, answer, err := c.openWrite(b[:], length)
	if slot != nil {
		defer c.s.receiving.give(length)
	}
	if slot == nil {
		if _, e := io.CopyN(io.Discard, c.r, length); e != nil {
			return closing{e}
		}
		if err != nil {
			return err
		}
	} else {
		if _, err := io.ReadFull(c.r, slot.Bytes()); err != nil {
			slot.Abort()
			return closing{err}
		}
		sum := kvwire.Sum(slot.Bytes())
		answer = slot.Publish(sum, c.s.auth.Sign(slot.Key(), uint64(length), sum))
	}
	var begin int
	c.out, begin = kvwire.BeginFrame(c.out[:0], kvwire.TypeWrite|kvwire.AnswerBit, h.ID)
	c.out = kvwire.EndFrame(kvwire.AppendCommitted(c.out, []kvwire.Committed{c.stored(answer)}), begin)
	return nil
}

// openWrite returns room in the arena for a page, or none with the answer or
// error instead.
func (c *conn) openWrite(header []byte, length int64) (*cache.Slot, cache.PutResult, error) {
	fail := func(err error) (*cache.Slot, cache.PutResult, error) { return nil, cache.PutResult{}, err }
	switch {
	case !c.greeted:
		return fail(kvwire.Errorf(kvwire.CodeUnauthorized, "key", "say hello first"))
	case c.eng == nil:
		return fail(kvwire.Errorf(kvwire.CodeNotRegistered, "", "write needs a registered connection"))
	case c.s.draining.Load():
		return fail(kvwire.Errorf(kvwire.CodeDraining, "", "the sidecar is stopping"))
	}
	if err := c.stores(); err != nil {
		return fail(err)
	}
	page, err := kvwire.ParseWriteHeader(header)
	if err != nil {
		return fail(err)
	}
	r, err := c.resolve("pages", 0, page)
	if err != nil {
		return fail(err)
	}
	if length != c.object {
		return fail(kvwire.Errorf(kvwire.CodeBadField, "length", "an object of %d bytes instead of %d", length, c.object))
	}
	if c.eng.odd.Load() != nil && guard.headWindow() {
		return nil, cache.PutResult{Reason: kvwire.ReasonLayout}, nil
	}
	// What is being received cannot be evicted, and its engine may be slow.
	if !c.s.receiving.takeFirst(length) {
		return nil, cache.PutResult{Reason: kvwire.ReasonOverBudget}, nil
	}
	slot, answer, err := c.eng.space.Reserve(c.shard, c.eng.form, r.hash, length)
	if slot == nil {
		c.s.receiving.give(length)
	}
	return slot, answer, err
}

// handleReset drops the namespace's pages. Stores that were reserved before
// are refused when they are committed.
func (c *conn) handleReset(body []byte) error {
	if len(body) > 0 {
		return kvwire.Errorf(kvwire.CodeBadFrame, "reset", "%d bytes follow the message", len(body))
	}
	e := c.eng
	e.state.mu.Lock()
	e.state.epoch++
	pages := e.space.Reset()
	e.state.mu.Unlock()
	c.s.cfg.Log.Info().Str("engine", e.key.name).Int("pages", pages).Msg("engine dropped its namespace")
	return c.answerJSON(kvwire.ResetAnswer{Pages: pages})
}
