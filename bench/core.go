package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"membrane/kvwire"
)

// CoreOptions tune [Core]. The zero value measures in full.
type CoreOptions struct {
	// Binary is the membrane binary that is measured; "" is this one.
	Binary string
	// Version is what the report says of it.
	Version string
	// Rounds is how often every figure is taken, all in turn. 0 means 15, or 3
	// with Quick.
	Rounds int
	// Quick measures with less memory and fewer rounds, to see that all rows
	// work.
	Quick bool
	// VLLM says which vLLM is measured; without one its rows are not run.
	VLLM VLLMOptions
	// VLLMOnly measures nothing else.
	VLLMOnly bool
	// Progress is called with a line for a person now and then.
	Progress func(string)
}

const (
	mib         = 1 << 20
	bigPage     = 2 * mib
	matchTokens = 100_000
	leasePages  = 64
	// leaseBigPages keeps within a client's quarter of the smallest budget.
	leaseBigPages = 32
)

// core is one run of the core benchmark.
type core struct {
	opts   CoreOptions
	dir    string
	copies *copier
	dst    []byte
	ids    uint32 // the next token id that no prompt has begun with

	near, far        *rig // 2 MiB pages; far fills from near
	small            *rig // 64 tiny pages
	match16, match8x *rig // 16-token and 128-token pages
	bare             tcpCopier
	stopSource       func()

	memcpy, tcp, ping samples
	by16, by128       matchSamples
	leaseUS, leaseB   samples
	read, store, fill samples
	idle              [2]Row
	full              Row
	vllm              vllmFigures
}

// Core measures the paths that everything else stands on: match, lease, read
// from shared memory, store and fill from a peer, each as a ratio to a ceiling
// of the same round.
func Core(ctx context.Context, opts CoreOptions) (Report, error) {
	if opts.Rounds == 0 {
		opts.Rounds = 15
		if opts.Quick {
			opts.Rounds = 3
		}
	}
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	if opts.Binary == "" {
		var err error
		if opts.Binary, err = executable(); err != nil {
			return Report{}, err
		}
	}
	dir, err := os.MkdirTemp("", "membrane-bench-")
	if err != nil {
		return Report{}, fmt.Errorf("cannot make a folder for sockets: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	c := &core{opts: opts, dir: dir, ids: 1}
	defer c.close()
	if opts.VLLM.Python != "" {
		// First, while no other process holds memory.
		var err error
		if c.vllm, err = measureVLLM(ctx, opts.VLLM, opts.Binary, dir, opts.Rounds, opts.Progress); err != nil {
			return Report{}, fmt.Errorf("cannot measure vLLM: %w", err)
		}
	}
	if opts.VLLMOnly {
		return c.report()
	}
	for _, once := range []func(context.Context) error{c.measureIdle, c.measureMemory} {
		if err := once(ctx); err != nil {
			return Report{}, err
		}
	}
	if err := c.open(ctx); err != nil {
		return Report{}, err
	}
	for round := range opts.Rounds {
		opts.Progress(fmt.Sprintf("round %d of %d", round+1, opts.Rounds))
		if err := c.round(ctx); err != nil {
			return Report{}, fmt.Errorf("cannot finish round %d: %w", round+1, err)
		}
	}
	return c.report()
}

// budget returns the arena size of the sidecars with big pages. A client may
// lease a quarter of it.
func (c *core) budget() int {
	if c.opts.Quick {
		return 256 * mib
	}
	return 1024 * mib
}

func (c *core) open(ctx context.Context) (err error) {
	c.opts.Progress("touching memory")
	copySize := c.budget() / 2
	if c.copies, err = newCopier(copySize); err != nil {
		return err
	}
	if c.dst, err = newDestination(copySize); err != nil {
		return err
	}
	c.opts.Progress("starting sidecars")
	memory := fmt.Sprintf("--memory=%dMiB", c.budget()/mib)
	if c.near, err = c.rig(ctx, "near", bigPage, 64, 16, memory); err != nil {
		return err
	}
	if c.far, err = c.rig(ctx, "far", bigPage, 64, 0, memory, "--peer="+c.near.sidecar.http); err != nil {
		return err
	}
	if c.small, err = c.rig(ctx, "small", 4096, 64, 64, "--memory=64MiB"); err != nil {
		return err
	}
	if c.match16, err = c.rig(ctx, "match16", 256, 16, 256, "--memory=64MiB", "--page-tokens=16"); err != nil {
		return err
	}
	if c.match8x, err = c.rig(ctx, "match128", 2048, 128, 256, "--memory=64MiB", "--page-tokens=128"); err != nil {
		return err
	}
	if err := waitForPeer(ctx, c.far.sidecar.http, c.near.sidecar.name); err != nil {
		return err
	}
	return c.openSource()
}

// openSource starts the far end of the bare TCP copy.
func (c *core) openSource() error {
	cmd := exec.Command(c.opts.Binary, "bench", "frame-source", fmt.Sprintf("--memory=%d", c.budget()/2))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("cannot start the frame source: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("cannot start the frame source: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("cannot start the frame source: %w", err)
	}
	c.stopSource = func() {
		_ = stdin.Close() // which ends it
		_ = cmd.Wait()
	}
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return fmt.Errorf("cannot read the frame source's address: %w", err)
	}
	conn, err := net.Dial("tcp", strings.TrimSpace(addr))
	if err != nil {
		return fmt.Errorf("cannot reach the frame source: %w", err)
	}
	c.bare = tcpCopier{conn: conn, dst: c.dst}
	return nil
}

func (c *core) close() {
	for _, r := range []*rig{c.near, c.far, c.small, c.match16, c.match8x} {
		if r != nil {
			r.close()
		}
	}
	if c.bare.conn != nil {
		_ = c.bare.conn.Close()
	}
	if c.stopSource != nil {
		c.stopSource()
	}
	if c.copies != nil {
		_ = c.copies.close()
	}
	if c.dst != nil {
		_ = unix.Munmap(c.dst)
	}
}

// prompt returns n token ids in wire form that begin as no other prompt does.
func (c *core) prompt(n int) []byte {
	b := make([]byte, 0, 4*n)
	b = binary.LittleEndian.AppendUint32(b, c.ids)
	c.ids++
	for i := 1; i < n; i++ {
		b = binary.LittleEndian.AppendUint32(b, uint32(i))
	}
	return b
}

func (c *core) round(ctx context.Context) error {
	for _, step := range []func(context.Context) error{c.roundMatch, c.roundLease, c.roundPages} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// matchSamples are the times of a match and of the bare hash chain beside it.
type matchSamples struct {
	chain, match         samples // each the median of a round's repeats
	coldChain, coldMatch samples // the first of a round, after other work
}

// matchRepeat is how often a round repeats a match after the first one.
const matchRepeat = 7

// roundMatch times matches of a prompt that is all held, each beside the bare
// hash chain: once as the round finds the machine, its caches full of other
// things, and then again and again.
func (c *core) roundMatch(ctx context.Context) error {
	for _, m := range []struct {
		rig  *rig
		page int
		into *matchSamples
	}{{c.match16, 16, &c.by16}, {c.match8x, 128, &c.by128}} {
		if m.rig.held == nil {
			m.rig.held = c.prompt(matchTokens)
			if err := m.rig.store(ctx, m.rig.held, m.page, nil); err != nil {
				return err
			}
		}
		var chains, matches samples
		for range 1 + matchRepeat {
			chains = append(chains, micros(bareChain(m.rig.held, m.page)))
			took, err := m.rig.timeMatch(ctx, matchTokens/m.page)
			if err != nil {
				return err
			}
			matches = append(matches, micros(took))
		}
		m.into.coldChain = append(m.into.coldChain, chains[0])
		m.into.coldMatch = append(m.into.coldMatch, matches[0])
		m.into.chain = append(m.into.chain, chains[1:].median())
		m.into.match = append(m.into.match, matches[1:].median())
	}
	return nil
}

// roundLease times a lease and release of 64 pages, and an empty request
// beside it.
func (c *core) roundLease(ctx context.Context) error {
	const repeat = 50
	for _, m := range []struct {
		rig      *rig
		into     *samples
		pages, n int
	}{{c.small, &c.leaseUS, leasePages, repeat}, {c.near, &c.leaseB, leaseBigPages, 3}} {
		if m.rig.held == nil {
			m.rig.held = c.prompt(m.pages * 64)
			if err := m.rig.store(ctx, m.rig.held, 64, nil); err != nil {
				return err
			}
		}
		l, err := m.rig.match(ctx, m.rig.held, kvwire.MatchPresence)
		if err != nil {
			return err
		}
		begin := time.Now()
		for range m.n {
			leased, err := m.rig.client.Lease(ctx, kvwire.LeaseRequest{Handle: l.Handle, Pages: uint32(m.pages), DeadlineUS: 1e6, LeaseMS: 10_000}, m.rig.locations[:0])
			if err != nil {
				return err
			}
			if int(leased.Pages) != m.pages {
				return fmt.Errorf("%d of %d pages are leased (%s)", leased.Pages, m.pages, leased.Reason)
			}
			if _, err := m.rig.client.Release(ctx, kvwire.Release{Lease: leased.Lease}); err != nil {
				return err
			}
		}
		*m.into = append(*m.into, micros(time.Since(begin))/float64(m.n))
		if err := m.rig.client.Drop(ctx, l.Handle); err != nil {
			return err
		}
	}
	begin := time.Now()
	for range repeat {
		if err := c.small.client.Ping(ctx); err != nil {
			return err
		}
	}
	c.ping = append(c.ping, micros(time.Since(begin))/repeat)
	return nil
}

// roundPages times store, read and fill of 2 MiB pages, and the copies beside
// them.
func (c *core) roundPages(ctx context.Context) error {
	pages := c.budget() / 8 / bigPage
	bytes := pages * bigPage
	c.memcpy = append(c.memcpy, c.copies.run(bytes, bigPage))

	tokens := c.prompt(pages * 64)
	begin := time.Now()
	if err := c.near.store(ctx, tokens, 64, &begin); err != nil {
		return err
	}
	c.store = append(c.store, gbs(bytes, time.Since(begin)))

	l, err := c.near.match(ctx, tokens, 0)
	if err != nil {
		return err
	}
	if int(l.Pages) != pages {
		return fmt.Errorf("%d of %d pages are leased (%s)", l.Pages, pages, l.Reason)
	}
	begin = time.Now()
	arena := c.near.client.Arena()
	for i, loc := range l.Locations {
		at := i * bigPage % (len(c.dst) - bigPage + 1)
		copy(c.dst[at:at+bigPage], arena[loc.Offset:loc.Offset+loc.Length])
	}
	c.read = append(c.read, gbs(bytes, time.Since(begin)))
	if err := c.near.end(ctx, l); err != nil {
		return err
	}

	bare, err := c.bare.run(bigPage, pages)
	if err != nil {
		return err
	}
	c.tcp = append(c.tcp, bare)
	return c.timeFill(ctx, tokens, pages)
}

func (c *core) timeFill(ctx context.Context, tokens []byte, pages int) error {
	if err := c.waitForDirectory(ctx); err != nil {
		return err
	}
	begin := time.Now()
	l, err := c.far.match(ctx, tokens, 0)
	if err != nil {
		return err
	}
	c.fill = append(c.fill, gbs(pages*bigPage, time.Since(begin)))
	if int(l.FromPeers) != pages || int(l.Pages) != pages {
		return fmt.Errorf("%d of %d pages came from the peer, %d are leased (%s)", l.FromPeers, pages, l.Pages, l.Reason)
	}
	return c.far.end(ctx, l)
}

// waitForDirectory returns when the far sidecar knows what the near one holds:
// it has filled a page that was stored last.
func (c *core) waitForDirectory(ctx context.Context) error {
	marker := c.prompt(64)
	if err := c.near.store(ctx, marker, 64, nil); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	return poll(ctx, "the far sidecar's directory", func() (bool, error) {
		l, err := c.far.match(ctx, marker, 0)
		if err != nil || l.Pages == 0 {
			return false, err
		}
		return true, c.far.end(ctx, l)
	})
}

// report turns the samples into rows.
func (c *core) report() (Report, error) {
	r := Report{Machine: thisMachine(c.opts.Version)}
	if c.opts.VLLMOnly {
		return c.vllm.report(r)
	}
	r.Ceilings = []Row{
		c.memcpy.row("memcpy, 2 MiB pieces", "GB/s"),
		c.tcp.row("bare TCP copy, 2 MiB frames", "GB/s"),
		c.ping.row("empty request on the engine socket", "µs"),
		c.by16.chain.row("bare SHA-256 chain, 100,000 tokens, 16 a page", "µs"),
		c.by128.chain.row("bare SHA-256 chain, 100,000 tokens, 128 a page", "µs"),
	}
	for _, f := range []struct {
		s         samples
		name      string
		unit      string
		to        samples
		toName    string
		target    string
		pathAndOp [2]string
	}{
		{c.by16.match, "match, 100,000 tokens, 16 a page", "µs", c.by16.chain, "bare chain", "<= 2.5", [2]string{}},
		{c.by128.match, "match, 100,000 tokens, 128 a page", "µs", c.by128.chain, "bare chain", "<= 2.5", [2]string{}},
		{c.by16.coldMatch, "match after other work, 16 a page", "µs", c.by16.coldChain, "bare chain", "", [2]string{}},
		{c.by128.coldMatch, "match after other work, 128 a page", "µs", c.by128.coldChain, "bare chain", "", [2]string{}},
		{c.leaseUS, "lease and release, 64 pages of 4 KiB", "µs", c.ping, "empty request", "<= 8", [2]string{}},
		{c.leaseB, "lease and release, 32 pages of 2 MiB, each checked", "µs", c.ping, "empty request", "", [2]string{}},
		{c.read, "read from shared memory, 2 MiB pages", "GB/s", c.memcpy, "memcpy", ">= 0.9", [2]string{"shared memory", "read"}},
		{c.store, "store, 2 MiB pages", "GB/s", c.memcpy, "memcpy", ">= 0.2", [2]string{"shared memory", "store"}},
		{c.fill, "peer fill, 2 MiB pages", "GB/s", c.tcp, "bare TCP copy", ">= 0.8", [2]string{"data port", "fill"}},
	} {
		row, err := f.s.against(f.s.row(f.name, f.unit), f.to, f.toName, f.target)
		if err != nil {
			return r, err
		}
		if f.pathAndOp[0] != "" {
			row.Throughput = &Throughput{
				System: "membrane", Path: f.pathAndOp[0], Op: f.pathAndOp[1], Size: bigPage, Batch: 1, Streams: 1,
				GBs: row.Value, OpsS: row.Value * 1e9 / bigPage, Verified: true,
			}
		}
		r.Rows = append(r.Rows, row)
	}
	r.Rows = append(append(r.Rows, c.full), c.idle[:]...)
	return c.vllm.report(r)
}
