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
	manifest, err := kvwire.ParseManifestAnswer(body, p.m.cfg.ClusterKey, tenant)
	if err == nil && manifest != nil {
		err = checkManifest(manifest, handle)
	}
	if err != nil {
		p.m.counters.lies.Add(1)
		p.m.strange.Warn().Err(err).Str("peer", p.name).Msg("a peer answered with a wrong manifest")
		return []byte{}
	}
	if manifest == nil {
		return []byte{}
	}
	return bytes.Clone(manifest)
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

// ask sends one request about a manifest, over a connection that was used
// before or, if the peer has closed that, over a new one.
func (p *peer) ask(ctx context.Context, req kvwire.ManifestRequest) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	for fresh := false; ; fresh = true {
		c, err := p.take(ctx, fresh)
		if err != nil {
			return nil, err
		}
		stop := c.watch(ctx)
		body, err := c.call(kvwire.TypeManifest, kvwire.AppendManifestRequest(nil, req))
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
	for _, p := range m.peers.all() {
		if p.name == node {
			_, err := p.ask(ctx, kvwire.ManifestRequest{Op: kvwire.ManifestPulled, Handle: handle, Tenant: tenant})
			return err
		}
	}
	return nil // it is gone, and its pins with it
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
		case kvwire.ManifestGet:
			if b := have.Manifest(req.Tenant, req.Handle); b != nil {
				out = kvwire.AppendManifestAnswer(nil, s.d.m.cfg.ClusterKey, req.Tenant, b)
			}
		}
	}
	_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
	return s.answer(kvwire.TypeManifest, id, out)
}
