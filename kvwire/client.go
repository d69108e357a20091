package kvwire

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ClientOptions tune [Dial]. The zero value works.
type ClientOptions struct {
	// Key is an API key with the scope engine, for localhost listeners that
	// need one.
	Key string
	// Name is shown in the sidecar's logs.
	Name string
	// Inline keeps a localhost connection where it is, instead of moving to
	// the engine socket for shared memory.
	Inline bool
	// Populate maps the arena with all its pages present, so that no first
	// read pays for a fault.
	Populate bool
}

// Client is an engine's connection to its sidecar. It does not reconnect: when
// a call fails with an error that is not an [*Error], the connection is spent
// and the caller dials again.
//
// Its methods may be called by several goroutines; calls on one Client follow
// each other. A call ends at its context's deadline at the latest; a context
// that is cancelled before it ends only a call that has not been sent, since
// half of an exchange would leave the connection of no use. Slices returned by
// Arena and Inbox are invalid after Close.
type Client struct {
	opts  ClientOptions
	hello HelloAnswer

	turn   chan struct{} // holds one value: whose call it is
	conn   net.Conn
	r      *bufio.Reader
	id     uint32
	out    []byte
	in     []byte
	broken error

	registered Registered
	arena      []byte
	inbox      []byte
}

// Dial connects to a sidecar: addr is the path of an engine socket (it has a
// slash in it) or HOST:PORT of a localhost listener. From the latter it moves
// to the engine socket by itself when it can open it.
func Dial(ctx context.Context, addr string, opts ClientOptions) (*Client, error) {
	network := "tcp"
	if strings.Contains(addr, "/") {
		network = "unix"
	}
	c, err := dial(ctx, network, addr, opts)
	if err != nil || network == "unix" || opts.Inline || c.hello.Socket == "" {
		return c, err
	}
	moved, err := dial(ctx, "unix", c.hello.Socket, opts)
	if err != nil {
		return c, nil // not in this mount namespace, or not ours to open: stay
	}
	_ = c.Close()
	return moved, nil
}

func dial(ctx context.Context, network, addr string, opts ClientOptions) (*Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("cannot reach the sidecar at %q: %w", addr, err)
	}
	c := &Client{opts: opts, turn: make(chan struct{}, 1), conn: conn, r: bufio.NewReaderSize(conn, 64<<10)}
	c.give()
	body, err := c.callJSON(ctx, TypeHello, Hello{Key: opts.Key, Client: opts.Name})
	if err == nil {
		err = json.Unmarshal(body, &c.hello)
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("cannot greet the sidecar at %q: %w", addr, err)
	}
	return c, nil
}

// Server returns what the sidecar said of itself.
func (c *Client) Server() HelloAnswer { return c.hello }

// Close ends the connection, and with it every lease and reservation of this
// client, and unmaps the shared memory.
func (c *Client) Close() error {
	<-c.turn
	defer c.give()
	err := c.conn.Close()
	for _, b := range [][]byte{c.arena, c.inbox} {
		if b != nil {
			err = errors.Join(err, unix.Munmap(b))
		}
	}
	c.arena, c.inbox = nil, nil
	if c.broken == nil {
		c.broken = net.ErrClosed
	}
	return err
}

// Register tells the sidecar what engine this is. With shared memory, Arena
// and Inbox work afterwards.
func (c *Client) Register(ctx context.Context, reg Register) (Registered, error) {
	if err := c.take(ctx); err != nil {
		return Registered{}, err
	}
	defer c.give()
	body, err := json.Marshal(reg)
	if err != nil {
		return Registered{}, fmt.Errorf("cannot encode register: %w", err)
	}
	_, shm := c.conn.(*net.UnixConn)
	answer, fds, err := c.exchange(ctx, TypeRegister, body, shm && !reg.Inline)
	if err != nil {
		return Registered{}, err
	}
	defer func() { closeAll(fds) }()
	if err := json.Unmarshal(answer, &c.registered); err != nil {
		return Registered{}, c.spoil(fmt.Errorf("cannot decode the answer to register: %w", err))
	}
	if !c.registered.SharedMemory {
		return c.registered, nil
	}
	want := 1
	if c.registered.InboxBytes > 0 {
		want = 2
	}
	if len(fds) != want {
		return Registered{}, c.spoil(fmt.Errorf("cannot map shared memory: %d file descriptors came instead of %d", len(fds), want))
	}
	arena := fds[0]
	fds = fds[1:]
	if c.arena, err = mapFile(arena, c.registered.ArenaBytes, false, c.opts.Populate); err != nil {
		return Registered{}, c.spoil(err)
	}
	if len(fds) > 0 {
		inbox := fds[0]
		fds = nil
		if c.inbox, err = mapFile(inbox, c.registered.InboxBytes, true, true); err != nil {
			return Registered{}, c.spoil(err)
		}
	}
	return c.registered, nil
}

// Arena returns the sidecar's arena, read only, or nil without shared memory.
// Only leased locations may be read, and what was read counts only if the
// release says that the lease was live.
func (c *Client) Arena() []byte { return c.arena }

// Slot returns the bytes of an inbox slot, ObjectBytes long, or nil without
// shared memory.
func (c *Client) Slot(slot uint32) []byte {
	begin := int64(slot) * c.registered.SlotBytes
	end := begin + c.registered.ObjectBytes
	if end > int64(len(c.inbox)) {
		return nil
	}
	return c.inbox[begin:end:end]
}

// take waits for the calls before this one, at most until ctx ends: a call
// that waits for a stopped sidecar must not hold up others beyond their own
// deadlines.
func (c *Client) take(ctx context.Context) error {
	select {
	case <-c.turn:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *Client) give() { c.turn <- struct{}{} }

// Ping asks for an empty answer.
func (c *Client) Ping(ctx context.Context) error {
	_, err := c.call(ctx, TypePing, nil)
	return err
}

// Match asks for the longest prefix that can be had in time; locations are
// appended to dst.
func (c *Client) Match(ctx context.Context, m Match, dst []Location) (Leased, error) {
	return c.leased(ctx, TypeMatch, func(b []byte) []byte { return AppendMatchHead(b, m) }, m.Tokens, dst)
}

// MatchHashes is [Client.Match] for pages that are named by their hashes.
func (c *Client) MatchHashes(ctx context.Context, m MatchHashes, dst []Location) (Leased, error) {
	return c.leased(ctx, TypeMatchHashes, func(b []byte) []byte { return AppendMatchHashes(b, m) }, nil, dst)
}

// Lease leases pages of a known chain; locations are appended to dst.
func (c *Client) Lease(ctx context.Context, l LeaseRequest, dst []Location) (Leased, error) {
	return c.leased(ctx, TypeLease, func(b []byte) []byte { return AppendLeaseRequest(b, l) }, nil, dst)
}

func (c *Client) leased(ctx context.Context, t Type, body func([]byte) []byte, tail []byte, dst []Location) (Leased, error) {
	if err := c.take(ctx); err != nil {
		return Leased{}, err
	}
	defer c.give()
	answer, err := c.sendWith(ctx, t, body, tail)
	if err != nil {
		return Leased{}, err
	}
	l, err := ParseLeased(answer, dst)
	if err != nil {
		return Leased{}, c.spoil(err)
	}
	return l, nil
}

// Extend adds token ids to a chain and returns its number of full pages.
func (c *Client) Extend(ctx context.Context, handle uint64, tokens []byte) (int, error) {
	if err := c.take(ctx); err != nil {
		return 0, err
	}
	defer c.give()
	answer, err := c.send(ctx, TypeExtend, func(b []byte) []byte { return AppendExtend(b, Extend{Handle: handle, Tokens: tokens}) })
	if err != nil {
		return 0, err
	}
	if len(answer) != 4 {
		return 0, c.spoil(Errorf(CodeBadFrame, "extend", "an answer of %d bytes instead of 4", len(answer)))
	}
	return int(binary.LittleEndian.Uint32(answer)), nil
}

// Release gives a lease back and returns [ReleaseLive], [ReleaseExpired] or
// [ReleaseCorrupt].
func (c *Client) Release(ctx context.Context, r Release) (uint8, error) {
	if err := c.take(ctx); err != nil {
		return ReleaseExpired, err
	}
	defer c.give()
	answer, err := c.send(ctx, TypeRelease, func(b []byte) []byte { return AppendRelease(b, r) })
	if err != nil {
		return ReleaseExpired, err
	}
	if len(answer) != 1 {
		return ReleaseExpired, c.spoil(Errorf(CodeBadFrame, "release", "an answer of %d bytes instead of 1", len(answer)))
	}
	return answer[0], nil
}

// Reserve asks for inbox slots for pages, one answer each, appended to dst.
func (c *Client) Reserve(ctx context.Context, pages []PageRef, dst []Reservation) ([]Reservation, error) {
	if err := c.take(ctx); err != nil {
		return dst, err
	}
	defer c.give()
	answer, err := c.send(ctx, TypeReserve, func(b []byte) []byte { return AppendReserve(b, pages) })
	if err != nil {
		return dst, err
	}
	out, err := ParseReservations(answer, dst)
	if err != nil || len(out)-len(dst) != len(pages) {
		return dst, c.spoil(Errorf(CodeBadFrame, "reservations", "%d bytes do not answer %d pages", len(answer), len(pages)))
	}
	return out, nil
}

// Commit publishes written slots, one answer each, appended to dst.
func (c *Client) Commit(ctx context.Context, commits []Commit, dst []Committed) ([]Committed, error) {
	if err := c.take(ctx); err != nil {
		return dst, err
	}
	defer c.give()
	answer, err := c.send(ctx, TypeCommit, func(b []byte) []byte { return AppendCommits(b, commits) })
	if err != nil {
		return dst, err
	}
	out, err := ParseCommitted(answer, dst)
	if err != nil || len(out)-len(dst) != len(commits) {
		return dst, c.spoil(Errorf(CodeBadFrame, "committed", "%d bytes do not answer %d commits", len(answer), len(commits)))
	}
	return out, nil
}

// Write stores one page inline, without shared memory.
func (c *Client) Write(ctx context.Context, page PageRef, object []byte) (Committed, error) {
	if err := c.take(ctx); err != nil {
		return Committed{}, err
	}
	defer c.give()
	answer, err := c.sendWith(ctx, TypeWrite, func(b []byte) []byte { return AppendWriteHeader(b, page) }, object)
	if err != nil {
		return Committed{}, err
	}
	out, err := ParseCommitted(answer, nil)
	if err != nil || len(out) != 1 {
		return Committed{}, c.spoil(Errorf(CodeBadFrame, "committed", "%d bytes do not answer one page", len(answer)))
	}
	return out[0], nil
}

// Read copies leased pages of this rank's shard inline, without shared memory:
// into returns where page i of the answer goes, given its length. The bytes
// are checked against their checksum.
func (c *Client) Read(ctx context.Context, r Read, into func(i int, length int64) []byte) error {
	if err := c.take(ctx); err != nil {
		return err
	}
	defer c.give()
	begin, err := c.begin(ctx, TypeRead)
	if err != nil {
		return err
	}
	c.out = EndFrame(AppendRead(c.out, r), begin)
	if _, err := c.conn.Write(c.out); err != nil {
		return c.spoil(err)
	}
	for i := range int(r.Pages) {
		if err := c.readPage(i, into); err != nil {
			return err
		}
	}
	return nil
}

func (c *Client) readPage(i int, into func(int, int64) []byte) error {
	h, err := ReadHeader(c.r)
	if err != nil {
		return c.spoil(err)
	}
	if h.Type == TypeError|AnswerBit {
		return c.readError(h)
	}
	if h.Type != TypePage || h.ID != c.id || h.Length < PageHeaderSize {
		return c.spoil(Errorf(CodeBadFrame, "type", "a %s frame instead of a page", h.Type))
	}
	var b [PageHeaderSize]byte
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return c.spoil(err)
	}
	p, err := ParsePageHeader(b[:], h)
	if err != nil {
		return c.spoil(err)
	}
	if int(p.Index) != i {
		return c.spoil(Errorf(CodeBadFrame, "index", "page %d instead of %d", p.Index, i))
	}
	dst := into(i, int64(p.Length))
	if uint64(len(dst)) != p.Length {
		return c.spoil(Errorf(CodeBadField, "length", "page %d has %d bytes, there is room for %d", i, p.Length, len(dst)))
	}
	if _, err := io.ReadFull(c.r, dst); err != nil {
		return c.spoil(err)
	}
	if p.Reason != ReasonNone {
		return c.spoil(Errorf(CodeInternal, "page", "page %d was missed as %s", i, p.Reason))
	}
	if guard.readSum() && Sum(dst) != p.Sum {
		return c.spoil(Errorf(CodeInternal, "checksum", "page %d does not match its checksum", i))
	}
	return nil
}

// Drop forgets a chain and its reservations.
func (c *Client) Drop(ctx context.Context, handle uint64) error {
	if err := c.take(ctx); err != nil {
		return err
	}
	defer c.give()
	_, err := c.send(ctx, TypeDrop, func(b []byte) []byte { return AppendHandle(b, handle) })
	return err
}

// Reset drops every page of this engine's namespace in the sidecar and returns
// how many they were. Stores that began before it are refused.
func (c *Client) Reset(ctx context.Context) (int, error) {
	body, err := c.call(ctx, TypeReset, nil)
	if err != nil {
		return 0, err
	}
	var a ResetAnswer
	if err := json.Unmarshal(body, &a); err != nil {
		return 0, fmt.Errorf("cannot decode the answer to reset: %w", err)
	}
	return a.Pages, nil
}

// Stats returns the sidecar's counters as JSON.
func (c *Client) Stats(ctx context.Context) (json.RawMessage, error) {
	return c.call(ctx, TypeStats, nil)
}

func (c *Client) callJSON(ctx context.Context, t Type, v any) ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("cannot encode %s: %w", t, err)
	}
	return c.call(ctx, t, body)
}

// call exchanges one frame and returns a copy of the answer's body.
func (c *Client) call(ctx context.Context, t Type, body []byte) ([]byte, error) {
	if err := c.take(ctx); err != nil {
		return nil, err
	}
	defer c.give()
	answer, err := c.send(ctx, t, func(b []byte) []byte { return append(b, body...) })
	return append([]byte(nil), answer...), err
}

// send exchanges one frame; the answer is valid until the next call.
func (c *Client) send(ctx context.Context, t Type, body func([]byte) []byte) ([]byte, error) {
	return c.sendWith(ctx, t, body, nil)
}

// sendWith is send for a body that ends with tail, which is sent from where it
// is.
func (c *Client) sendWith(ctx context.Context, t Type, body func([]byte) []byte, tail []byte) ([]byte, error) {
	begin, err := c.begin(ctx, t)
	if err != nil {
		return nil, err
	}
	c.out = body(c.out)
	binary.LittleEndian.PutUint32(c.out[begin+lengthAt:], uint32(len(c.out)-begin-HeaderSize+len(tail)))
	if len(tail) == 0 {
		_, err = c.conn.Write(c.out)
	} else {
		parts := net.Buffers{c.out, tail}
		_, err = parts.WriteTo(c.conn)
	}
	if err != nil {
		return nil, c.spoil(err)
	}
	h, err := ReadHeader(c.r)
	if err != nil {
		return nil, c.spoil(err)
	}
	return c.finish(h, t)
}

// exchange is send for a frame whose answer may bring file descriptors.
func (c *Client) exchange(ctx context.Context, t Type, body []byte, files bool) ([]byte, []int, error) {
	if !files {
		answer, err := c.send(ctx, t, func(b []byte) []byte { return append(b, body...) })
		return answer, nil, err
	}
	begin, err := c.begin(ctx, t)
	if err != nil {
		return nil, nil, err
	}
	c.out = EndFrame(append(c.out, body...), begin)
	if _, err := c.conn.Write(c.out); err != nil {
		return nil, nil, c.spoil(err)
	}
	// Nothing is buffered between calls, so the descriptors' first byte is
	// still in the socket.
	h, fds, err := readHeaderWithFiles(c.conn.(*net.UnixConn))
	if err != nil {
		return nil, nil, c.spoil(err)
	}
	answer, err := c.finish(h, t)
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	return answer, fds, nil
}

func (c *Client) begin(ctx context.Context, t Type) (int, error) {
	if c.broken != nil {
		return 0, c.broken
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	deadline, ok := ctx.Deadline()
	if !ok || !guard.callDeadline() {
		deadline = time.Time{}
	}
	if err := c.conn.SetDeadline(deadline); err != nil {
		return 0, c.spoil(err)
	}
	c.id++
	var begin int
	c.out, begin = BeginFrame(c.out[:0], t, c.id)
	return begin, nil
}

func (c *Client) finish(h Header, t Type) ([]byte, error) {
	if h.Type == TypeError|AnswerBit {
		return nil, c.readError(h)
	}
	if h.Type != t|AnswerBit || h.ID != c.id {
		return nil, c.spoil(Errorf(CodeBadFrame, "type", "a %s frame with id %d instead of an answer to %s with id %d", h.Type, h.ID, t, c.id))
	}
	body, err := ReadBody(c.r, h, c.in)
	if err != nil {
		return nil, c.spoil(err)
	}
	c.in = body
	return body, nil
}

func (c *Client) readError(h Header) error {
	body, err := ReadBody(c.r, h, c.in)
	if err != nil {
		return c.spoil(err)
	}
	e, err := ParseError(body)
	if err != nil {
		return c.spoil(err)
	}
	if e.Code == CodeBadFrame || e.Code == CodeVersion {
		return c.spoil(e)
	}
	return e
}

// spoil marks the connection as unusable: after a failed exchange nobody knows
// where the next frame begins.
func (c *Client) spoil(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	if c.broken == nil {
		c.broken = fmt.Errorf("the connection is spent: %w", err)
	}
	_ = c.conn.Close()
	return err
}
