package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// serveArm is one system under test: real vLLM with one KV connector or none.
type serveArm struct {
	name  string
	start func(context.Context, *armRun) (*vllmServer, error)
}

// ArmNames are the names of the arms of [Serve].
var ArmNames = []string{"membrane", "baseline", "none", "lmcache"}

var armStarts = map[string]func(context.Context, *armRun) (*vllmServer, error){
	"membrane": startMembraneArm, "baseline": startBaselineArm, "none": startBareArm, "lmcache": startLMCacheArm,
}

func chooseArms(names []string) ([]serveArm, error) {
	if len(names) == 0 {
		names = ArmNames
	}
	var arms []serveArm
	for i, name := range names {
		start, ok := armStarts[name]
		if !ok || slices.Contains(names[:i], name) {
			return nil, fmt.Errorf("arms: %q is not one of %s, each once", name, strings.Join(ArmNames, ", "))
		}
		arms = append(arms, serveArm{name, start})
	}
	return arms, nil
}

// armRun is what one run of one arm has started. Everything is ended by close,
// the last first.
type armRun struct {
	opts ServeOptions
	host *vllmHost
	undo []func()
}

func (r *armRun) close() {
	for _, f := range slices.Backward(r.undo) {
		f()
	}
}

// folder makes a folder for this run, below where; "" is the host's own.
func (r *armRun) folder(where, name string) (string, error) {
	if where == "" {
		where = r.host.dir
	}
	dir, err := os.MkdirTemp(where, name)
	if err != nil {
		return "", fmt.Errorf("cannot make a folder: %w", err)
	}
	r.undo = append(r.undo, func() { _ = os.RemoveAll(dir) })
	return dir, nil
}

func (r *armRun) needs(python, what string) error {
	if r.host == nil || python == "" {
		return fmt.Errorf("needs %s, run make bench-serve", what)
	}
	return nil
}

// vllm starts a vLLM with the settings that all arms share.
func (r *armRun) vllm(name string, a vllmArgs) (*vllmServer, error) {
	a.kvMiB, a.sequences, a.maxTokens = r.opts.EngineMiB, 8, max(4096, r.opts.Mix.Longest()+1)
	s, err := r.host.start("vllm-"+name, a)
	if err == nil {
		r.undo = append(r.undo, s.close)
	}
	return s, err
}

func startBareArm(_ context.Context, r *armRun) (*vllmServer, error) {
	if err := r.needs(r.opts.VLLM.Python, "vLLM"); err != nil {
		return nil, err
	}
	return r.vllm("none", vllmArgs{})
}

func startBaselineArm(_ context.Context, r *armRun) (*vllmServer, error) {
	if err := r.needs(r.opts.VLLM.Python, "vLLM"); err != nil {
		return nil, err
	}
	files, err := r.folder("/dev/shm", "membrane-baseline-")
	if err != nil {
		return nil, err
	}
	return r.vllm("baseline", vllmArgs{transfer: baselineTransfer(files), membraneKV: true})
}

func startMembraneArm(ctx context.Context, r *armRun) (*vllmServer, error) {
	if err := r.needs(r.opts.VLLM.Python, "vLLM"); err != nil {
		return nil, err
	}
	dir, err := r.folder("", "sidecar-")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	s, err := startSidecar(ctx, r.opts.Binary, dir, "serve", fmt.Sprintf("--memory=%dMiB", r.opts.CacheMiB))
	if err != nil {
		return nil, err
	}
	r.undo = append(r.undo, s.kill)
	return r.vllm("membrane", vllmArgs{transfer: membraneTransfer(s.socket, filepath.Join(dir, "connector")), membraneKV: true})
}

// startLMCacheArm starts LMCache's multiprocess server and a vLLM with its
// connector.
func startLMCacheArm(ctx context.Context, r *armRun) (*vllmServer, error) {
	if err := errors.Join(r.needs(r.opts.VLLM.Python, "vLLM"), r.needs(r.opts.LMCache, "LMCache")); err != nil {
		return nil, err
	}
	// The server rounds its memory to whole GiB.
	server, transfer, err := r.host.startLMCache(ctx, r.opts.LMCache, max((r.opts.CacheMiB+1023)/1024, 1))
	if err != nil {
		return nil, err
	}
	r.undo = append(r.undo, server.close)
	return r.vllm("lmcache", vllmArgs{python: r.opts.LMCache, transfer: transfer})
}
