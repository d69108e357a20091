package capacity

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"membrane/bench"
	"membrane/kvwire"
)

// Cluster is the read capacity of clusters of two sizes.
type Cluster struct {
	// Share is the part of one processor that each node has.
	Share float64 `json:"share"`
	// Small and Large are page reads a second over all nodes of clusters of
	// three and of five, medians over the rounds.
	Small float64 `json:"three_nodes_per_s"`
	Large float64 `json:"five_nodes_per_s"`
	// Scaling is the median of Large / Small round by round; 5/3 is linear.
	Scaling float64 `json:"scaling"`
	// Got is which part of their shares the nodes used, the least of both
	// clusters, median over the rounds: below [LeastGot] the machine had no
	// more to give, or the readers were too slow, and the row says nothing.
	Got float64 `json:"got"`
	// Why says why it was not run; the figures are 0 then.
	Why string `json:"why,omitempty"`
}

const (
	smallCluster = 3
	largeCluster = 5
	// ClusterTarget is the least that five nodes must read of what three do.
	ClusterTarget = 1.6
	nodeShare     = 0.2
	// longer is how many times each a cluster is measured: a node gets its share
	// in pieces of 20 ms every 100 ms, so that a second has one more or less.
	longer = 3
	// readPage is a page in bytes, readPages how many a reader leases at a
	// time: so many that what it takes is the node's work, not the reader's.
	readPage  = 16 << 10
	readPages = 64
	tokens    = 16
	// prompts is how many a reader goes through: 16 MiB at each node, so that
	// three nodes do not fit into the processors' own caches either.
	prompts = 16
)

// RunCluster starts sidecars in one mesh that have a fifth of a core each, and
// matches, leases and releases resident pages at all at once. A node finds each
// page and checks its bytes; the reader, who has no share of his own, looks at
// one page of each lease in shared memory. A round takes three times each for
// either size, since a node gets its share in pieces. Where processes cannot be
// limited the answer says why.
func RunCluster(ctx context.Context, binaryPath string, rounds int, each time.Duration, say func(string)) (Cluster, error) {
	out := Cluster{Share: nodeShare}
	group, err := newShare()
	if errors.Is(err, ErrNoGroups) {
		out.Why = err.Error()
		say("clusters: not run: " + out.Why)
		return out, nil
	} else if err != nil {
		return out, err
	}
	dir, err := os.MkdirTemp("", "membrane-capacity-")
	if err != nil {
		return out, errors.Join(fmt.Errorf("cannot make a folder for sockets: %w", err), group.close())
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var nodes []*bench.Node
	err = func() error {
		for i := range largeCluster {
			args := []string{"--memory=64MiB", fmt.Sprintf("--page-tokens=%d", tokens)}
			if i > 0 {
				args = append(args, "--peer="+nodes[0].HTTP())
			}
			n, err := bench.StartNode(ctx, binaryPath, dir, fmt.Sprintf("c%d", i+1), args...)
			if err != nil {
				return err
			}
			nodes = append(nodes, n)
		}
		if err := bench.WaitForMesh(ctx, nodes); err != nil {
			return err
		}
		for _, n := range nodes {
			if err := group.put(n.PID(), nodeShare); err != nil {
				out.Why = err.Error()
				return nil
			}
		}
		return out.measure(ctx, nodes, rounds, each, say)
	}()
	for _, n := range nodes {
		n.Kill()
	}
	return out, errors.Join(err, group.close())
}

func (c *Cluster) measure(ctx context.Context, nodes []*bench.Node, rounds int, each time.Duration, say func(string)) error {
	readers := make([]*reader, len(nodes))
	for i, n := range nodes {
		r, err := newReader(ctx, n, i)
		if err != nil {
			return err
		}
		readers[i] = r
		defer r.close()
	}
	var small, large, ratio, got []float64
	for range rounds {
		var rate, had [2]float64
		for k, n := range []int{smallCluster, largeCluster} {
			var err error
			before, began := cpu(nodes[:n]), time.Now()
			if rate[k], err = together(ctx, readers[:n], longer*each); err != nil {
				return err
			}
			had[k] = (cpu(nodes[:n]) - before).Seconds() / time.Since(began).Seconds() / nodeShare / float64(n)
		}
		small, large, ratio = append(small, rate[0]), append(large, rate[1]), append(ratio, rate[1]/rate[0])
		got = append(got, min(had[0], had[1]))
	}
	c.Small, c.Large, c.Scaling = bench.Median(small), bench.Median(large), bench.Median(ratio)
	c.Got = bench.Median(got)
	say(fmt.Sprintf("clusters: %.0f pages/s of three nodes, %.0f of five, %.2f times, with %.0f %% of the shares used", c.Small, c.Large, c.Scaling, 100*c.Got))
	return nil
}

// cpu returns the processor time of nodes. One that ended adds none.
func cpu(nodes []*bench.Node) (sum time.Duration) {
	for _, n := range nodes {
		if t, err := n.CPU(); err == nil {
			sum += t
		}
	}
	return sum
}

// together returns page reads a second of all readers at once.
func together(ctx context.Context, readers []*reader, each time.Duration) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, each+time.Minute)
	defer cancel()
	var group sync.WaitGroup
	counts, errs := make([]int, len(readers)), make([]error, len(readers))
	began := time.Now()
	end := began.Add(each)
	for i, r := range readers {
		group.Go(func() {
			for time.Now().Before(end) && errs[i] == nil {
				errs[i] = r.read(ctx)
				counts[i] += readPages
			}
		})
	}
	group.Wait()
	total := 0
	for _, n := range counts {
		total += n
	}
	return float64(total) / time.Since(began).Seconds(), errors.Join(errs...)
}

// reader is one engine at one node that reads the pages of its prompts.
type reader struct {
	client  *kvwire.Client
	prompts [prompts]prompt
	locs    []kvwire.Location
	turn    int
}

// prompt is one that was stored.
type prompt struct {
	tokens []byte
	sums   []kvwire.Checksum
}

func newReader(ctx context.Context, n *bench.Node, index int) (*reader, error) {
	c, reg, err := n.Attach(ctx, "capacity", readPage, tokens, readPages)
	if err != nil {
		return nil, err
	}
	r := &reader{client: c}
	for k := range r.prompts {
		p := &r.prompts[k]
		for i := range readPages * tokens {
			p.tokens = binary.LittleEndian.AppendUint32(p.tokens, uint32(index<<20|k<<12|i))
		}
		if err := r.fill(ctx, reg, p); err != nil {
			r.close()
			return nil, err
		}
	}
	return r, nil
}

func (r *reader) fill(ctx context.Context, reg kvwire.Registered, p *prompt) error {
	l, err := r.match(ctx, p)
	if err != nil {
		return err
	}
	if reg.InboxSlots < readPages {
		return fmt.Errorf("cannot store %d pages: the inbox has %d slots", readPages, reg.InboxSlots)
	}
	var refs []kvwire.PageRef
	for i := range readPages {
		refs = append(refs, kvwire.PageRef{Handle: l.Handle, Page: uint32(i)})
	}
	slots, err := r.client.Reserve(ctx, refs, nil)
	if err != nil {
		return err
	}
	var commits []kvwire.Commit
	for i, s := range slots {
		if s.Status != kvwire.StoreSlot {
			return fmt.Errorf("cannot store page %d: status %d, %s", i, s.Status, s.Reason)
		}
		for k := range r.client.Slot(s.Slot)[:readPage] {
			r.client.Slot(s.Slot)[k] = byte(i+k) ^ p.tokens[1] // other bytes for each prompt
		}
		commits = append(commits, kvwire.Commit{PageRef: refs[i], Slot: s.Slot})
	}
	done, err := r.client.Commit(ctx, commits, nil)
	if err != nil {
		return err
	}
	for i, d := range done {
		if d.Status != kvwire.StoreStored {
			return fmt.Errorf("cannot store page %d: status %d, %s", i, d.Status, d.Reason)
		}
		p.sums = append(p.sums, d.Sum)
	}
	return r.client.Drop(ctx, l.Handle)
}

func (r *reader) match(ctx context.Context, p *prompt) (kvwire.Leased, error) {
	l, err := r.client.Match(ctx, kvwire.Match{DeadlineUS: 20e6, LeaseMS: 60_000, Flags: kvwire.MatchLocal, Tokens: p.tokens}, r.locs[:0])
	r.locs = l.Locations
	return l, err
}

// read leases the pages of the next prompt, looks at them and releases them.
func (r *reader) read(ctx context.Context) error {
	r.turn++
	p := &r.prompts[r.turn%prompts]
	l, err := r.match(ctx, p)
	if err != nil {
		return err
	}
	if l.Pages != readPages {
		return fmt.Errorf("%d of %d pages are held (%s)", l.Pages, readPages, l.Reason)
	}
	for i, at := range l.Locations {
		if at.Sum != p.sums[i] {
			return fmt.Errorf("page %d is not the one that was stored", i)
		}
	}
	page := r.turn % readPages
	at := l.Locations[page]
	if kvwire.Sum(r.client.Arena()[at.Offset:at.Offset+at.Length]) != at.Sum {
		return fmt.Errorf("page %d has wrong bytes", page)
	}
	outcome, err := r.client.Release(ctx, kvwire.Release{Lease: l.Lease})
	if err != nil {
		return err
	}
	if outcome != kvwire.ReleaseLive {
		return fmt.Errorf("the lease did not hold: outcome %d", outcome)
	}
	return r.client.Drop(ctx, l.Handle)
}

func (r *reader) close() { _ = r.client.Close() }
