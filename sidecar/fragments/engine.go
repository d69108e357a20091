package fragments

import (
	"context"

	"membrane/cache"
	"membrane/engines/llama"
	"membrane/kvwire"
)

// What other parts of the sidecar that run the embedded engine share with the
// fragment API: its models, the names of its windows, and the queue for it.

// Model returns the model of an id, which the service keeps for a while.
func (s *Service) Model(id string) (*llama.Model, error) {
	if id == "" || len(id) > MaxModelID {
		return nil, kvwire.Errorf(kvwire.CodeBadField, "model_id", "%d bytes are not 1 to %d", len(id), MaxModelID)
	}
	return s.models.get(id)
}

// Layout returns what a model's windows of [WindowTokens] are called.
func Layout(m *llama.Model) (kvwire.Namespace, kvwire.Form) {
	l := layoutOf(m)
	return l.namespace, l.form
}

// Space returns where a tenant's windows in a namespace lie. It fails beyond
// [MaxModels].
func (s *Service) Space(tenant string, ns kvwire.Namespace) (*cache.Space, error) {
	space, err := s.space(tenant, ns)
	if err != nil {
		return nil, kvwire.Errorf(kvwire.CodeBusy, "model_id", "%v", err)
	}
	return space, nil
}

// Acquire waits until the embedded engine is free, or returns a
// [kvwire.CodeBusy] when ctx ends first or too many wait.
func (s *Service) Acquire(ctx context.Context) (release func(), err error) {
	select {
	case s.queue <- struct{}{}:
	default:
		return nil, kvwire.Errorf(kvwire.CodeBusy, "", "%d prompts wait for the embedded engine, which is the most", MaxWaiting)
	}
	select {
	case s.engine <- struct{}{}:
		return func() { <-s.engine; <-s.queue }, nil
	case <-ctx.Done():
		<-s.queue
		return nil, kvwire.Errorf(kvwire.CodeBusy, "", "the embedded engine was busy for too long")
	}
}

// Waiting returns how many prompts wait for the embedded engine, beside the one
// that it computes.
func (s *Service) Waiting() int { return max(len(s.queue)-len(s.engine), 0) }

// Enter lists a window that was stored by another part of the sidecar, so that
// it is found by its payload hash.
func (s *Service) Enter(tenant string, m *llama.Model, hash kvwire.Hash, start, tokens int, b []byte) {
	l := layoutOf(m)
	f := describe(tenant, m.ID(), payloadHash(b), m.Config(), start, tokens, int64(len(b)))
	s.index.add(pageID{kvwire.PageKey{Tenant: tenant, Namespace: l.namespace, Hash: hash}, l.form}, f)
}
