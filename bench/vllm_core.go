package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"membrane/kvwire"
)

const (
	vllmTokens = 2001
	vllmAnswer = 8 // tokens generated and compared
	vllmPage   = 64
	// vllmWarmUp prompts come first and are not counted: they touch memory that
	// no prompt has touched before.
	vllmWarmUp = 1
	// vllmHeld is how many of a prompt's tokens lie in whole pages.
	vllmHeld = vllmTokens / vllmPage * vllmPage
)

// vllmFigures are the first-token times of one run in milliseconds, a prompt
// each, and the share of a miss that is membrane's own in percent.
type vllmFigures struct {
	cold, missed, filled, baseline, local, peer samples
	lmcache                                     samples // empty where there is none
	overhead                                    samples
}

// vllmCore measures real vLLM: one server with membrane's connector and two
// sidecars, one with the baseline connector, which also computes what is
// compared with, and where there is one, a third with LMCache's connector and
// server. Those that are not measured are stopped.
type vllmCore struct {
	host      *vllmHost
	progress  func(string)
	near, far *sidecar // near is the measured server's own
	// nearClient and farClient speak to the sidecars as engines of the same
	// namespace.
	nearClient, farClient *kvwire.Client
	ours, base            *vllmServer
	theirs                *vllmServer // nil without LMCache
	theirCache            *group
	stats                 string // path of the connector's counters
	pageBytes             int64
	figures               vllmFigures
}

// measureVLLM takes every first-token time of the given number of prompts.
func measureVLLM(ctx context.Context, opts VLLMOptions, binary, dir string, prompts int, progress func(string)) (vllmFigures, error) {
	host, err := newVLLMHost(ctx, opts, binary, dir)
	if err != nil {
		return vllmFigures{}, err
	}
	v := &vllmCore{host: host, progress: progress, stats: filepath.Join(dir, "connector")}
	files, err := os.MkdirTemp("/dev/shm", "membrane-baseline-")
	if err != nil {
		return vllmFigures{}, fmt.Errorf("cannot make a folder on tmpfs: %w", err)
	}
	defer func() { _ = os.RemoveAll(files) }()
	defer v.close()
	if err := v.open(ctx, files); err != nil {
		return vllmFigures{}, err
	}
	for i := range prompts + vllmWarmUp {
		if err := v.round(ctx, i); err != nil {
			return vllmFigures{}, fmt.Errorf("cannot finish prompt %d: %w", i+1-vllmWarmUp, err)
		}
		if i < vllmWarmUp {
			v.figures = vllmFigures{}
			continue
		}
		i -= vllmWarmUp
		f := v.figures
		line := fmt.Sprintf("vLLM prompt %d of %d: computed %.0f ms, baseline %.0f, local %.0f, peer %.0f, miss %.2f %%",
			i+1, prompts, f.cold[i], f.baseline[i], f.local[i], f.peer[i], f.overhead[i])
		if v.theirs != nil {
			line += fmt.Sprintf(", LMCache %.0f ms", f.lmcache[i])
		}
		progress(line)
	}
	return v.figures, v.checkLoads(ctx, prompts+vllmWarmUp)
}

func (v *vllmCore) open(ctx context.Context, files string) (err error) {
	v.progress("starting two sidecars and two vLLM servers")
	if err := v.openSidecars(ctx); err != nil {
		return err
	}
	args := vllmArgs{kvMiB: 256, maxTokens: 4096, sequences: 4, membraneKV: true}
	args.transfer = membraneTransfer(v.near.socket, v.stats)
	if v.ours, err = v.host.start("vllm-membrane", args); err != nil {
		return err
	}
	args.transfer = baselineTransfer(files)
	if v.base, err = v.host.start("vllm-baseline", args); err != nil {
		return err
	}
	if err := errors.Join(v.ours.wait(ctx), v.base.wait(ctx)); err != nil {
		return err
	}
	if err := v.openLMCache(ctx, args); err != nil {
		return err
	}
	return v.attach(ctx)
}

// openLMCache starts LMCache's server and a vLLM with its connector, if there
// is one.
func (v *vllmCore) openLMCache(ctx context.Context, args vllmArgs) (err error) {
	python := v.host.opts.LMCache
	if python == "" {
		return nil
	}
	v.progress("starting LMCache and a vLLM server")
	if v.theirCache, args.transfer, err = v.host.startLMCache(ctx, python, 1); err != nil {
		return err
	}
	args.python, args.membraneKV = python, false
	if v.theirs, err = v.host.start("vllm-lmcache", args); err != nil {
		return err
	}
	return v.theirs.wait(ctx)
}

func (v *vllmCore) openSidecars(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	const memory = "--memory=512MiB"
	if v.near, err = startSidecar(ctx, v.host.binary, v.host.dir, "near", memory); err != nil {
		return err
	}
	if v.far, err = startSidecar(ctx, v.host.binary, v.host.dir, "far", memory, "--peer="+v.near.http); err != nil {
		return err
	}
	return errors.Join(waitForPeer(ctx, v.near.http, v.far.name), waitForPeer(ctx, v.far.http, v.near.name))
}

// attach registers with both sidecars as the measured server's worker did.
func (v *vllmCore) attach(ctx context.Context) (err error) {
	var worker connectorStats
	err = poll(ctx, "the connector's counters", func() (bool, error) {
		worker, err = readConnectorStats(v.stats, "worker")
		return err == nil && worker.Registration.Model.WeightsID != "", err
	})
	if err != nil {
		return err
	}
	if worker.Off != "" {
		return fmt.Errorf("membrane's connector is off: %s", worker.Off)
	}
	reg := worker.Registration
	reg.Engine, reg.InboxSlots = "bench", 0
	dial := func(s *sidecar) (*kvwire.Client, error) {
		c, err := kvwire.Dial(ctx, s.socket, kvwire.ClientOptions{Name: "bench"})
		if err != nil {
			return nil, err
		}
		got, err := c.Register(ctx, reg)
		v.pageBytes = got.ObjectBytes
		if err == nil && got.PageTokens != vllmPage {
			err = fmt.Errorf("pages have %d tokens, not %d", got.PageTokens, vllmPage)
		}
		return c, err
	}
	if v.nearClient, err = dial(v.near); err != nil {
		return err
	}
	if v.farClient, err = dial(v.far); err != nil {
		return err
	}
	return v.empty(ctx)
}

// empty drops every page of the model in both sidecars.
func (v *vllmCore) empty(ctx context.Context) error {
	_, err1 := v.nearClient.Reset(ctx)
	_, err2 := v.farClient.Reset(ctx)
	return errors.Join(err1, err2)
}

func (v *vllmCore) close() {
	for _, c := range []*kvwire.Client{v.nearClient, v.farClient} {
		if c != nil {
			_ = c.Close()
		}
	}
	for _, s := range []*vllmServer{v.ours, v.base, v.theirs} {
		if s != nil {
			s.close()
		}
	}
	if v.theirCache != nil {
		v.theirCache.close()
	}
	for _, s := range []*sidecar{v.near, v.far} {
		if s != nil {
			s.kill()
		}
	}
}

// turn lets one server run, with the cache that is its own, and stops the
// others.
func (v *vllmCore) turn(on *vllmServer) error {
	var errs []error
	set := func(g *group, running bool) {
		sig := syscall.SIGSTOP
		if running {
			sig = syscall.SIGCONT
		}
		errs = append(errs, g.signal(sig))
	}
	for _, s := range []*vllmServer{v.ours, v.base, v.theirs} {
		if s != nil {
			set(s.group, s == on)
		}
	}
	if v.theirCache != nil {
		set(v.theirCache, on == v.theirs)
	}
	return errors.Join(errs...)
}

// round measures one prompt in every way. Which server comes first alternates.
func (v *vllmCore) round(ctx context.Context, i int) error {
	prompt := vllmPrompt(vllmTokens, uint32(i))
	var want, got [][]uint32
	base := func() (err error) { want, err = v.roundBase(ctx, prompt); return err }
	ours := func() (err error) { got, err = v.roundOurs(ctx, prompt); return err }
	var theirs [][]uint32
	order := []func() error{base, ours}
	if v.theirs != nil {
		order = append(order, func() (err error) { theirs, err = v.roundTheirs(ctx, prompt); return err })
	}
	if i%2 == 1 {
		slices.Reverse(order)
	}
	for _, part := range order {
		if err := part(); err != nil {
			return err
		}
	}
	got = append(got, theirs...)
	for _, tokens := range append(want, got...) {
		if len(tokens) != vllmAnswer || !slices.Equal(tokens, want[0]) {
			return fmt.Errorf("tokens differ: computed %v, with the baseline %v, with membrane %v", want[0], want[1:], got)
		}
	}
	return nil
}

// first times a prompt's first token. cached is how many of its tokens the
// engine must not compute.
func (v *vllmCore) first(ctx context.Context, s *vllmServer, body completionBody, cached int, into *samples) ([]uint32, error) {
	got, took, err := v.timed(ctx, s, body)
	if err == nil && got.cached != cached {
		err = fmt.Errorf("%s had %d tokens cached, not %d", s.name, got.cached, cached)
	}
	if err != nil {
		return nil, err
	}
	*into = append(*into, millis(took))
	return got.tokens, nil
}

// timed sends a prompt to a server whose own prefix cache was emptied, and
// returns how long its first token took.
func (v *vllmCore) timed(ctx context.Context, s *vllmServer, body completionBody) (streamed, time.Duration, error) {
	if err := s.forget(ctx); err != nil {
		return streamed{}, 0, err
	}
	// An engine that has been idle takes a while to wake, and some have waited
	// for counters: a short request first puts all on a level.
	if _, err := s.complete(ctx, newCompletion(vllmModel, vllmPrompt(vllmBlock/2, 2000), 2)); err != nil {
		return streamed{}, 0, err
	}
	begin := time.Now()
	got, err := s.complete(ctx, body)
	if err == nil && len(got.arrivals) == 0 {
		err = fmt.Errorf("%s answered without a token", s.name)
	}
	if err != nil {
		return streamed{}, 0, err
	}
	return got, got.arrivals[0].Sub(begin), nil
}

// roundTheirs computes a prompt with LMCache's connector, waits until all its
// whole chunks are held, and loads it.
func (v *vllmCore) roundTheirs(ctx context.Context, prompt []uint32) ([][]uint32, error) {
	if err := v.turn(v.theirs); err != nil {
		return nil, err
	}
	body := newCompletion(vllmModel, prompt, vllmAnswer)
	const held = vllmTokens / lmcacheChunk * lmcacheChunk
	computed, _, err := v.timed(ctx, v.theirs, body)
	if err != nil {
		return nil, err
	}
	var loaded streamed
	var took time.Duration
	load := func() (bool, error) {
		loaded, took, err = v.timed(ctx, v.theirs, body)
		return err == nil && loaded.cached >= held, err
	}
	// It stores behind the answer; the first load that is whole is not counted.
	if err := poll(ctx, "LMCache's store", load); err != nil {
		return nil, err
	}
	if whole, err := load(); err != nil || !whole {
		return nil, errors.Join(fmt.Errorf("%s had %d tokens cached, not %d", v.theirs.name, loaded.cached, held), err)
	}
	v.figures.lmcache = append(v.figures.lmcache, millis(took))
	return [][]uint32{computed.tokens, loaded.tokens}, nil
}

// roundBase computes a prompt with the baseline connector told to leave it
// alone, computes it once more with its files written, and loads it.
func (v *vllmCore) roundBase(ctx context.Context, prompt []uint32) ([][]uint32, error) {
	if err := v.turn(v.base); err != nil {
		return nil, err
	}
	body := newCompletion(vllmModel, prompt, vllmAnswer)
	alone := body
	alone.KVTransferParam = map[string]any{"baseline": "off"}
	var all [][]uint32
	for _, m := range []struct {
		body   completionBody
		cached int
		into   *samples
	}{{alone, 0, &v.figures.cold}, {body, 0, &v.figures.filled}, {body, (vllmTokens - 1) / vllmBlock * vllmBlock, &v.figures.baseline}} {
		tokens, err := v.first(ctx, v.base, m.body, m.cached, m.into)
		if err != nil {
			return nil, err
		}
		all = append(all, tokens)
	}
	return all, nil
}

// roundOurs computes a prompt that no sidecar has, loads it from the engine's
// own sidecar, and loads it once more when only the other sidecar has it.
func (v *vllmCore) roundOurs(ctx context.Context, prompt []uint32) ([][]uint32, error) {
	if err := v.turn(v.ours); err != nil {
		return nil, err
	}
	body := newCompletion(vllmModel, prompt, vllmAnswer)
	missed, err := v.miss(ctx, body)
	if err != nil {
		return nil, err
	}
	local, err := v.load(ctx, body, &v.figures.local, 0)
	if err != nil {
		return nil, err
	}
	if err := v.moveAway(ctx, prompt); err != nil {
		return nil, err
	}
	peer, err := v.load(ctx, body, &v.figures.peer, vllmHeld/vllmPage)
	if err != nil {
		return nil, err
	}
	return [][]uint32{missed, local, peer}, v.empty(ctx)
}

// miss times a prompt that is not held anywhere, and what the connector's
// hooks and its putting off of the request took of that.
func (v *vllmCore) miss(ctx context.Context, body completionBody) ([]uint32, error) {
	before, err := v.own(ctx)
	if err != nil {
		return nil, err
	}
	tokens, err := v.first(ctx, v.ours, body, 0, &v.figures.missed)
	if err != nil {
		return nil, err
	}
	err = poll(ctx, "the store", func() (bool, error) {
		held, err := metric(v.near.http, residentPages, "")
		return held == vllmHeld/vllmPage, err
	})
	if err != nil {
		return nil, err
	}
	after, err := v.own(ctx)
	if err != nil {
		return nil, err
	}
	took := v.figures.missed[len(v.figures.missed)-1]
	v.figures.overhead = append(v.figures.overhead, 100*millis(after-before)/took)
	return tokens, nil
}

// load times a prompt whose pages are held, and checks against the sidecar's
// own counters that it came from there, page by page. fromPeer pages of it
// came from the other sidecar.
func (v *vllmCore) load(ctx context.Context, body completionBody, into *samples, fromPeer int) ([]uint32, error) {
	count := func() (leased, fetched, served float64, err error) {
		leased, err1 := metric(v.near.http, leasedBytes, "")
		fetched, err2 := metric(v.near.http, fetchedBytes, "")
		served, err3 := metric(v.far.http, servedBytes, "")
		return leased, fetched, served, errors.Join(err1, err2, err3)
	}
	leased, fetched, served, err := count()
	if err != nil {
		return nil, err
	}
	tokens, err := v.first(ctx, v.ours, body, vllmHeld, into)
	if err != nil {
		return nil, err
	}
	leased2, fetched2, served2, err := count()
	if err != nil {
		return nil, err
	}
	pages, remote := float64(vllmHeld/vllmPage)*float64(v.pageBytes), float64(fromPeer)*float64(v.pageBytes)
	if leased2-leased != pages || fetched2-fetched != remote || served2-served != remote {
		return nil, fmt.Errorf("%.0f bytes were leased, %.0f fetched and %.0f served, not %.0f and %.0f", leased2-leased, fetched2-fetched, served2-served, pages, remote)
	}
	return tokens, nil
}

// moveAway has the far sidecar fetch a prompt's pages from the near one, which
// then drops its own and learns where they are.
func (v *vllmCore) moveAway(ctx context.Context, prompt []uint32) error {
	pages := vllmHeld / vllmPage
	if err := v.waitForDirectory(ctx, v.far, v.near); err != nil {
		return err
	}
	l, err := v.farClient.Match(ctx, kvwire.Match{DeadlineUS: 10e6, LeaseMS: 10_000, Tokens: wireTokens(prompt)}, nil)
	if err != nil {
		return err
	}
	if int(l.FromPeers) != pages {
		return fmt.Errorf("the far sidecar fetched %d of %d pages (%s)", l.FromPeers, pages, l.Reason)
	}
	if _, err := v.farClient.Release(ctx, kvwire.Release{Lease: l.Lease}); err != nil {
		return err
	}
	if err := v.farClient.Drop(ctx, l.Handle); err != nil {
		return err
	}
	if n, err := v.nearClient.Reset(ctx); err != nil || n != pages {
		return errors.Join(fmt.Errorf("the near sidecar dropped %d of %d pages", n, pages), err)
	}
	return v.waitForDirectory(ctx, v.near, v.far)
}

// waitForDirectory returns when a sidecar knows as many pages of the other as
// that holds.
func (v *vllmCore) waitForDirectory(ctx context.Context, s, other *sidecar) error {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	return poll(ctx, "the directory", func() (bool, error) {
		held, err1 := metric(other.http, residentPages, "")
		known, err2 := metric(s.http, directoryPages, "")
		return held == known && held > 0, errors.Join(err1, err2)
	})
}
