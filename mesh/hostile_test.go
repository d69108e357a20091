package mesh

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/serf/serf"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func readMissed(t testing.TB, c *dataConn) kvwire.PageHeader {
	t.Helper()
	h, err := kvwire.ReadHeader(c.r)
	require.NoError(t, err)
	require.Equal(t, kvwire.TypePage, h.Type)
	b := make([]byte, h.Length)
	_, err = io.ReadFull(c.r, b)
	require.NoError(t, err)
	p, err := kvwire.ParsePageHeader(b, h)
	require.NoError(t, err)
	return p
}

func endOfAnswer(c *dataConn) error {
	h, err := kvwire.ReadHeader(c.r)
	if err != nil {
		return err
	}
	body, err := c.answer(h, kvwire.TypeBatchRead)
	if err != nil {
		return err
	}
	_, err = kvwire.ParseBatchReadAnswer(body)
	return err
}

// liar is a peer with the cluster key that answers a batch read as the test
// says.
func liar(t testing.TB, n *node, hashes []kvwire.Hash, answer func(req kvwire.BatchRead, id uint32) []byte) *peer {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	listed := make([]uint64, len(hashes))
	for i, h := range hashes {
		listed[i] = digestOf(h)
	}
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go serveLies(c, listed, answer)
		}
	}()
	n.peers.up(serf.Member{Name: "liar", Tags: map[string]string{tagData: ln.Addr().String()}})
	waitListed(t, n, "liar", hashes)
	return n.peerOf(t, "liar")
}

func serveLies(c net.Conn, listed []uint64, answer func(kvwire.BatchRead, uint32) []byte) {
	defer c.Close()
	r := bufio.NewReader(c)
	var theirs kvwire.Challenge
	for {
		h, body, err := kvwire.ReadFrame(r, nil)
		if err != nil {
			return
		}
		var out []byte
		switch h.Type {
		case kvwire.TypeChallenge:
			theirs, _ = kvwire.ParseChallenge(body)
			ours := kvwire.Challenge{Nonce: kvwire.NewNonce(), Node: "liar"}
			out = answerFrame(h, kvwire.AppendChallengeAnswer(nil, kvwire.ChallengeAnswer{Proof: kvwire.Proof(testKey, kvwire.SideAnswerer, theirs, ours), Challenge: ours}))
		case kvwire.TypeProof:
			out = answerFrame(h, nil)
		case kvwire.TypeDirectory:
			req, _ := kvwire.ParseDirectoryRequest(body)
			if req.Version == 1 {
				continue // no news
			}
			f := newFilter(append([]uint64(nil), listed...))
			out = answerFrame(h, kvwire.AppendDirectoryAnswer(nil, kvwire.DirectoryAnswer{Epoch: 1, Version: 1, Full: true, Filter: f.DirectoryFilter}))
		case kvwire.TypeBatchRead:
			req, _ := kvwire.ParseBatchRead(body, nil)
			out = answer(req, h.ID)
		}
		if _, err := c.Write(out); err != nil {
			return
		}
	}
}

func answerFrame(h kvwire.Header, body []byte) []byte {
	return append(kvwire.AppendHeader(nil, kvwire.Header{Type: h.Type | kvwire.AnswerBit, ID: h.ID, Length: uint32(len(body))}), body...)
}

// honest returns the frame of page i, which a test then spoils.
func honest(req kvwire.BatchRead, i int) (kvwire.PageHeader, []byte) {
	b := payload(req.Hashes[i], 0, 5000)
	key := kvwire.ObjectKey{PageKey: kvwire.PageKey{Tenant: req.Tenant, Namespace: req.Namespace, Hash: req.Hashes[i]}, Shard: kvwire.Shard{Count: 1}, Form: req.Form}
	p := kvwire.PageHeader{Index: uint32(i), Shard: kvwire.Shard{Count: 1}, Form: req.Form, Length: uint64(len(b)), Sum: kvwire.Sum(b)}
	p.Auth = kvwire.NewAuthenticator(testKey).Sign(key, p.Length, p.Sum)
	return p, b
}

func pageFrame(id uint32, p kvwire.PageHeader, b []byte) []byte {
	out := kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypePage, ID: id, Length: uint32(kvwire.PageHeaderSize + len(b))})
	return append(kvwire.AppendPageHeader(out, p), b...)
}

func TestPeersThatLie(t *testing.T) {
	t.Parallel()
	const at = 2 // the page that is spoilt
	cases := map[string]struct {
		spoil func(id uint32, p kvwire.PageHeader, b []byte) []byte
		why   kvwire.Reason
		after bool // the pages behind it are kept
	}{
		"index": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte { p.Index++; return pageFrame(id, p, b) }, why: kvwire.ReasonPeer},
		"shard": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			p.Shard = kvwire.Shard{Index: 1, Count: 2}
			return pageFrame(id, p, b)
		}, why: kvwire.ReasonPeer},
		"form": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte { p.Form[0]++; return pageFrame(id, p, b) }, why: kvwire.ReasonPeer},
		"another length": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			p.Length--
			return pageFrame(id, p, b[:len(b)-1])
		}, why: kvwire.ReasonPeer},
		"length that the frame does not have": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			p.Length++
			return pageFrame(id, p, b)
		}, why: kvwire.ReasonPeer},
		"no bytes and no reason": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			p.Length = 0
			return pageFrame(id, p, nil)
		}, why: kvwire.ReasonPeer},
		"id":    {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte { return pageFrame(id+1, p, b) }, why: kvwire.ReasonPeer},
		"magic": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte { return make([]byte, 500) }, why: kvwire.ReasonPeer},
		"early end": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			return answerFrame(kvwire.Header{Type: kvwire.TypeBatchRead, ID: id}, make([]byte, 8))
		}, why: kvwire.ReasonPeer},
		"store reason": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			p.Length, p.Reason = 0, kvwire.ReasonOverBudget
			return pageFrame(id, p, nil)
		}, why: kvwire.ReasonPeer, after: true},
		"absent": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			p.Length, p.Reason = 0, kvwire.ReasonAbsent
			return pageFrame(id, p, nil)
		}, why: kvwire.ReasonAbsent, after: true},
		"byte":          {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte { b[77] ^= 1; return pageFrame(id, p, b) }, why: kvwire.ReasonCorrupt, after: true},
		"checksum":      {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte { p.Sum++; return pageFrame(id, p, b) }, why: kvwire.ReasonCorrupt, after: true},
		"authenticator": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte { p.Auth[3]++; return pageFrame(id, p, b) }, why: kvwire.ReasonCorrupt, after: true},
		"forged bytes with their checksum": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			b[77] ^= 1
			p.Sum = kvwire.Sum(b)
			return pageFrame(id, p, b)
		}, why: kvwire.ReasonCorrupt, after: true},
		"another page's bytes": {spoil: func(id uint32, p kvwire.PageHeader, _ []byte) []byte {
			var h kvwire.Hash
			q, b := honest(kvwire.BatchRead{Form: testForm, Namespace: testNS, Tenant: testTenant, Hashes: []kvwire.Hash{h}}, 0)
			q.Index = p.Index
			return pageFrame(id, q, b)
		}, why: kvwire.ReasonCorrupt, after: true},
		"error": {spoil: func(id uint32, p kvwire.PageHeader, b []byte) []byte {
			e := kvwire.AppendError(nil, kvwire.Errorf(kvwire.CodeBusy, "", "too much"))
			return answerFrame(kvwire.Header{Type: kvwire.TypeError, ID: id}, e)
		}, why: kvwire.ReasonPeer},
	}
	n := startNode(t, "reader", nil)
	for name, c := range cases {
		pages := testHashes(name, 5)
		p := liar(t, n, pages, func(req kvwire.BatchRead, id uint32) (out []byte) {
			for i := range req.Hashes {
				ph, b := honest(req, i)
				if req.Hashes[i] == pages[at] {
					out = append(out, c.spoil(id, ph, b)...)
					continue
				}
				out = append(out, pageFrame(id, ph, b)...)
			}
			return append(out, answerFrame(kvwire.Header{Type: kvwire.TypeBatchRead, ID: id}, make([]byte, 8))...)
		})
		before := n.Stats()
		got, why := n.Fill(within(t, 10*time.Second), n.request(pages, 1))
		require.Equal(t, at, got, name)
		require.Equal(t, c.why, why, name)
		requireHeld(t, n, pages[:at], 1, 5000)
		require.False(t, n.space.Has(testForm, pages[at]), name)
		require.Equal(t, before.Failures[c.why]+1, n.Stats().Failures[c.why], name)
		if c.why == kvwire.ReasonCorrupt {
			require.Equal(t, before.Corrupt+1, n.Stats().Corrupt, name)
		}
		if !c.after {
			require.True(t, p.blamed(), name)
			require.False(t, n.space.Has(testForm, pages[at+1]), name)
		}
		eventually(t, func() bool { return n.cache.Stats().Held == 0 && n.Stats().Pulling == 0 }, name)
		n.peers.lost("liar")
	}
}

// dialRaw opens a connection without the challenge.
func dialRaw(t testing.TB, n *node) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", n.DataAddr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	return c, bufio.NewReader(c)
}

func readError(t testing.TB, r *bufio.Reader) *kvwire.Error {
	t.Helper()
	h, body, err := kvwire.ReadFrame(r, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.TypeError|kvwire.AnswerBit, h.Type)
	e, err := kvwire.ParseError(body)
	require.NoError(t, err)
	_, err = r.ReadByte()
	require.Error(t, err, "the connection ends")
	return e
}

func frame(ty kvwire.Type, body []byte) []byte {
	return append(kvwire.AppendHeader(nil, kvwire.Header{Type: ty, ID: 7, Length: uint32(len(body))}), body...)
}

func TestNothingWorksBeforeTheChallenge(t *testing.T) {
	t.Parallel()
	n := startNode(t, "a", nil)
	put(t, n, testHashes("p", 1), 1, 1000)
	read := kvwire.AppendBatchRead(nil, kvwire.BatchRead{DeadlineUS: 1e6, Form: testForm, Namespace: testNS, Tenant: testTenant, Hashes: testHashes("p", 1)})
	for _, first := range [][]byte{
		frame(kvwire.TypeBatchRead, read),
		frame(kvwire.TypeDirectory, kvwire.AppendDirectoryRequest(nil, kvwire.DirectoryRequest{})),
		frame(kvwire.TypeProof, make([]byte, kvwire.ProofSize)),
	} {
		c, r := dialRaw(t, n)
		_, err := c.Write(first)
		require.NoError(t, err)
		require.Equal(t, kvwire.CodeUnauthorized, readError(t, r).Code)
	}
	// A wrong proof, and the answerer's own sent back.
	for _, own := range []bool{false, true} {
		c, r := dialRaw(t, n)
		_, err := c.Write(frame(kvwire.TypeChallenge, kvwire.AppendChallenge(nil, kvwire.Challenge{Node: "x"})))
		require.NoError(t, err)
		_, body, err := kvwire.ReadFrame(r, nil)
		require.NoError(t, err)
		a, err := kvwire.ParseChallengeAnswer(body)
		require.NoError(t, err)
		proof := make([]byte, kvwire.ProofSize)
		if own {
			proof = a.Proof[:]
		}
		_, err = c.Write(frame(kvwire.TypeProof, proof))
		require.NoError(t, err)
		require.Equal(t, kvwire.CodeUnauthorized, readError(t, r).Code)
	}
	require.Equal(t, uint64(5), n.Stats().AuthFailures)
	require.Zero(t, n.Stats().Served)
	require.Zero(t, n.Stats().DirectoryServed)
}

func TestLimitsOfTheDataPort(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	p := b.peerOf(t, "holder")
	request := func(ty kvwire.Type, body []byte) error {
		c, err := p.take(within(t, time.Minute), true)
		require.NoError(t, err)
		defer c.close()
		stop := c.watch(within(t, time.Minute))
		defer stop()
		if err := c.send(ty, body); err != nil {
			return err
		}
		if ty != kvwire.TypeBatchRead {
			h, err := kvwire.ReadHeader(c.r)
			require.NoError(t, err)
			_, err = c.answer(h, ty)
			return err
		}
		for {
			h, err := kvwire.ReadHeader(c.r)
			require.NoError(t, err)
			if h.Type != kvwire.TypePage {
				_, err := c.answer(h, ty)
				return err
			}
			_, err = io.CopyN(io.Discard, c.r, int64(h.Length))
			require.NoError(t, err)
		}
	}
	batch := kvwire.BatchRead{DeadlineUS: 50e6, Form: testForm, Namespace: testNS, Tenant: string(make([]byte, kvwire.MaxTenant)), Hashes: make([]kvwire.Hash, kvwire.MaxBatch)}
	require.NoError(t, request(kvwire.TypeBatchRead, kvwire.AppendBatchRead(nil, batch)), "at the limit")
	require.NoError(t, request(kvwire.TypeCheck, kvwire.AppendBatchRead(nil, batch)), "at the limit")
	batch.Hashes = make([]kvwire.Hash, kvwire.MaxBatch+1)
	require.Equal(t, kvwire.CodeTooLarge, kvwire.CodeOf(request(kvwire.TypeCheck, kvwire.AppendBatchRead(nil, batch))))
	require.Equal(t, kvwire.CodeTooLarge, kvwire.CodeOf(request(kvwire.TypeBatchRead, kvwire.AppendBatchRead(nil, batch))))
	batch.Hashes, batch.Tenant = nil, string(make([]byte, kvwire.MaxTenant+1))
	require.Equal(t, kvwire.CodeTooLarge, kvwire.CodeOf(request(kvwire.TypeBatchRead, kvwire.AppendBatchRead(nil, batch))))
	dir := kvwire.DirectoryRequest{WaitUS: kvwire.MaxDirectoryWaitUS}
	require.NoError(t, request(kvwire.TypeDirectory, kvwire.AppendDirectoryRequest(nil, dir)))
	dir.WaitUS++
	require.Equal(t, kvwire.CodeTooLarge, kvwire.CodeOf(request(kvwire.TypeDirectory, kvwire.AppendDirectoryRequest(nil, dir))))
	require.Equal(t, kvwire.CodeBadField, kvwire.CodeOf(request(kvwire.TypePing, nil)))
	require.Equal(t, uint64(65536), a.Stats().NotServed[kvwire.ReasonNamespace])

	// The challenge's name.
	c, r := dialRaw(t, a)
	_, err := c.Write(frame(kvwire.TypeChallenge, kvwire.AppendChallenge(nil, kvwire.Challenge{Node: string(make([]byte, kvwire.MaxID))})))
	require.NoError(t, err)
	h, _, err := kvwire.ReadFrame(r, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.TypeChallenge|kvwire.AnswerBit, h.Type)
	c, r = dialRaw(t, a)
	_, err = c.Write(frame(kvwire.TypeChallenge, kvwire.AppendChallenge(nil, kvwire.Challenge{Node: string(make([]byte, kvwire.MaxID+1))})))
	require.NoError(t, err)
	require.Equal(t, kvwire.CodeTooLarge, readError(t, r).Code)
}

// A challenge that is too long is refused before its body has come.
func TestLongChallengeIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	n := startNode(t, "a", nil)
	c, r := dialRaw(t, n)
	_, err := c.Write(kvwire.AppendHeader(nil, kvwire.Header{Type: kvwire.TypeChallenge, Length: 60000}))
	require.NoError(t, err)
	require.Equal(t, kvwire.CodeTooLarge, readError(t, r).Code)
}

// A node does not prove itself to an answerer that has not.
func TestAnswererMustProveItselfFirst(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	after := make(chan error, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			after <- err
			return
		}
		defer c.Close()
		h, body, _ := kvwire.ReadFrame(c, nil)
		theirs, _ := kvwire.ParseChallenge(body)
		ours := kvwire.Challenge{Node: "x"}
		proof := kvwire.Proof([]byte("another"), kvwire.SideAnswerer, theirs, ours)
		_, _ = c.Write(answerFrame(h, kvwire.AppendChallengeAnswer(nil, kvwire.ChallengeAnswer{Proof: proof, Challenge: ours})))
		_, err = kvwire.ReadHeader(c)
		after <- err
	}()
	_, err = dialData(within(t, 10*time.Second), ln.Addr().String(), "x", "me", testKey)
	require.ErrorIs(t, err, errUnauthorized)
	require.ErrorIs(t, <-after, io.EOF, "it hangs up without its own proof")
}

func TestConnectionsHaveALimit(t *testing.T) {
	t.Parallel()
	n := startNode(t, "a", func(c *Config) { c.MaxDataConns = 2 })
	for range 2 {
		dialRaw(t, n)
	}
	eventually(t, func() bool { return n.Stats().DataConns == 2 }, "not accepted")
	_, r := dialRaw(t, n)
	_, err := r.ReadByte()
	require.Error(t, err)
	require.Equal(t, uint64(1), n.Stats().Refusals)
}

// Those who never do the challenge leave room for those who do.
func TestStrangersLeaveRoom(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	a.data.mu.Lock()
	a.data.maxStrangers = 3
	a.data.mu.Unlock()
	before := a.Stats().DataConns
	_, oldest := dialRaw(t, a)
	for range 2 {
		dialRaw(t, a)
	}
	eventually(t, func() bool { return a.Stats().DataConns >= before+3 }, "not accepted")
	pages := testHashes("p", 1)
	put(t, a, pages, 1, 1000)
	waitListed(t, b, "holder", pages) // over the connection that is proven
	for range 3 {                     // more of them never keep a peer away
		dialRaw(t, a)
	}
	// A peer's new connection takes the place of the stranger that waits longest.
	eventually(t, func() bool {
		got, _ := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
		return got == 1
	}, "no room for a peer")
	_, err := oldest.ReadByte()
	require.Error(t, err)
	require.Positive(t, a.Stats().Refusals)
	require.LessOrEqual(t, a.Stats().DataConns, 3+2)
}

func TestIdleConnectionsEnd(t *testing.T) {
	t.Parallel()
	a, b := pair(t, func(c *Config) { c.IdleTimeout = 400 * time.Millisecond })
	pages := testHashes("p", 2)
	put(t, a, pages, 1, 1000)
	waitListed(t, b, "holder", pages)
	got, _ := b.Fill(within(t, 10*time.Second), b.request(pages[:1], 1))
	require.Equal(t, 1, got)
	p := b.peerOf(t, "holder")
	c := p.idleConn(t)
	// The reader does not notice: a stale connection is replaced.
	eventually(t, func() bool {
		one := make([]byte, 1)
		_ = c.c.SetReadDeadline(time.Now().Add(time.Millisecond))
		_, err := c.c.Read(one)
		return errors.Is(err, io.EOF)
	}, "the holder did not close it")
	got, why := b.Fill(within(t, 10*time.Second), b.request(pages, 1))
	require.Equal(t, 2, got, why.String())
}

// The peer behind an address must be the one that gossip names.
func TestAnotherNodeAtTheAddress(t *testing.T) {
	t.Parallel()
	a, b := pair(t, nil)
	_, err := dialData(within(t, 10*time.Second), a.DataAddr(), "somebody", b.Name(), testKey)
	require.ErrorContains(t, err, `node "holder" answers there`)
	_, err = dialData(within(t, 10*time.Second), a.DataAddr(), "holder", b.Name(), []byte("another"))
	require.ErrorIs(t, err, errUnauthorized)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = dialData(ctx, a.DataAddr(), "holder", b.Name(), testKey)
	require.ErrorIs(t, err, context.Canceled)
}

// Whatever comes, the data port answers or hangs up, and goes on serving.
func FuzzDataPort(f *testing.F) {
	f.Add(frame(kvwire.TypeBatchRead, kvwire.AppendBatchRead(nil, kvwire.BatchRead{DeadlineUS: 1000, Hashes: make([]kvwire.Hash, 2)})), true)
	f.Add(frame(kvwire.TypeDirectory, kvwire.AppendDirectoryRequest(nil, kvwire.DirectoryRequest{})), true)
	f.Add(frame(kvwire.TypeDirectory, []byte{1}), true)
	f.Add(frame(kvwire.TypeChallenge, kvwire.AppendChallenge(nil, kvwire.Challenge{Node: "n"})), false)
	f.Add(frame(kvwire.TypeProof, nil), false)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), false)
	f.Add([]byte{}, false)
	n := startNode(f, "fuzzed", nil)
	f.Fuzz(func(t *testing.T, data []byte, known bool) {
		here, there := net.Pipe()
		s := &session{d: n.data, c: there, r: bufio.NewReader(there)}
		go func() {
			_, _ = here.Write(data)
			_ = here.Close()
		}()
		go func() { _, _ = io.Copy(io.Discard, here) }()
		var err error
		if !known {
			err = s.handshake()
		}
		for range 100 {
			if err != nil {
				break
			}
			err = s.request()
		}
		_ = there.Close()
		require.Zero(t, n.cache.Stats().Held)
	})
}

// lineCounter counts the lines of a log.
type lineCounter struct{ n atomic.Int64 }

func (w *lineCounter) Write(p []byte) (int, error) {
	w.n.Add(1)
	return len(p), nil
}

func TestStrangersCannotFillTheLog(t *testing.T) {
	t.Parallel()
	var lines lineCounter
	n := startNode(t, "a", func(c *Config) { c.Logger = zerolog.New(&lines) })
	before := lines.n.Load()
	for range 100 {
		n.Address("GET", AddressPath, "Bearer x", time.Now())
	}
	for range 20 {
		c, r := dialRaw(t, n)
		_, err := c.Write(make([]byte, kvwire.HeaderSize))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, r)
		require.NoError(t, err)
	}
	eventually(t, func() bool { return n.Stats().BadFrames == 20 }, "not counted")
	require.EqualValues(t, 100, n.Stats().AuthFailures)
	got := lines.n.Load() - before
	require.Positive(t, got)
	require.LessOrEqual(t, got, int64(2*strangeLines), "one line for each stranger")
}
