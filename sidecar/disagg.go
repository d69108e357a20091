package sidecar

import (
	"context"
	"sync/atomic"
	"time"

	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/disagg"
)

// openDisagg makes the service for prefill and decode on different nodes.
func (n *Sidecar) openDisagg(m *manifests) (err error) {
	n.disagg, err = disagg.New(disagg.Config{
		Cache: n.cache, Backend: disagg.Embedded(n.fragments), Peers: n.mesh, Roles: n.roles,
		TTL: time.Duration(n.settings.HandleTTL), Metrics: n.set, Log: n.log,
	})
	if err != nil {
		return err
	}
	m.service.Store(n.disagg)
	n.onClose(func() error { n.disagg.Close(); return nil })
	return nil
}

// manifests lets the mesh, which is made first, answer with what the service,
// which needs the mesh, keeps.
type manifests struct {
	service atomic.Pointer[disagg.Service]
}

var _ mesh.Manifests = (*manifests)(nil)

func (m *manifests) Manifest(tenant string, handle kvwire.Hash) []byte {
	if s := m.service.Load(); s != nil {
		return s.Manifest(tenant, handle)
	}
	return nil
}

func (m *manifests) WaitManifest(ctx context.Context, tenant string, handle kvwire.Hash) []byte {
	if s := m.service.Load(); s != nil {
		return s.WaitManifest(ctx, tenant, handle)
	}
	return nil
}

func (m *manifests) Pulled(tenant string, handle kvwire.Hash) {
	if s := m.service.Load(); s != nil {
		s.Pulled(tenant, handle)
	}
}
