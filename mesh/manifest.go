package mesh

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"membrane/kvwire"
)

// Manifests is where this node keeps the manifests that peers ask for.
type Manifests interface {
	// Manifest returns the manifest of a tenant's handle in wire form, nil where
	// there is none.
	Manifest(tenant string, handle kvwire.Hash) []byte
	// WaitManifest is Manifest, answered when the prefill of the handle has
	// ended, or when ctx ends. Until then the manifest's Created is 0.
	WaitManifest(ctx context.Context, tenant string, handle kvwire.Hash) []byte
	// Pulled is told when a peer holds every page of a handle.
	Pulled(tenant string, handle kvwire.Hash)
}

const (
	// maxAsked is how many peers are asked for one manifest at a time.
	maxAsked = 8
	// manifestPatience is how long one peer may take to answer; the caller's
	// deadline may be earlier.
	manifestPatience = 2 * time.Second
)

// FoundManifest is what became of a search.
type FoundManifest struct {
	// Manifest is in wire form; nil if nobody who answered knows the handle.
	Manifest []byte
	// Asked is how many peers were asked, Silent how many of those that ought
	// to have been gave no answer.
	Asked, Silent int
}

// FindManifest asks those peers for the manifest of a tenant's handle that
// may says yes to, some at a time, and returns the first answer that proves to
// be what was asked for. It costs one message a peer.
func (m *Mesh) FindManifest(ctx context.Context, tenant string, handle kvwire.Hash, may func(Member) bool) FoundManifest {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	capable := map[string]bool{}
	for _, mb := range m.Members() {
		capable[mb.Name] = !mb.Self && may(mb)
	}
	var found FoundManifest
	room := make(chan struct{}, maxAsked)
	answers := make(chan []byte)
	waiting := 0
	for _, p := range m.peers.all() {
		if !capable[p.name] {
			continue
		}
		found.Asked++
		waiting++
		go func() {
			var body []byte
			select {
			case room <- struct{}{}:
				body = p.manifest(ctx, tenant, handle)
				<-room
			case <-ctx.Done():
			}
			answers <- body
		}()
	}
	// Everybody is waited for: nothing may go on behind the answer. Those that
	// are asked in vain end with ctx.
	for ; waiting > 0; waiting-- {
		switch body := <-answers; {
		case found.Manifest != nil:
		case body == nil:
			found.Silent++
		case len(body) > 0:
			found.Manifest = body
			cancel()
		}
	}
	return found
}

// manifest asks the peer: nil is no answer, an empty slice that it knows none.
func (p *peer) manifest(ctx context.Context, tenant string, handle kvwire.Hash) []byte {
	ctx, cancel := context.WithTimeout(ctx, manifestPatience)
	defer cancel()
	body, err := p.ask(ctx, kvwire.ManifestRequest{Op: kvwire.ManifestGet, Handle: handle, Tenant: tenant})
	if err != nil {
		p.m.log.Debug().Err(err).Str("peer", p.name).Msg("cannot ask a peer for a manifest")
		return nil
	}
	if manifest, err := p.checked(body, tenant, handle); err == nil && manifest != nil {
		return manifest
	}
	return []byte{}
}

// checked returns the manifest in an answer if it is what was asked for, nil if
// the peer has none.
func (p *peer) checked(body []byte, tenant string, handle kvwire.Hash) ([]byte, error) {
	manifest, err := kvwire.ParseManifestAnswer(body, p.m.cfg.ClusterKey, tenant)
	if err == nil && manifest != nil {
		err = checkManifest(manifest, handle)
	}
	if err != nil {
		p.m.counters.lies.Add(1)
		p.m.strange.Warn().Err(err).Str("peer", p.name).Msg("a peer answered with a wrong manifest")
		return nil, err
	}
	return bytes.Clone(manifest), nil
}

func checkManifest(manifest []byte, handle kvwire.Hash) error {
	m, err := kvwire.ParseManifest(manifest)
	if err != nil {
		return err
	}
	_, is, err := m.Check()
	if err == nil && is != handle {
		err = fmt.Errorf("it is that of handle %s instead of %s", is, handle)
	}
	return err
}

// ask sends one request about a manifest.
func (p *peer) ask(ctx context.Context, req kvwire.ManifestRequest) ([]byte, error) {
	return p.call(ctx, kvwire.TypeManifest, kvwire.AppendManifestRequest(nil, req))
}

// call sends one request, over a connection that was used before or, if the
// peer has closed that, over a new one. It ends with the peer, too.
func (p *peer) call(ctx context.Context, t kvwire.Type, req []byte) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	for fresh := false; ; fresh = true {
		c, err := p.take(ctx, fresh)
		if err != nil {
			return nil, err
		}
		stop := c.watch(ctx)
		body, err := c.call(t, req)
		usable := stop()
		if err == nil && usable {
			body = bytes.Clone(body)
			p.give(c)
			return body, nil
		}
		c.close()
		if err == nil {
			return body, nil // the answer came, then the deadline
		}
		if !c.pooled || ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) || kvwire.CodeOf(err) != 0 {
			return nil, err
		}
	}
}

// ManifestPulled tells the node that keeps a handle's pages that this one holds
// them all, as far as ctx allows. A message that is lost costs the other node a
// pin until it times out.
func (m *Mesh) ManifestPulled(ctx context.Context, node, tenant string, handle kvwire.Hash) error {
	p := m.peers.named(node)
	if p == nil {
		return nil // it is gone, and its pins with it
	}
	_, err := p.ask(ctx, kvwire.ManifestRequest{Op: kvwire.ManifestPulled, Handle: handle, Tenant: tenant})
	return err
}

// WaitManifest asks a node for a manifest that is complete only when its
// prefill has ended, and waits for that as long as ctx allows. It returns nil
// without an error when the prefill came to nothing.
func (m *Mesh) WaitManifest(ctx context.Context, node, tenant string, handle kvwire.Hash) ([]byte, error) {
	p := m.peers.named(node)
	if p == nil {
		return nil, fmt.Errorf("cannot wait for a manifest of %q: %w", node, errNoPeer)
	}
	for {
		began := time.Now()
		body, err := p.ask(ctx, kvwire.ManifestRequest{Op: kvwire.ManifestWait, Handle: handle, Tenant: tenant, WaitUS: waitUS(ctx)})
		if err != nil {
			return nil, fmt.Errorf("cannot wait for a manifest of %q: %w", node, err)
		}
		body, err = p.checked(body, tenant, handle)
		if err != nil || body == nil {
			return nil, err
		}
		got, err := kvwire.ParseManifest(body)
		if err != nil || got.Created != 0 {
			return body, err
		}
		if err := pauseAfter(ctx, began); err != nil {
			return nil, fmt.Errorf("cannot wait for a manifest of %q: %w", node, err)
		}
	}
}

// waitManifest looks a manifest up for a peer, after a wait where it asks for
// one and there is room for it.
func (s *session) waitManifest(have Manifests, req kvwire.ManifestRequest) (out []byte) {
	if req.Op == kvwire.ManifestGet {
		return have.Manifest(req.Tenant, req.Handle)
	}
	wait := min(time.Duration(req.WaitUS)*time.Microsecond, maxReadTime)
	if !s.whileThere(wait, func(ctx context.Context) { out = have.WaitManifest(ctx, req.Tenant, req.Handle) }) {
		return have.Manifest(req.Tenant, req.Handle)
	}
	return out
}

// manifest answers a peer.
func (s *session) manifest(id uint32, body []byte) error {
	req, err := kvwire.ParseManifestRequest(body)
	if err != nil {
		return s.refuse(id, err)
	}
	var out []byte
	if have := s.d.m.cfg.Manifests; have != nil {
		switch req.Op {
		case kvwire.ManifestPulled:
			have.Pulled(req.Tenant, req.Handle)
		case kvwire.ManifestGet, kvwire.ManifestWait:
			if b := s.waitManifest(have, req); b != nil {
				out = kvwire.AppendManifestAnswer(nil, s.d.m.cfg.ClusterKey, req.Tenant, b)
			}
		}
	}
	_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
	return s.answer(kvwire.TypeManifest, id, out)
}
