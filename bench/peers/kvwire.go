package peers

import (
	"context"
	"encoding/json"
	"fmt"

	"membrane/kvwire"
)

// frames exchanges kvwire frames over a link, with one request under way
// except where a method says otherwise. It checks no payload: the loop does.
type frames struct {
	*link
	id uint32
	in []byte
}

// add appends a request.
func (f *frames) add(t kvwire.Type, body func([]byte) []byte) {
	f.id++
	var begin int
	f.out, begin = appendFrame(f.out, t, f.id)
	f.out = kvwire.EndFrame(body(f.out), begin)
}

func appendFrame(b []byte, t kvwire.Type, id uint32) ([]byte, int) {
	return kvwire.BeginFrame(b, t, id)
}

// answer reads the body of the answer to request id; it is valid until the
// next.
func (f *frames) answer(t kvwire.Type, id uint32) ([]byte, error) {
	h, err := kvwire.ReadHeader(f.r)
	if err != nil {
		return nil, err
	}
	return f.body(h, t, id)
}

func (f *frames) body(h kvwire.Header, t kvwire.Type, id uint32) ([]byte, error) {
	body, err := kvwire.ReadBody(f.r, h, f.in)
	if err != nil {
		return nil, err
	}
	f.in = body
	if h.Type == kvwire.TypeError|kvwire.AnswerBit {
		e, err := kvwire.ParseError(body)
		if err != nil {
			return nil, err
		}
		return nil, e
	}
	if h.Type != t|kvwire.AnswerBit || h.ID != id {
		return nil, fmt.Errorf("a %s frame with id %d instead of an answer to %s, %d", h.Type, h.ID, t, id)
	}
	return body, nil
}

// call exchanges one request.
func (f *frames) call(t kvwire.Type, body []byte) ([]byte, error) {
	f.begin()
	f.add(t, func(b []byte) []byte { return append(b, body...) })
	if err := f.flush(); err != nil {
		return nil, err
	}
	return f.answer(t, f.id)
}

// page reads one page frame of the answer to request id into dst. It returns
// false where the page is missed.
func (f *frames) page(id, index uint32, dst []byte) (bool, error) {
	h, err := kvwire.ReadHeader(f.r)
	if err != nil {
		return false, err
	}
	if h.Type != kvwire.TypePage || h.ID != id {
		_, err := f.body(h, kvwire.TypePage, id)
		return false, fmt.Errorf("a %s frame instead of page %d: %w", h.Type, index, err)
	}
	var b [kvwire.PageHeaderSize]byte
	if err := f.full(b[:]); err != nil {
		return false, err
	}
	p, err := kvwire.ParsePageHeader(b[:], h)
	if err != nil {
		return false, err
	}
	if p.Reason != kvwire.ReasonNone {
		return false, nil
	}
	if p.Index != index || p.Length != uint64(len(dst)) {
		return false, fmt.Errorf("page %d of %d bytes instead of page %d of %d", p.Index, p.Length, index, len(dst))
	}
	return true, f.full(dst)
}

// engineConn is an engine's connection over TCP: pages travel inline. Every
// stream is an engine of its own, of the same model.
type engineConn struct {
	frames
	handles map[int]uint64
	leased  []kvwire.Location
}

func dialEngine(ctx context.Context, addr, name string, size int) (*engineConn, error) {
	l, err := dialLink(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &engineConn{frames: frames{link: l}, handles: map[int]uint64{}}
	for _, m := range []struct {
		t    kvwire.Type
		body any
	}{{kvwire.TypeHello, kvwire.Hello{Client: name}}, {kvwire.TypeRegister, registration(name, size, 0, true)}} {
		b, err := json.Marshal(m.body)
		if err == nil {
			_, err = c.call(m.t, b)
		}
		if err != nil {
			_ = l.Close()
			return nil, fmt.Errorf("cannot attach to the sidecar at %q: %w", addr, err)
		}
	}
	return c, nil
}

// page returns where a key's page is.
func (c *engineConn) place(key int) (handle uint64, page uint32, err error) {
	chain := key / chainPages
	handle, ok := c.handles[chain]
	if !ok {
		if len(c.handles) >= maxHandles {
			for chain, h := range c.handles {
				if _, err := c.call(kvwire.TypeDrop, kvwire.AppendHandle(nil, h)); err != nil {
					return 0, 0, err
				}
				delete(c.handles, chain)
			}
		}
		body, err := c.call(kvwire.TypeMatch, kvwire.AppendMatch(nil, kvwire.Match{
			DeadlineUS: engineDeadlineUS, LeaseMS: engineLeaseMS, Flags: kvwire.MatchLocal | kvwire.MatchPresence, Tokens: prompt(chain),
		}))
		if err != nil {
			return 0, 0, err
		}
		l, err := kvwire.ParseLeased(body, nil)
		if err != nil {
			return 0, 0, err
		}
		handle = l.Handle
		c.handles[chain] = handle
	}
	return handle, uint32(key % chainPages), nil
}

// Get leases the run of pages, then reads them and gives the lease back in one
// go.
func (c *engineConn) Get(first int, dst [][]byte, got []bool) error {
	handle, page, err := c.place(first)
	if err != nil {
		return err
	}
	c.begin()
	c.add(kvwire.TypeLease, func(b []byte) []byte {
		return kvwire.AppendLeaseRequest(b, kvwire.LeaseRequest{
			Handle: handle, First: page, Pages: uint32(len(dst)), DeadlineUS: engineDeadlineUS, LeaseMS: engineLeaseMS, Flags: kvwire.MatchLocal,
		})
	})
	if err := c.flush(); err != nil {
		return err
	}
	body, err := c.answer(kvwire.TypeLease, c.id)
	if err != nil {
		return err
	}
	l, err := kvwire.ParseLeased(body, c.leased[:0])
	if err != nil {
		return err
	}
	c.leased = l.Locations
	clear(got)
	if l.Lease == 0 {
		return nil
	}
	c.begin()
	c.add(kvwire.TypeRead, func(b []byte) []byte {
		return kvwire.AppendRead(b, kvwire.Read{Lease: l.Lease, Pages: l.Pages})
	})
	read := c.id
	c.add(kvwire.TypeRelease, func(b []byte) []byte { return kvwire.AppendRelease(b, kvwire.Release{Lease: l.Lease}) })
	if err := c.flush(); err != nil {
		return err
	}
	for i := range int(l.Pages) {
		if got[i], err = c.frames.page(read, uint32(i), dst[i]); err != nil {
			return err
		}
	}
	if body, err = c.answer(kvwire.TypeRelease, c.id); err != nil {
		return err
	}
	if len(body) != 1 || body[0] != kvwire.ReleaseLive {
		return fmt.Errorf("the lease of key %d did not hold: %v", first, body)
	}
	return nil
}

// Set writes the pages inline, all of them before the first answer is read.
func (c *engineConn) Set(first int, values [][]byte) error {
	handle, page, err := c.place(first)
	if err != nil {
		return err
	}
	c.begin()
	id := c.id
	for i, v := range values {
		c.id++
		c.out = kvwire.AppendHeader(c.out[:0], kvwire.Header{Type: kvwire.TypeWrite, ID: c.id, Length: uint32(kvwire.WriteHeaderSize + len(v))})
		c.out = kvwire.AppendWriteHeader(c.out, kvwire.PageRef{Handle: handle, Page: page + uint32(i)})
		if err := c.flush(v); err != nil {
			return err
		}
	}
	for i := range values {
		id++
		body, err := c.answer(kvwire.TypeWrite, id)
		if err != nil {
			return err
		}
		if err := stored(body, first+i); err != nil {
			return err
		}
	}
	return nil
}

func stored(body []byte, key int) error {
	done, err := kvwire.ParseCommitted(body, nil)
	if err != nil {
		return err
	}
	if len(done) != 1 || done[0].Status != kvwire.StoreStored && done[0].Status != kvwire.StoreExists {
		return fmt.Errorf("key %d is not stored: %+v", key, done)
	}
	return nil
}

// Drop forgets everything of this size.
func (c *engineConn) Drop(int, int) error {
	_, err := c.call(kvwire.TypeReset, nil)
	return err
}

// dataConn reads from the data port as another sidecar does: one batch_read.
type dataConn struct {
	frames
	request kvwire.BatchRead
	hashes  map[int][]kvwire.Hash
}

// dialData connects to the data port of a sidecar without a cluster key.
func dialData(ctx context.Context, addr, name string, size int) (*dataConn, error) {
	l, err := dialLink(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &dataConn{frames: frames{link: l}, hashes: map[int][]kvwire.Hash{}, request: kvwire.BatchRead{
		DeadlineUS: engineDeadlineUS, Form: descriptor(size).Form(), Namespace: facts(size).Namespace(pageTokens), Tenant: "public",
	}}
	if err := c.challenge(name); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("cannot open a data connection to %q: %w", addr, err)
	}
	return c, nil
}

func (c *dataConn) challenge(name string) error {
	ours := kvwire.Challenge{Nonce: kvwire.NewNonce(), Node: name}
	body, err := c.call(kvwire.TypeChallenge, kvwire.AppendChallenge(nil, ours))
	if err != nil {
		return err
	}
	a, err := kvwire.ParseChallengeAnswer(body)
	if err != nil {
		return err
	}
	proof := kvwire.Proof(nil, kvwire.SideAsker, ours, a.Challenge)
	_, err = c.call(kvwire.TypeProof, proof[:])
	return err
}

// Get is one batch_read.
func (c *dataConn) Get(first int, dst [][]byte, got []bool) error {
	chain := first / chainPages
	hs, ok := c.hashes[chain]
	if !ok {
		var err error
		if hs, err = hashes(chain); err != nil {
			return err
		}
		c.hashes[chain] = hs
	}
	at := first % chainPages
	c.request.Hashes = hs[at:min(at+len(dst), len(hs))]
	if len(c.request.Hashes) != len(dst) {
		return fmt.Errorf("keys %d to %d are not of one chain", first, first+len(dst)-1)
	}
	c.begin()
	c.add(kvwire.TypeBatchRead, func(b []byte) []byte { return kvwire.AppendBatchRead(b, c.request) })
	if err := c.flush(); err != nil {
		return err
	}
	for i := range dst {
		var err error
		if got[i], err = c.page(c.id, uint32(i), dst[i]); err != nil {
			return err
		}
	}
	_, err := c.answer(kvwire.TypeBatchRead, c.id)
	return err
}

var errReadOnly = fmt.Errorf("the data port is for reading")

// Set is not for the data port.
func (*dataConn) Set(int, [][]byte) error { return errReadOnly }

// Drop is not for the data port.
func (*dataConn) Drop(int, int) error { return errReadOnly }
