package mesh

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

const (
	maxStrangers  = 64 // connections that have not done the challenge; then the oldest makes room
	handshakeTime = 3 * time.Second
	answerTime    = 5 * time.Second        // to write what carries no page
	writeGrace    = 500 * time.Millisecond // beyond the deadline, to end an answer
	maxReadTime   = time.Minute            // the longest deadline of a batch read, and wait for pages or a manifest
	keepHashes    = 4 << 10                // capacity that a connection keeps between requests
)

// dataPort serves pages and the directory to other sidecars. Requests of one
// connection are answered one after the other: at most one is in flight, the
// next waits in the socket.
type dataPort struct {
	m  *Mesh
	ln net.Listener
	wg sync.WaitGroup

	ctx    context.Context
	cancel context.CancelFunc

	mu        sync.Mutex
	conns     map[net.Conn]struct{}
	strangers []net.Conn // of them, those that have not done the challenge, oldest first

	maxStrangers int
	waits        atomic.Int32 // requests that are put off
}

func newDataPort(m *Mesh) *dataPort {
	d := &dataPort{m: m, conns: make(map[net.Conn]struct{}), maxStrangers: maxStrangers}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// listen binds the port and serves it until close.
func (d *dataPort) listen(ctx context.Context, addr string) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("cannot listen for peers at %q: %w", addr, err)
	}
	d.ln = ln
	d.wg.Go(d.accept)
	return nil
}

func (d *dataPort) accept() {
	for {
		c, err := d.ln.Accept()
		if err != nil {
			if d.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors, most likely: others may be freed soon.
			select {
			case <-d.ctx.Done():
				return
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		if !d.enter(c) {
			d.m.counters.refusals.Add(1)
			_ = c.Close()
			continue
		}
		d.wg.Go(func() {
			defer d.leave(c)
			d.serve(c)
		})
	}
}

func (d *dataPort) enter(c net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Err() != nil || len(d.conns) >= d.m.cfg.MaxDataConns {
		return false
	}
	// Strangers may take a part of the connections only. A peer does the
	// challenge at once, so that it is those who wait that go.
	if len(d.strangers) >= d.maxStrangers {
		_ = d.strangers[0].Close()
		d.strangers = slices.Delete(d.strangers, 0, 1)
		d.m.counters.refusals.Add(1)
	}
	d.conns[c] = struct{}{}
	d.strangers = append(d.strangers, c)
	return true
}

// proven takes a connection out of the strangers.
func (d *dataPort) proven(c net.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.noStranger(c)
}

// noStranger needs d.mu.
func (d *dataPort) noStranger(c net.Conn) {
	if i := slices.Index(d.strangers, c); i >= 0 {
		d.strangers = slices.Delete(d.strangers, i, i+1)
	}
}

func (d *dataPort) leave(c net.Conn) {
	_ = c.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.noStranger(c)
	delete(d.conns, c)
}

func (d *dataPort) open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.conns)
}

func (d *dataPort) close() {
	d.cancel()
	if d.ln != nil {
		_ = d.ln.Close()
	}
	d.mu.Lock()
	for c := range d.conns {
		_ = c.Close()
	}
	d.mu.Unlock()
	d.wg.Wait()
}

// session is one connection of a peer.
type session struct {
	d      *dataPort
	c      net.Conn
	r      *bufio.Reader
	peer   string
	in     []byte
	out    []byte
	hashes []kvwire.Hash
	pages  kvwire.PageWriter
	queued int           // whole pages in it
	views  []*cache.View // of the page that is being queued
}

func (d *dataPort) serve(c net.Conn) {
	s := &session{d: d, c: c, r: bufio.NewReaderSize(c, 4<<10)}
	err := s.handshake()
	if err == nil {
		d.proven(c)
	}
	for err == nil {
		err = s.request()
	}
	var e *kvwire.Error
	if errors.As(err, &e) {
		d.m.counters.badFrames.Add(1)
		d.m.strange.Warn().Err(err).Str("peer", s.peer).Str("from", c.RemoteAddr().String()).Msg("ended a data connection")
	}
}

// handshake lets nobody further who does not hold the cluster key.
func (s *session) handshake() error {
	_ = s.c.SetDeadline(time.Now().Add(handshakeTime))
	id, body, err := s.expect(kvwire.TypeChallenge, kvwire.NonceSize+2+kvwire.MaxID)
	if err != nil {
		return err
	}
	theirs, err := kvwire.ParseChallenge(body)
	if err != nil {
		return s.refuse(id, err)
	}
	key := s.d.m.cfg.ClusterKey
	ours := kvwire.Challenge{Nonce: kvwire.NewNonce(), Node: s.d.m.Name()}
	answer := kvwire.ChallengeAnswer{Proof: kvwire.Proof(key, kvwire.SideAnswerer, theirs, ours), Challenge: ours}
	if err := s.answer(kvwire.TypeChallenge, id, kvwire.AppendChallengeAnswer(nil, answer)); err != nil {
		return err
	}
	id, body, err = s.expect(kvwire.TypeProof, kvwire.ProofSize)
	if err != nil {
		return err
	}
	if len(body) != kvwire.ProofSize || !kvwire.CheckProof([kvwire.ProofSize]byte(body), kvwire.Proof(key, kvwire.SideAsker, theirs, ours)) {
		s.d.m.counters.authFailures.Add(1)
		return s.refuse(id, kvwire.Errorf(kvwire.CodeUnauthorized, "proof", "node %q does not hold the cluster key", theirs.Node))
	}
	s.peer = theirs.Node
	return s.answer(kvwire.TypeProof, id, nil)
}

// expect reads a frame of a type with a body of at most limit bytes, before
// anything else of the peer's is believed.
func (s *session) expect(t kvwire.Type, limit int) (id uint32, body []byte, err error) {
	h, err := kvwire.ReadHeader(s.r)
	if err != nil {
		return 0, nil, s.refuse(h.ID, err)
	}
	if h.Type != t {
		s.d.m.counters.authFailures.Add(1)
		return 0, nil, s.refuse(h.ID, kvwire.Errorf(kvwire.CodeUnauthorized, "type", "a %s frame before the challenge is done", h.Type))
	}
	if int(h.Length) > limit {
		return 0, nil, s.refuse(h.ID, kvwire.Errorf(kvwire.CodeTooLarge, "length", "a %s frame of %d bytes is above %d", t, h.Length, limit))
	}
	s.in, err = kvwire.ReadBody(s.r, h, s.in)
	return h.ID, s.in, err
}

// refuse answers with an error, if err is one of the protocol's, and returns
// it. The connection ends.
func (s *session) refuse(id uint32, err error) error {
	var e *kvwire.Error
	if errors.As(err, &e) {
		_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
		_ = s.answer(kvwire.TypeError, id, kvwire.AppendError(nil, e))
		// What the peer still has to say would make the kernel reset the
		// connection before the error is read.
		if t, ok := s.c.(*net.TCPConn); ok {
			_ = t.CloseWrite()
			_ = t.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			_, _ = io.CopyN(io.Discard, t, 64<<10)
		}
	}
	return err
}

func (s *session) answer(t kvwire.Type, id uint32, body []byte) error {
	s.out = kvwire.AppendHeader(s.out[:0], kvwire.Header{Type: t | kvwire.AnswerBit, ID: id, Length: uint32(len(body))})
	s.out = append(s.out, body...)
	_, err := s.c.Write(s.out)
	if cap(s.out) > 64<<10 {
		s.out = nil
	}
	return err
}

// request reads and answers one request.
func (s *session) request() error {
	_ = s.c.SetReadDeadline(time.Now().Add(s.d.m.cfg.IdleTimeout))
	h, err := kvwire.ReadHeader(s.r)
	if err != nil {
		return s.refuse(h.ID, err)
	}
	arrived := time.Now()
	switch h.Type {
	case kvwire.TypeBatchRead, kvwire.TypeDirectory, kvwire.TypeCheck, kvwire.TypeManifest, kvwire.TypeAwait, kvwire.TypeQueues, kvwire.TypeForms:
	default:
		return s.refuse(h.ID, kvwire.Errorf(kvwire.CodeBadField, "type", "a %s frame is not for the data port", h.Type))
	}
	_ = s.c.SetReadDeadline(arrived.Add(answerTime))
	body, err := kvwire.ReadBody(s.r, h, s.in)
	if err != nil {
		return err
	}
	if s.in = body[:0]; cap(body) > keepHashes*kvwire.HashSize {
		s.in = nil
	}
	switch h.Type {
	case kvwire.TypeDirectory:
		return s.directory(h.ID, body)
	case kvwire.TypeManifest:
		return s.manifest(h.ID, body)
	case kvwire.TypeForms:
		return s.forms(h.ID, body)
	case kvwire.TypeQueues:
		return s.queues(h.ID)
	}
	parse := kvwire.ParseBatchRead
	if h.Type == kvwire.TypeAwait {
		parse = kvwire.ParseAwait
	}
	req, err := parse(body, s.hashes[:0])
	if err != nil {
		return s.refuse(h.ID, err)
	}
	if s.hashes = req.Hashes; cap(s.hashes) > keepHashes {
		s.hashes = nil
	}
	switch h.Type {
	case kvwire.TypeCheck:
		return s.check(h.ID, req, arrived)
	case kvwire.TypeAwait:
		return s.await(h.ID, req, arrived)
	}
	return s.batchRead(h.ID, req, arrived)
}

// directory answers when there is news for the peer, or when it has waited
// long enough.
func (s *session) directory(id uint32, body []byte) error {
	req, err := kvwire.ParseDirectoryRequest(body)
	if err != nil {
		return s.refuse(id, err)
	}
	ix := s.d.m.index
	if req.WaitUS > 0 && req.Epoch == ix.epoch {
		timer := time.NewTimer(time.Duration(req.WaitUS) * time.Microsecond)
		defer timer.Stop()
		if version, changed := ix.now(); version == req.Version {
			select {
			case <-changed:
			case <-timer.C:
			case <-s.d.ctx.Done():
				return net.ErrClosed
			}
		}
	}
	s.d.m.counters.directoryServed.Add(1)
	_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
	return s.answer(kvwire.TypeDirectory, id, kvwire.AppendDirectoryAnswer(nil, ix.answer(req.Epoch, req.Version)))
}
