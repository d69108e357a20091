package peers

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// helperPy drives the systems whose only client is a Python one.
//
//go:embed helper.py
var helperPy []byte

// helper is a Python process that drives a system as the loop here does.
type helper struct {
	*server
	in     io.Writer
	loaded int // size of the payloads that the system holds
}

// helperAnswer is one line that it prints.
type helperAnswer struct {
	Error     string    `json:"error"`
	Bytes     int64     `json:"bytes"`
	Ops       int64     `json:"ops"`
	Hits      int64     `json:"hits"`
	Elapsed   float64   `json:"elapsed"`
	Latencies []float64 `json:"latencies"`
}

// writeHelper puts helper.py into a folder and returns its path.
func writeHelper(dir string) (string, error) {
	path := filepath.Join(dir, "helper.py")
	if err := os.WriteFile(path, helperPy, 0o600); err != nil {
		return "", fmt.Errorf("cannot write the helper: %w", err)
	}
	return path, nil
}

// startHelper starts helper.py with an interpreter of the system's.
func startHelper(name, dir, python string, env []string, args ...string) (*helper, error) {
	path, err := writeHelper(dir)
	if err != nil {
		return nil, err
	}
	s, err := spawn(name+" client", dir, env, python, append([]string{path}, args...)...)
	if err != nil {
		return nil, err
	}
	return &helper{server: s, in: s.stdin.(io.Writer)}, nil
}

func (h *helper) close() { h.kill() }

// ask sends one command and waits for its answer.
func (h *helper) ask(ctx context.Context, command map[string]any) (helperAnswer, error) {
	b, err := json.Marshal(command)
	if err != nil {
		return helperAnswer{}, err
	}
	if _, err := h.in.Write(append(b, '\n')); err != nil {
		return helperAnswer{}, fmt.Errorf("cannot ask the %s: %w\n%s", h.name, err, h.log())
	}
	ctx, cancel := context.WithTimeout(ctx, 2*ioTime)
	defer cancel()
	line, err := h.firstLine(ctx)
	if err != nil {
		h.kill() // a late answer would be taken for that to the next command
		return helperAnswer{}, err
	}
	var a helperAnswer
	if err := json.Unmarshal([]byte(line), &a); err != nil {
		return a, fmt.Errorf("the %s says %q", h.name, line)
	}
	if a.Error != "" {
		return a, fmt.Errorf("the %s: %s", h.name, a.Error)
	}
	return a, nil
}

// helped measures a read cell through a helper.
func (r *run) helped(ctx context.Context, c cell, on *running) (measurement, error) {
	if c.HitPercent < 100 {
		return measurement{}, errors.New("its Python client asks for only what is there")
	}
	h := on.helper
	if err := h.resume(ctx); err != nil {
		return measurement{}, err
	}
	if h.loaded != r.payloads.Size {
		if _, err := h.ask(ctx, map[string]any{"do": "load", "path": r.payloads.Path(), "count": r.payloads.Len(), "size": r.payloads.Size}); err != nil {
			return measurement{}, err
		}
		h.loaded = r.payloads.Size
	}
	get := func(d time.Duration) (helperAnswer, error) {
		return h.ask(ctx, map[string]any{"do": "get", "streams": c.Streams, "batch": c.Batch, "seconds": d.Seconds(), "seed": r.opts.Seed})
	}
	if _, err := get(r.opts.Duration / 10); err != nil {
		return measurement{}, err
	}
	before, err := on.cpu()
	if err != nil {
		return measurement{}, err
	}
	a, err := get(r.opts.Duration)
	if err != nil {
		return measurement{}, err
	}
	m := measurement{bytes: a.Bytes, ops: a.Ops, hits: a.Hits, asked: a.Ops * int64(c.Batch), elapsed: time.Duration(a.Elapsed * float64(time.Second))}
	for _, s := range a.Latencies {
		m.latencies = append(m.latencies, time.Duration(s*float64(time.Second)))
	}
	return m, on.took(&m, before)
}
