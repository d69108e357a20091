package replay

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"membrane/bench"
	"membrane/kvwire"
)

// NodesOptions are what a replay against sidecars is about.
type NodesOptions struct {
	// Binary is the executable of which sidecars are started.
	Binary string
	// Nodes is how many sidecars share the memory: 1 to MaxNodes, in one mesh.
	Nodes int
	// Fraction is the memory of all nodes together as a part of the distinct
	// blocks.
	Fraction float64
	// Random sends each request to any node instead of that of its session.
	Random bool
	// Speed waits for the trace's times, divided by it; 0 does not wait.
	Speed float64
	// TokenBytes is the KV of one token, for bytes moved.
	TokenBytes int64
	// Requests plays only the first ones; 0 plays all.
	Requests int
	// Progress is told how far the replay is; nil tells nobody.
	Progress func(string)
}

// MaxNodes is the most sidecars of one replay.
const MaxNodes = 16

// standIn is how many tokens and bytes stand for a block. A token of the
// sidecar is one of 16 of a block whatever the trace's blocks are.
const (
	standInTokens = 16
	standInBytes  = 256
	inboxSlots    = 256
)

// NodesReport is a trace played against sidecars.
type NodesReport struct {
	Trace    string  `json:"trace"`
	About    string  `json:"about"`
	Nodes    int     `json:"nodes"`
	Random   bool    `json:"random"`
	Fraction float64 `json:"fraction"`
	Blocks   int     `json:"blocks"` // in all nodes together
	Requests int     `json:"requests"`
	// Local, Peers and Miss are parts of all input tokens: loaded from pages
	// that the node had, from pages that it fetched, and computed.
	Local float64 `json:"local"`
	Peers float64 `json:"peers"`
	Miss  float64 `json:"miss"`
	// Moved is KV that went from node to node in bytes, Carried what really
	// went, in pages that stand for it.
	Moved   int64 `json:"moved_bytes"`
	Carried int64 `json:"carried_bytes"`
	// Verified counts pages whose bytes were compared after they were loaded.
	// One that differs ends the replay.
	Verified int64 `json:"verified_pages"`
	// Refused counts pages that a sidecar did not store.
	Refused int64         `json:"refused_pages"`
	Elapsed time.Duration `json:"elapsed_ns"`
}

func (o NodesOptions) check() error {
	switch {
	case o.Nodes < 1 || o.Nodes > MaxNodes:
		return fmt.Errorf("cannot replay against %d nodes: not between 1 and %d", o.Nodes, MaxNodes)
	case !(o.Fraction >= minFraction && o.Fraction <= 1):
		return fmt.Errorf("cannot replay with memory of %v of the footprint: not between %v and 1", o.Fraction, minFraction)
	case !(o.Speed >= 0):
		return fmt.Errorf("cannot replay at speed %v: below 0", o.Speed)
	case o.TokenBytes < 0 || o.TokenBytes > 1<<30:
		return fmt.Errorf("cannot replay with TokenBytes %d: not between 0 and %d", o.TokenBytes, 1<<30)
	}
	return nil
}

// RunNodes plays a trace against sidecars that it starts, as one engine at each
// does: match, copy out of shared memory, release, reserve, commit.
func RunNodes(ctx context.Context, t *Trace, opts NodesOptions) (NodesReport, error) {
	if err := opts.check(); err != nil {
		return NodesReport{}, err
	}
	f := t.Facts()
	r := NodesReport{Trace: t.Name, About: t.About, Nodes: opts.Nodes, Random: opts.Random, Fraction: opts.Fraction}
	r.Blocks = int(opts.Fraction * float64(f.Distinct))
	dir, err := os.MkdirTemp("", "membrane-replay-")
	if err != nil {
		return r, fmt.Errorf("cannot make a folder for sockets: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var attached []*attachment
	defer func() {
		for _, a := range attached {
			a.close()
		}
	}()
	memory := max(int64(r.Blocks/opts.Nodes)*standInBytes, 1<<20)
	r.Blocks = int(memory/standInBytes) * opts.Nodes // not below the smallest arenas
	r.Fraction = float64(r.Blocks) / float64(max(f.Distinct, 1))
	var nodes []*bench.Node
	for i := range opts.Nodes {
		args := []string{fmt.Sprintf("--memory=%d", memory), fmt.Sprintf("--page-tokens=%d", standInTokens)}
		if i > 0 {
			args = append(args, "--peer="+nodes[0].HTTP())
		}
		n, err := bench.StartNode(ctx, opts.Binary, dir, fmt.Sprintf("n%d", i+1), args...)
		if err != nil {
			return r, err
		}
		a := &attachment{node: n, report: &r}
		attached, nodes = append(attached, a), append(nodes, n)
		if a.client, a.reg, err = n.Attach(ctx, "replay", standInBytes, standInTokens, inboxSlots); err != nil {
			return r, err
		}
	}
	if err := bench.WaitForMesh(ctx, nodes); err != nil {
		return r, err
	}
	return r, r.play(ctx, t, attached, opts)
}

func (r *NodesReport) play(ctx context.Context, t *Trace, nodes []*attachment, opts NodesOptions) error {
	dice := rand.New(rand.NewPCG(1, 7))
	began := time.Now()
	var local, peers, input int64
	for i := range t.Requests {
		if opts.Requests > 0 && i == opts.Requests {
			break
		}
		req := &t.Requests[i]
		if err := wait(ctx, began, req.At, opts.Speed); err != nil {
			return err
		}
		k := int(req.Session % uint64(len(nodes)))
		if opts.Random {
			k = dice.IntN(len(nodes))
		}
		here, fetched, err := nodes[k].request(ctx, req.Blocks)
		if err != nil {
			return fmt.Errorf("cannot replay request %d of %q at node %d: %w", i, t.Name, k+1, err)
		}
		r.Requests++
		local += int64(here * t.BlockTokens)
		peers += int64(fetched * t.BlockTokens)
		input += int64(req.Input)
		r.Carried += int64(fetched) * standInBytes
		if opts.Progress != nil && i%2000 == 1999 {
			opts.Progress(fmt.Sprintf("%s: %d of %d requests", t.Name, i+1, len(t.Requests)))
		}
	}
	total := float64(max(input, 1))
	r.Local, r.Peers = float64(local)/total, float64(peers)/total
	r.Miss = 1 - r.Local - r.Peers
	r.Moved = peers * opts.TokenBytes
	r.Elapsed = time.Since(began)
	return nil
}

// wait waits until a request is due.
func wait(ctx context.Context, began time.Time, at time.Duration, speed float64) error {
	if speed == 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(time.Until(began.Add(time.Duration(float64(at) / speed))))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// attachment is an engine at one node.
type attachment struct {
	node   *bench.Node
	client *kvwire.Client
	reg    kvwire.Registered
	report *NodesReport

	tokens  []byte
	locs    []kvwire.Location
	refs    []kvwire.PageRef
	commits []kvwire.Commit
}

func (a *attachment) close() {
	if a.client != nil {
		_ = a.client.Close()
	}
	a.node.Kill()
}

// requestTimeout is how long one request may take, far above what it does.
const requestTimeout = 30 * time.Second

// request loads the prefix that is held and stores the rest. It returns how
// many pages the node had and how many it fetched.
func (a *attachment) request(ctx context.Context, blocks []uint64) (local, fetched int, err error) {
	if len(blocks) == 0 {
		return 0, 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	a.tokens = a.tokens[:0]
	for _, b := range blocks {
		for k := range uint64(standInTokens) {
			a.tokens = binary.LittleEndian.AppendUint32(a.tokens, uint32(mix(b+k)))
		}
	}
	l, err := a.client.Match(ctx, kvwire.Match{DeadlineUS: 5e6, LeaseMS: 20_000, Tokens: a.tokens}, a.locs[:0])
	if err != nil {
		return 0, 0, err
	}
	a.locs = l.Locations
	if l.Pages > 0 {
		arena := a.client.Arena()
		for i, at := range l.Locations {
			if !compare(arena[at.Offset:at.Offset+at.Length], blocks[i]) {
				return 0, 0, fmt.Errorf("page %d has other bytes than were stored", i)
			}
			a.report.Verified++
		}
		outcome, err := a.client.Release(ctx, kvwire.Release{Lease: l.Lease})
		if err != nil {
			return 0, 0, err
		}
		if outcome != kvwire.ReleaseLive {
			return 0, 0, fmt.Errorf("the lease of %d pages did not hold: outcome %d", l.Pages, outcome)
		}
	}
	if err := a.store(ctx, l.Handle, int(l.Pages), blocks); err != nil {
		return 0, 0, err
	}
	return int(l.Pages - l.FromPeers), int(l.FromPeers), a.client.Drop(ctx, l.Handle)
}

// store stores all pages from first on.
func (a *attachment) store(ctx context.Context, handle uint64, first int, blocks []uint64) error {
	for ; first < len(blocks); first += inboxSlots {
		a.refs, a.commits = a.refs[:0], a.commits[:0]
		for i := first; i < min(first+inboxSlots, len(blocks)); i++ {
			a.refs = append(a.refs, kvwire.PageRef{Handle: handle, Page: uint32(i)})
		}
		slots, err := a.client.Reserve(ctx, a.refs, nil)
		if err != nil {
			return err
		}
		for i, s := range slots {
			switch s.Status {
			case kvwire.StoreSlot:
				write(a.client.Slot(s.Slot)[:standInBytes], blocks[first+i])
				a.commits = append(a.commits, kvwire.Commit{PageRef: a.refs[i], Slot: s.Slot})
			case kvwire.StoreExists:
			default:
				a.report.Refused++
			}
		}
		done, err := a.client.Commit(ctx, a.commits, nil)
		if err != nil {
			return err
		}
		for _, d := range done {
			if d.Status != kvwire.StoreStored && d.Status != kvwire.StoreExists {
				a.report.Refused++
			}
		}
	}
	return nil
}

// WriteNodesMarkdown writes rows of replays against sidecars.
func WriteNodesMarkdown(w io.Writer, rows []NodesReport) error {
	var b strings.Builder
	tab := nodesTable(rows)
	fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(tab.head, " | "), strings.Repeat("---|", len(tab.head)))
	for _, row := range tab.rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteNodesText writes the same for a terminal.
func WriteNodesText(w io.Writer, rows []NodesReport) error {
	tw := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	tab := nodesTable(rows)
	fmt.Fprintln(tw, strings.Join(tab.head, "\t"))
	for _, row := range tab.rows {
		fmt.Fprintln(tw, strings.Join(row, "\t"))
	}
	return tw.Flush()
}

func nodesTable(rows []NodesReport) table {
	out := table{head: []string{"trace", "nodes", "requests go to", "memory", "local", "from peers", "miss", "GB between nodes", "pages compared", "refused", "seconds"}}
	for _, r := range rows {
		to := "their session's node"
		if r.Random {
			to = "any node"
		}
		out.rows = append(out.rows, []string{
			r.Trace, fmt.Sprint(r.Nodes), to, fmt.Sprintf("%.1f %%", 100*r.Fraction), fmt.Sprintf("%.4f", r.Local), fmt.Sprintf("%.4f", r.Peers),
			fmt.Sprintf("%.4f", r.Miss), fmt.Sprintf("%.0f", float64(r.Moved)/1e9), fmt.Sprint(r.Verified), fmt.Sprint(r.Refused), fmt.Sprintf("%.0f", r.Elapsed.Seconds()),
		})
	}
	return out
}
