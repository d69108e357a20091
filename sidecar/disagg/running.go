package disagg

import (
	"context"
	"sync"
	"time"

	"membrane/kvwire"
)

// running are the prefills under way, so that a decode can follow one.
type running struct {
	mu  sync.Mutex
	all map[handleID]*run
}

// run is a prompt that at least one prefill works on.
type run struct {
	prompt   *prompt
	model    string
	expires  time.Time // when its prefill has ended at the latest
	prefills int
	done     chan struct{} // closed when one has kept the handle, or none is left
}

func newRunning() *running { return &running{all: make(map[handleID]*run)} }

// begin notes a prefill until end is called, with whether the handle is kept.
func (r *running) begin(p *prompt, model string, deadline time.Time) (end func(kept bool)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.all[p.id()]
	if now == nil {
		now = &run{prompt: p, model: model, done: make(chan struct{})}
		r.all[p.id()] = now
	}
	now.prefills++
	if deadline.After(now.expires) {
		now.expires = deadline
	}
	var once sync.Once
	return func(kept bool) {
		once.Do(func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			if now.prefills--; r.all[p.id()] == now && (kept || now.prefills == 0) {
				delete(r.all, p.id())
				close(now.done)
			}
		})
	}
}

func (r *running) get(id handleID) *run {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[id]
}

func (r *running) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all)
}

// early returns the manifest of a prefill that runs: without a state and with
// Created 0. It is made when somebody asks, which few do.
func (s *Service) early(r *run) kvwire.Manifest {
	return s.manifest(r.prompt, r.model, nil, time.UnixMilli(0), r.expires)
}

// WaitManifest is Manifest, after waiting until no prefill of the handle is
// under way, or ctx ends.
func (s *Service) WaitManifest(ctx context.Context, tenant string, handle kvwire.Hash) []byte {
	if r := s.running.get(handleID{tenant, handle}); r != nil {
		select {
		case <-r.done:
		case <-ctx.Done():
		case <-s.ctx.Done():
		}
	}
	return s.Manifest(tenant, handle)
}
