package kvwire

import (
	"encoding/binary"
	"slices"
)

// Hello is the body of a hello frame (JSON): the first message on a localhost
// or data connection, optional on the engine socket.
type Hello struct {
	// Key is an API key with the scope engine; "" where none is needed.
	Key string `json:"key,omitempty"`
	// Client names the asker in logs.
	Client string `json:"client,omitempty"`
}

// HelloAnswer is the body of the answer to a hello (JSON).
type HelloAnswer struct {
	Node string `json:"node"`
	// Server is the program and its version.
	Server string `json:"server"`
	// Socket is the path of the engine socket: a client that can open it moves
	// there and gets shared memory.
	Socket string `json:"socket,omitempty"`
}

// Role says which side of an engine a connection speaks for.
type Role string

// The roles of an engine's process.
const (
	// RoleScheduler matches, extends and leases. It gets no shared memory.
	RoleScheduler Role = "scheduler"
	// RoleWorker loads and stores one rank's shard.
	RoleWorker Role = "worker"
	// RoleBoth is an engine of one process.
	RoleBoth Role = "both"
)

// Register is the body of a register frame (JSON).
type Register struct {
	// Engine names the engine; all its processes use the same.
	Engine     string     `json:"engine"`
	Role       Role       `json:"role"`
	Model      ModelFacts `json:"model"`
	Descriptor Descriptor `json:"descriptor"`
	// InboxSlots is how many pages the connection wants to store at a time;
	// 0 where it stores none.
	InboxSlots int `json:"inbox_slots,omitempty"`
	// Inline asks for no shared memory even where there could be some.
	Inline bool `json:"inline,omitempty"`
	// PageTokens is how many tokens a page has, for an engine that names pages by
	// its own hashes: a multiple of the block. 0 leaves it to the sidecar.
	PageTokens int `json:"page_tokens,omitempty"`
}

// Registered is the body of the answer to a register (JSON). On the engine
// socket the file descriptors of the arena and, where InboxBytes > 0, of the
// inbox come with it (SCM_RIGHTS, in this order).
type Registered struct {
	Namespace  string `json:"namespace"`
	Form       string `json:"form"`
	PageTokens int    `json:"page_tokens"`
	// ObjectBytes is the size of this rank's object, in bytes.
	ObjectBytes int64  `json:"object_bytes"`
	Tenant      string `json:"tenant"`
	// SharedMemory is true when file descriptors come with the answer.
	SharedMemory bool  `json:"shared_memory"`
	ArenaBytes   int64 `json:"arena_bytes"`
	InboxBytes   int64 `json:"inbox_bytes"`
	InboxSlots   int   `json:"inbox_slots"`
	// SlotBytes is the distance between two inbox slots, in bytes.
	SlotBytes  int64 `json:"slot_bytes"`
	MaxLeaseMS int   `json:"max_lease_ms"`
}

// ResetAnswer is the body of the answer to a reset (JSON).
type ResetAnswer struct {
	Pages int `json:"pages"`
}

// Match flags.
const (
	// MatchLocal looks in this sidecar only.
	MatchLocal uint16 = 1 << 0
	// MatchPresence answers how much is held and leases nothing.
	MatchPresence uint16 = 1 << 1
)

// Match asks for the longest prefix of the tokens that can be had before the
// deadline.
//
//	offset  size  field
//	0       4     held: tokens that the engine already has; pages that lie wholly
//	              in them are neither fetched nor leased
//	4       4     deadline: microseconds from arrival
//	8       4     lease: milliseconds
//	12      2     flags: 1 local only, 2 presence only
//	14      2+n   extra key (length, text; length 0xFFFF: absent)
//	…       2+n   cache salt (likewise)
//	…       4     number of tokens
//	…       4×n   token ids
type Match struct {
	Held       uint32
	DeadlineUS uint32
	LeaseMS    uint32
	Flags      uint16
	Scope      Scope
	// Tokens is in wire form: four bytes an id, little endian.
	Tokens []byte
}

// AppendMatch appends the message in wire form.
func AppendMatch(b []byte, m Match) []byte {
	return append(AppendMatchHead(b, m), m.Tokens...)
}

// AppendMatchHead appends the message without its tokens, which follow it as
// they are.
func AppendMatchHead(b []byte, m Match) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.Held)
	b = binary.LittleEndian.AppendUint32(b, m.DeadlineUS)
	b = binary.LittleEndian.AppendUint32(b, m.LeaseMS)
	b = binary.LittleEndian.AppendUint16(b, m.Flags)
	b = appendOptional(b, m.Scope.ExtraKey)
	b = appendOptional(b, m.Scope.CacheSalt)
	return binary.LittleEndian.AppendUint32(b, uint32(len(m.Tokens)/tokenSize))
}

// ParseMatch decodes the message. Tokens lie in body.
func ParseMatch(body []byte) (Match, error) {
	m, head, err := ParseMatchHead(body, len(body))
	if err == nil {
		m.Tokens = body[head:]
	}
	return m, err
}

// MaxMatchHead is the most bytes that a match has before its tokens.
const MaxMatchHead = 4 + 4 + 4 + 2 + 2 + MaxSalt + 2 + MaxSalt + 4

// ParseMatchHead decodes what stands before the tokens of a match of length
// bytes, and returns how many bytes that is; the rest are the tokens. b is the
// message's beginning: MaxMatchHead bytes, or all of a shorter one.
func ParseMatchHead(b []byte, length int) (m Match, head int, err error) {
	d := decoder{b: b}
	m.Held, m.DeadlineUS, m.LeaseMS, m.Flags = d.u32(), d.u32(), d.u32(), d.u16()
	m.Scope.ExtraKey, m.Scope.CacheSalt = d.optional(), d.optional()
	if err := checkScope(m.Scope); err != nil {
		return m, 0, err
	}
	n := d.u32()
	head = len(b) - len(d.b)
	tokens := length - head
	switch {
	case d.short:
		err = Errorf(CodeBadFrame, "match", "the message ends too early")
	case tooMany(int(n), MaxTokens):
		err = Errorf(CodeTooLarge, "tokens", "%d tokens are more than %d", n, MaxTokens)
	case m.Flags&^(MatchLocal|MatchPresence) != 0:
		err = Errorf(CodeBadField, "flags", "%#04x has bits that are not defined", m.Flags)
	case tokens < int(n)*tokenSize:
		err = Errorf(CodeBadFrame, "match", "the message ends too early")
	case tokens > int(n)*tokenSize:
		err = Errorf(CodeBadFrame, "match", "%d bytes follow the message", tokens-int(n)*tokenSize)
	}
	return m, head, err
}

func checkScope(s Scope) error {
	if s.ExtraKey != nil && len(*s.ExtraKey) > MaxSalt {
		return Errorf(CodeTooLarge, "extra_key", "%d bytes are more than %d", len(*s.ExtraKey), MaxSalt)
	}
	if s.CacheSalt != nil && len(*s.CacheSalt) > MaxSalt {
		return Errorf(CodeTooLarge, "cache_salt", "%d bytes are more than %d", len(*s.CacheSalt), MaxSalt)
	}
	return nil
}

// Location says where an object lies in the arena.
type Location struct {
	Offset uint64
	Length uint64
	Sum    Checksum
}

// LocationSize is the wire size of a location, in bytes.
const LocationSize = 24

// Leased answers a match or a lease: where the pages are, and why no more.
//
//	offset  size  field
//	0       8     handle of the chain
//	8       8     lease, 0 when nothing is leased
//	16      4     lease: milliseconds granted
//	20      4     first leased page
//	24      4     leased pages; with presence only: held pages
//	28      4     full pages in the chain
//	32      4     pages that came from peers for this answer
//	36      2     shards of a page
//	38      1     reason why the page after the last is missing
//	39      1     zero
//	40      24×n  locations (offset, length, checksum), page by page, shard by
//	              shard within
type Leased struct {
	Handle     uint64
	Lease      uint64
	LeaseMS    uint32
	First      uint32
	Pages      uint32
	ChainPages uint32
	FromPeers  uint32
	Shards     uint16
	Reason     Reason
	Locations  []Location
}

// AppendLeased appends the message in wire form.
func AppendLeased(b []byte, l Leased) []byte {
	b = binary.LittleEndian.AppendUint64(b, l.Handle)
	b = binary.LittleEndian.AppendUint64(b, l.Lease)
	b = binary.LittleEndian.AppendUint32(b, l.LeaseMS)
	b = binary.LittleEndian.AppendUint32(b, l.First)
	b = binary.LittleEndian.AppendUint32(b, l.Pages)
	b = binary.LittleEndian.AppendUint32(b, l.ChainPages)
	b = binary.LittleEndian.AppendUint32(b, l.FromPeers)
	b = binary.LittleEndian.AppendUint16(b, l.Shards)
	b = append(b, byte(l.Reason), 0)
	b = slices.Grow(b, len(l.Locations)*LocationSize)
	for _, loc := range l.Locations {
		b = AppendLocation(b, loc)
	}
	return b
}

// AppendLocation appends one of the locations that a leased message ends with.
func AppendLocation(b []byte, l Location) []byte {
	b = binary.LittleEndian.AppendUint64(b, l.Offset)
	b = binary.LittleEndian.AppendUint64(b, l.Length)
	return binary.LittleEndian.AppendUint64(b, uint64(l.Sum))
}

// ParseLeased decodes the message; locations are appended to dst.
func ParseLeased(body []byte, dst []Location) (Leased, error) {
	d := decoder{b: body}
	l := Leased{
		Handle: d.u64(), Lease: d.u64(), LeaseMS: d.u32(), First: d.u32(), Pages: d.u32(),
		ChainPages: d.u32(), FromPeers: d.u32(), Shards: d.u16(), Reason: Reason(d.u8()),
	}
	d.u8()
	n := 0
	if l.Lease != 0 {
		n = int(l.Pages) * int(l.Shards)
	}
	if d.short || n*LocationSize != len(d.b) {
		return l, Errorf(CodeBadFrame, "locations", "%d bytes do not hold %d pages of %d shards", len(d.b), l.Pages, l.Shards)
	}
	in := d.bytes(n * LocationSize)
	at := len(dst)
	dst = slices.Grow(dst, n)[:at+n]
	for i := range dst[at:] {
		b := in[i*LocationSize:][:LocationSize]
		dst[at+i] = Location{
			Offset: binary.LittleEndian.Uint64(b), Length: binary.LittleEndian.Uint64(b[8:]),
			Sum: Checksum(binary.LittleEndian.Uint64(b[16:])),
		}
	}
	l.Locations = dst
	return l, d.end("leased")
}

// Extend adds tokens to a chain: a handle of eight bytes, a count of four and
// the token ids. The answer holds the full pages of the chain, four bytes.
type Extend struct {
	Handle uint64
	Tokens []byte
}

// AppendExtend appends the message in wire form.
func AppendExtend(b []byte, e Extend) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.Handle)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(e.Tokens)/tokenSize))
	return append(b, e.Tokens...)
}

// ParseExtend decodes the message. Tokens is a view of body.
func ParseExtend(body []byte) (Extend, error) {
	d := decoder{b: body}
	e := Extend{Handle: d.u64()}
	n := d.u32()
	if tooMany(int(n), MaxTokens) {
		return e, Errorf(CodeTooLarge, "tokens", "%d tokens are more than %d", n, MaxTokens)
	}
	e.Tokens = d.bytes(int(n) * tokenSize)
	return e, d.end("extend")
}

// LeaseRequest leases pages of a known chain; the answer is a [Leased].
//
//	offset  size  field
//	0       8     handle
//	8       4     first page
//	12      4     pages, at most
//	16      4     deadline: microseconds from arrival
//	20      4     lease: milliseconds
//	24      2     flags, as for match
type LeaseRequest struct {
	Handle     uint64
	First      uint32
	Pages      uint32
	DeadlineUS uint32
	LeaseMS    uint32
	Flags      uint16
}

// AppendLeaseRequest appends the message in wire form.
func AppendLeaseRequest(b []byte, l LeaseRequest) []byte {
	b = binary.LittleEndian.AppendUint64(b, l.Handle)
	b = binary.LittleEndian.AppendUint32(b, l.First)
	b = binary.LittleEndian.AppendUint32(b, l.Pages)
	b = binary.LittleEndian.AppendUint32(b, l.DeadlineUS)
	b = binary.LittleEndian.AppendUint32(b, l.LeaseMS)
	return binary.LittleEndian.AppendUint16(b, l.Flags)
}

// ParseLeaseRequest decodes the message.
func ParseLeaseRequest(body []byte) (LeaseRequest, error) {
	d := decoder{b: body}
	l := LeaseRequest{Handle: d.u64(), First: d.u32(), Pages: d.u32(), DeadlineUS: d.u32(), LeaseMS: d.u32(), Flags: d.u16()}
	if l.Flags&^(MatchLocal|MatchPresence) != 0 {
		return l, Errorf(CodeBadField, "flags", "%#04x has bits that are not defined", l.Flags)
	}
	return l, d.end("lease")
}

// Release gives a lease back: eight bytes of lease and one byte of flags. A
// worker's release counts for its rank, a scheduler's for all ranks.
type Release struct {
	Lease uint64
	// Verify asks the sidecar to check the leased bytes once more.
	Verify bool
}

// Release outcomes.
const (
	// ReleaseLive: the lease held until now, the copy is good.
	ReleaseLive uint8 = 0
	// ReleaseExpired: the lease ended before, the copy must not be used.
	ReleaseExpired uint8 = 1
	// ReleaseCorrupt: a leased page fails its checksum now, the copy must not
	// be used.
	ReleaseCorrupt uint8 = 2
)

// AppendRelease appends the message in wire form.
func AppendRelease(b []byte, r Release) []byte {
	b = binary.LittleEndian.AppendUint64(b, r.Lease)
	if r.Verify {
		return append(b, 1)
	}
	return append(b, 0)
}

// ParseRelease decodes the message.
func ParseRelease(body []byte) (Release, error) {
	d := decoder{b: body}
	r := Release{Lease: d.u64()}
	flags := d.u8()
	if flags > 1 {
		return r, Errorf(CodeBadField, "flags", "%#02x has bits that are not defined", flags)
	}
	r.Verify = flags == 1
	return r, d.end("release")
}

// PageRef names a page of a chain: eight bytes of handle, four of index.
type PageRef struct {
	Handle uint64
	Page   uint32
}

// AppendReserve appends the body of a reserve frame: a count of four bytes and
// the pages.
func AppendReserve(b []byte, pages []PageRef) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(pages)))
	for _, p := range pages {
		b = binary.LittleEndian.AppendUint64(b, p.Handle)
		b = binary.LittleEndian.AppendUint32(b, p.Page)
	}
	return b
}

// ParseReserve decodes the body of a reserve frame, appending to dst.
func ParseReserve(body []byte, dst []PageRef) ([]PageRef, error) {
	d := decoder{b: body}
	n := d.u32()
	if n > MaxBatch {
		return nil, Errorf(CodeTooLarge, "pages", "%d pages are more than %d", n, MaxBatch)
	}
	if len(d.b) != int(n)*12 {
		return nil, Errorf(CodeBadFrame, "pages", "%d bytes do not hold %d pages", len(d.b), n)
	}
	for range n {
		dst = append(dst, PageRef{Handle: d.u64(), Page: d.u32()})
	}
	return dst, d.end("reserve")
}

// StoreStatus says what became of a page in a reserve or commit.
type StoreStatus uint8

// The statuses.
const (
	// StoreSlot: write the page into the slot, then commit it.
	StoreSlot StoreStatus = 0
	// StoreExists: the page is held already, no bytes need to move.
	StoreExists StoreStatus = 1
	// StoreRefused: the page is not taken, the reason says why.
	StoreRefused StoreStatus = 2
	// StoreStored: the page is stored and can be read (commit only).
	StoreStored StoreStatus = 3
)

// Reservation is one page's answer to a reserve: one byte of status, one of
// reason, two zero, four of slot.
type Reservation struct {
	Status StoreStatus
	Reason Reason
	Slot   uint32
}

// AppendReservations appends the body of the answer to a reserve.
func AppendReservations(b []byte, rs []Reservation) []byte {
	for _, r := range rs {
		b = append(b, byte(r.Status), byte(r.Reason), 0, 0)
		b = binary.LittleEndian.AppendUint32(b, r.Slot)
	}
	return b
}

// ParseReservations decodes the body of the answer to a reserve, appending to
// dst.
func ParseReservations(body []byte, dst []Reservation) ([]Reservation, error) {
	if len(body)%8 != 0 {
		return nil, Errorf(CodeBadFrame, "reservations", "%d bytes are not a whole number of eight", len(body))
	}
	d := decoder{b: body}
	for len(d.b) > 0 {
		r := Reservation{Status: StoreStatus(d.u8()), Reason: Reason(d.u8())}
		d.u16()
		r.Slot = d.u32()
		dst = append(dst, r)
	}
	return dst, nil
}

// Commit publishes a slot that the engine has written: eight bytes of handle,
// four of page, four of slot.
type Commit struct {
	PageRef
	Slot uint32
}

// AppendCommits appends the body of a commit frame: a count of four bytes and
// the commits.
func AppendCommits(b []byte, cs []Commit) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(cs)))
	for _, c := range cs {
		b = binary.LittleEndian.AppendUint64(b, c.Handle)
		b = binary.LittleEndian.AppendUint32(b, c.Page)
		b = binary.LittleEndian.AppendUint32(b, c.Slot)
	}
	return b
}

// ParseCommits decodes the body of a commit frame, appending to dst.
func ParseCommits(body []byte, dst []Commit) ([]Commit, error) {
	d := decoder{b: body}
	n := d.u32()
	if n > MaxBatch {
		return nil, Errorf(CodeTooLarge, "commits", "%d pages are more than %d", n, MaxBatch)
	}
	if len(d.b) != int(n)*16 {
		return nil, Errorf(CodeBadFrame, "commits", "%d bytes do not hold %d commits", len(d.b), n)
	}
	for range n {
		dst = append(dst, Commit{PageRef: PageRef{Handle: d.u64(), Page: d.u32()}, Slot: d.u32()})
	}
	return dst, d.end("commit")
}

// Committed is one page's answer to a commit: one byte of status, one of
// reason, six zero, eight of checksum.
type Committed struct {
	Status StoreStatus
	Reason Reason
	Sum    Checksum
}

// AppendCommitted appends the body of the answer to a commit.
func AppendCommitted(b []byte, cs []Committed) []byte {
	for _, c := range cs {
		b = append(b, byte(c.Status), byte(c.Reason), 0, 0, 0, 0, 0, 0)
		b = binary.LittleEndian.AppendUint64(b, uint64(c.Sum))
	}
	return b
}

// ParseCommitted decodes the body of the answer to a commit, appending to dst.
func ParseCommitted(body []byte, dst []Committed) ([]Committed, error) {
	if len(body)%16 != 0 {
		return nil, Errorf(CodeBadFrame, "committed", "%d bytes are not a whole number of sixteen", len(body))
	}
	d := decoder{b: body}
	for len(d.b) > 0 {
		c := Committed{Status: StoreStatus(d.u8()), Reason: Reason(d.u8())}
		d.bytes(6)
		c.Sum = Checksum(d.u64())
		dst = append(dst, c)
	}
	return dst, nil
}

// Read asks for the leased pages inline: eight bytes of lease, four of first
// page (counted from the lease's first), four of pages. The answer is one page
// frame for each page of this rank's shard.
type Read struct {
	Lease uint64
	First uint32
	Pages uint32
}

// AppendRead appends the message in wire form.
func AppendRead(b []byte, r Read) []byte {
	b = binary.LittleEndian.AppendUint64(b, r.Lease)
	b = binary.LittleEndian.AppendUint32(b, r.First)
	return binary.LittleEndian.AppendUint32(b, r.Pages)
}

// ParseRead decodes the message.
func ParseRead(body []byte) (Read, error) {
	d := decoder{b: body}
	r := Read{Lease: d.u64(), First: d.u32(), Pages: d.u32()}
	if r.Pages > MaxBatch {
		return r, Errorf(CodeTooLarge, "pages", "%d pages are more than %d", r.Pages, MaxBatch)
	}
	return r, d.end("read")
}

// WriteHeaderSize is the size of the fixed part of a write frame's body.
const WriteHeaderSize = 16

// AppendWriteHeader appends the fixed part of a write frame's body, which
// stores one page inline: eight bytes of handle, four of page, four zero. The
// object follows it; the answer is that of a commit of one page.
func AppendWriteHeader(b []byte, p PageRef) []byte {
	b = binary.LittleEndian.AppendUint64(b, p.Handle)
	b = binary.LittleEndian.AppendUint32(b, p.Page)
	return append(b, 0, 0, 0, 0)
}

// ParseWriteHeader decodes the fixed part of a write frame's body.
func ParseWriteHeader(b []byte) (PageRef, error) {
	d := decoder{b: b}
	p := PageRef{Handle: d.u64(), Page: d.u32()}
	d.u32()
	return p, d.end("write")
}

// AppendHandle appends the body of a drop frame: eight bytes of handle.
func AppendHandle(b []byte, handle uint64) []byte {
	return binary.LittleEndian.AppendUint64(b, handle)
}

// ParseHandle decodes the body of a drop frame.
func ParseHandle(body []byte) (uint64, error) {
	d := decoder{b: body}
	h := d.u64()
	return h, d.end("handle")
}
