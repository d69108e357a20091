package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"membrane/engines/llama"
)

// ChaosOptions tune [Chaos].
type ChaosOptions struct {
	// Binary is the membrane binary to run; "" is this one.
	Binary string
	// Duration is how long requests run, at least [MinChaos]. 0 means 10 min.
	Duration time.Duration
	// Seed chooses prompts, faults and their times.
	Seed uint64
	// Progress is called with a line for a person every few seconds.
	Progress func(string)
}

// MinChaos is the shortest run in which every kind of fault has its time.
const MinChaos = time.Minute

const (
	chaosModel  = "chaos"
	chaosLayers = 4
	chaosHidden = 64
	chaosPage   = 64 // tokens
	chaosBudget = 8 * mib
	chaosInbox  = 4 * mib
	// chaosLease is shorter than the longest stop of an engine, so that some
	// leases end while their engine cannot know.
	chaosLease = time.Second

	chaosStart  = time.Minute      // longest for all members to start
	chaosSettle = 30 * time.Second // longest until nothing is under way
	chaosTell   = 5 * time.Second
)

// The working set is four times the budget: 528 pages of 64 KiB, 8 MiB each.
var chaosTree = chaosShape{roots: 8, branches: 4, leaves: 4, root: 2, branch: 4, leaf: 3, pageTokens: chaosPage}

// chaos is one run.
type chaos struct {
	opts     ChaosOptions
	dir      string
	client   *http.Client
	leaves   []leafPrompt
	sidecars []*member
	engines  []*member
	tally    chaosTally
	memfds   map[string]string // inode to sidecar
	result   ChaosResult

	mu     sync.Mutex // guards what the goroutines of faults write
	faults map[string]int
	last   string
}

// Chaos starts three sidecars and six engines, every one a process of its own,
// has random prompts answered while members are killed, stopped and started
// again, and compares every token with a computation without any cache. At
// the end nothing may be held, left or grown. It returns an error when
// anything was not as promised.
func Chaos(ctx context.Context, opts ChaosOptions) (ChaosResult, error) {
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	if opts.Duration == 0 {
		opts.Duration = 10 * time.Minute
	}
	if opts.Duration < MinChaos {
		return ChaosResult{}, fmt.Errorf("cannot run chaos: duration %s is shorter than %s", opts.Duration, MinChaos)
	}
	if opts.Binary == "" {
		var err error
		if opts.Binary, err = executable(); err != nil {
			return ChaosResult{}, err
		}
	}
	dir, err := os.MkdirTemp("", "membrane-chaos-")
	if err != nil {
		return ChaosResult{}, fmt.Errorf("cannot make a folder for sockets: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	c := newChaos(opts, dir)
	err = c.run(ctx)
	return c.finish(ctx, err)
}

func newChaos(opts ChaosOptions, dir string) *chaos {
	c := &chaos{opts: opts, dir: dir, client: newChaosClient(), memfds: make(map[string]string), faults: make(map[string]int)}
	r := &c.result
	r.Seed, r.DurationS, r.BudgetBytes, r.InboxBytes = opts.Seed, opts.Duration.Seconds(), chaosBudget, chaosInbox
	return c
}

// prepare makes the tree's prompts and computes their answers.
func (c *chaos) prepare(ctx context.Context, tree chaosShape) error {
	model, err := llama.Generate(chaosModel, llama.WithLayers(chaosLayers), llama.WithHidden(chaosHidden))
	if err != nil {
		return err
	}
	prompts := tree.prompts(c.opts.Seed)
	c.result.Prompts = len(prompts)
	c.result.WorkingSetBytes = int64(tree.pages()) * int64(model.PageBytes(chaosPage))
	c.leaves, err = answers(ctx, model, prompts, chaosMaxTokens, c.opts.Progress)
	return err
}

// finish stops everything and says how it was.
func (c *chaos) finish(ctx context.Context, err error) (ChaosResult, error) {
	err = errors.Join(err, c.stop())
	r := &c.result
	r.Requests, r.Faults = c.tally.snapshot(), c.faults
	r.LeftProcesses, r.LeftMemfds = c.leftovers()
	r.Problems = append(c.tally.problems, r.verdict()...)
	if err != nil {
		r.Problems = append(r.Problems, err.Error())
	}
	if ctx.Err() != nil {
		return *r, fmt.Errorf("chaos was given up: %w", ctx.Err())
	}
	if len(r.Problems) > 0 {
		return *r, fmt.Errorf("chaos with seed %d: %d problems, the first: %s", r.Seed, len(r.Problems), r.Problems[0])
	}
	r.OK = true
	return *r, nil
}

func (c *chaos) run(ctx context.Context) error {
	c.opts.Progress(fmt.Sprintf("seed %d, %s of requests", c.opts.Seed, c.opts.Duration))
	if err := c.prepare(ctx, chaosTree); err != nil {
		return err
	}
	if err := c.start(ctx); err != nil {
		return err
	}
	told := make(chan struct{})
	telling, hush := context.WithCancel(ctx)
	go func() { defer close(told); c.tell(telling) }()
	defer func() { hush(); <-told }()

	warm := min(c.opts.Duration/5, 30*time.Second)
	r := &c.result
	r.WarmUpS = warm.Seconds()
	c.load(ctx, 0, warm)
	var err error
	if r.EarlySidecars, r.EarlyEngines, err = c.settle(ctx, chaosSettle); err != nil {
		return fmt.Errorf("after the warm-up: %w", err)
	}
	c.note("the warm-up is over; faults begin")
	errs := make(chan error, 1)
	go func() { errs <- c.hurt(ctx, makeFaults(c.opts.Seed, c.opts.Duration-warm)) }()
	c.load(ctx, chaosEngines, c.opts.Duration-warm)
	if err := <-errs; err != nil {
		return err
	}
	c.note("faults are over; every prompt once more at every sidecar")
	if _, _, err := c.settle(ctx, chaosSettle); err != nil {
		return fmt.Errorf("after the faults: %w", err)
	}
	c.replay(ctx)
	r.Sidecars, r.Engines, err = c.settle(ctx, chaosSettle)
	if err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	return nil
}

// hurt has the faults happen, each at its time, and returns when all are
// healed.
func (c *chaos) hurt(ctx context.Context, faults []fault) error {
	began := time.Now()
	var wg sync.WaitGroup
	var errs []error
	for _, f := range faults {
		if pause(ctx, time.Until(began.Add(f.at))) != nil {
			break
		}
		m := c.sidecars
		if f.kind.ofEngine() {
			m = c.engines
		}
		wg.Go(func() {
			err := m[f.target].suffer(ctx, f)
			c.mu.Lock()
			defer c.mu.Unlock()
			if err != nil {
				errs = append(errs, err)
				return
			}
			c.faults[f.kind.String()]++
			c.last = f.String()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// tell says every few seconds how far it is.
func (c *chaos) tell(ctx context.Context) {
	began := time.Now()
	for pause(ctx, chaosTell) == nil {
		c.note(time.Since(began).Round(time.Second).String())
	}
}

func (c *chaos) note(what string) {
	q := c.tally.snapshot()
	c.mu.Lock()
	n, last := 0, c.last
	for v := range maps.Values(c.faults) {
		n += v
	}
	c.mu.Unlock()
	line := fmt.Sprintf("%s: %d requests, %d right, %.0f %% reused, %d from peers, %d faults", what, q.Sent, q.Right, 100*q.ReusedShare(), q.PeerHits, n)
	if last != "" {
		line += ", the last " + last
	}
	if bad := q.Wrong + q.Failed + q.Late; bad > 0 {
		line += fmt.Sprintf(", %d WRONG, %d FAILED, %d LATE", q.Wrong, q.Failed, q.Late)
	}
	c.opts.Progress(line)
}

// start starts all members and waits until they have found each other.
func (c *chaos) start(ctx context.Context) error {
	key := c.dir + "/cluster.key"
	made, err := exec.CommandContext(ctx, c.opts.Binary, "keys", "cluster").Output()
	if err != nil {
		return fmt.Errorf("cannot make a cluster key: %w", err)
	}
	if err := os.WriteFile(key, made, 0o600); err != nil {
		return fmt.Errorf("cannot write the cluster key: %w", err)
	}
	ports, err := fixedPorts(2 * chaosNodes)
	if err != nil {
		return err
	}
	c.opts.Progress(fmt.Sprintf("starting %d sidecars and %d engines, a process each", chaosNodes, chaosEngines))
	ctx, cancel := context.WithTimeout(ctx, chaosStart)
	defer cancel()
	for n := range chaosNodes {
		c.sidecars = append(c.sidecars, c.newSidecar(n, key, ports[:chaosNodes], ports[chaosNodes+n]))
		if err := c.sidecars[n].start(ctx); err != nil {
			return err
		}
	}
	for e := range chaosEngines {
		n := e / chaosEnginesPerNode
		at := c.socket(n)
		if e%chaosEnginesPerNode == 1 { // finds the socket by the port, as one that knows no path
			at = "127.0.0.1:" + strconv.Itoa(ports[chaosNodes+n])
		}
		c.engines = append(c.engines, c.newEngine(e, at))
		if err := c.engines[e].start(ctx); err != nil {
			return err
		}
	}
	_, _, err = c.settle(ctx, chaosStart)
	return err
}

func (c *chaos) socket(n int) string { return fmt.Sprintf("%s/n%d.sock", c.dir, n+1) }

// newSidecar returns sidecar n, which has the same ports whenever it starts
// and knows the others by theirs, as in a StatefulSet.
func (c *chaos) newSidecar(n int, key string, http []int, enginePort int) *member {
	name := fmt.Sprintf("n%d", n+1)
	args := []string{
		fmt.Sprintf("--memory=%d", chaosBudget), fmt.Sprintf("--inbox=%d", chaosInbox), fmt.Sprintf("--page-tokens=%d", chaosPage),
		fmt.Sprintf("--port=%d", http[n]), fmt.Sprintf("--engine-addr=127.0.0.1:%d", enginePort),
		"--cluster-key-file=" + key, "--drain-timeout=5s",
	}
	for other, port := range http {
		if other != n {
			args = append(args, fmt.Sprintf("--peer=127.0.0.1:%d", port))
		}
	}
	return newMember("sidecar "+name, func(ctx context.Context) (*process, string, error) {
		s, err := startSidecar(ctx, c.opts.Binary, c.dir, name, args...)
		if err != nil {
			return nil, "", err
		}
		return s.process, s.http, nil
	})
}

func (c *chaos) newEngine(e int, at string) *member {
	name := fmt.Sprintf("e%d", e+1)
	args := []string{
		"engine", "--name=" + name, "--sidecar=" + at, "--model-id=" + chaosModel, fmt.Sprintf("--layers=%d", chaosLayers),
		fmt.Sprintf("--hidden=%d", chaosHidden), fmt.Sprintf("--block-tokens=%d", chaosPage), fmt.Sprintf("--deadline=%s", chaosDeadline),
		fmt.Sprintf("--lease=%s", chaosLease), fmt.Sprintf("--verify=%t", e%chaosEnginesPerNode == 1),
	}
	return newMember("engine "+name, func(ctx context.Context) (*process, string, error) {
		p, err := start(c.opts.Binary, "engine "+name, args...)
		if err != nil {
			return nil, "", err
		}
		fields, err := p.logged(ctx, "engine serving")
		if err != nil {
			p.kill()
			return nil, "", err
		}
		addr, _ := fields["http"].(string)
		return p, addr, nil
	})
}

// stop ends every process, engines first, and reports those that did not end
// as asked.
func (c *chaos) stop() error {
	c.opts.Progress("stopping")
	c.client.CloseIdleConnections()
	var errs []error
	for _, m := range append(c.engines, c.sidecars...) {
		if err := m.died(); err != nil {
			errs = append(errs, err)
			continue
		}
		if p := m.take(); p != nil {
			errs = append(errs, p.stop(stopPatience))
		}
	}
	return errors.Join(errs...)
}
