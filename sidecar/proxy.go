package sidecar

import (
	"context"
	"net"
	"sync"
	"time"

	"membrane/kvwire"
	"membrane/mesh"
	"membrane/sidecar/engineport"
	"membrane/sidecar/proxy"
	"membrane/sidecar/roles"
)

// tagServe is the mesh tag with HOST:PORT of the serving port.
const tagServe = "serve"

const (
	maxModels   = 8                     // of attached engines that a prompt is looked up for
	podsFor     = 50 * time.Millisecond // how old the list of pods may be
	fetchPause  = 2 * time.Millisecond
	fetchMost   = 50 * time.Millisecond
	fetchSilent = 500 * time.Millisecond // without a new page a fetch ends
)

// openProxy makes the serving port, if there is one, and tells the mesh of it.
func (n *Sidecar) openProxy(keys secrets) (err error) {
	if n.serveTCP == nil {
		return nil
	}
	s := &n.settings
	pods := &servingPods{members: n.mesh.Members}
	n.proxy, err = proxy.New(proxy.Config{
		Engine: s.EngineURL, Keys: keys.api, ClusterKey: keys.cluster, Threshold: s.PrefillThreshold,
		PrefillTimeout: time.Duration(s.PrefillTimeout), MaxInFlight: s.ServeMax,
		Pods: pods.list, Role: func() roles.Role { return n.roles.State().Role },
		Cache: &prompts{n}, Metrics: n.set, Log: n.log,
	})
	if err != nil {
		return err
	}
	n.mesh.SetTag(tagServe, n.advertised(n.serveTCP))
	return nil
}

// servingPods keeps the list of the other nodes that have a serving port.
type servingPods struct {
	members func() []mesh.Member

	mu    sync.Mutex
	made  time.Time
	known []proxy.Pod
}

func (p *servingPods) list() []proxy.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.made) < podsFor {
		return p.known
	}
	var out []proxy.Pod
	for _, m := range p.members() {
		addr := m.Tags[tagServe]
		if m.Self || m.Status != mesh.StatusAlive && m.Status != mesh.StatusSuspect {
			continue
		}
		if _, port, err := net.SplitHostPort(addr); err != nil || !isPort(port) {
			continue
		}
		out = append(out, proxy.Pod{Name: m.Name, Addr: addr, Role: roles.Role(m.Role), Suspect: m.Down || m.Status == mesh.StatusSuspect})
	}
	p.known, p.made = out, time.Now()
	return out
}

// prompts looks prompts up in the cache and in the peers' directories.
type prompts struct{ n *Sidecar }

// PinsFull is half of the arena, the cap of leases and pins together.
func (p *prompts) PinsFull() bool {
	return p.n.cache.Stats().PinnedBytes >= p.n.cache.Arena().Size()/2
}

func (p *prompts) Prefix(salt string, tokens []uint32) proxy.Prefix {
	var best *prefix
	for i, m := range p.n.engines.Models() {
		if i == maxModels {
			break
		}
		chain, err := kvwire.NewChain(m.PageTokens, kvwire.Scope{CacheSalt: &salt})
		if err != nil || chain.Append(tokens...) != nil {
			continue
		}
		one := &prefix{n: p.n, model: m, hashes: chain.Hashes()}
		one.here, _ = m.Space.Match(m.Form, one.hashes)
		one.peers = p.n.mesh.Holders(m.Space, m.Form, one.hashes)
		if best == nil || one.most() > best.most() {
			best = one
		}
	}
	if best == nil {
		return nil
	}
	return best
}

// prefix is the pages of one prompt.
type prefix struct {
	n      *Sidecar
	model  engineport.Model
	hashes []kvwire.Hash
	here   int
	peers  []mesh.Holding
}

// most returns the longest run of pages that any node holds.
func (p *prefix) most() int {
	most := p.here
	for _, h := range p.peers {
		most = max(most, h.Pages)
	}
	return most
}

func (p *prefix) Here() int { return p.here * p.model.PageTokens }

func (p *prefix) At(pod string) int {
	for _, h := range p.peers {
		if h.Name == pod {
			return h.Pages * p.model.PageTokens
		}
	}
	return 0
}

// Fetch asks the pod again while pages are on their way from its engine to its
// cache. What does not fit beside what others need stays where it is.
func (p *prefix) Fetch(ctx context.Context, pod string) int {
	room := int(p.n.cache.Arena().Size() / 4 / max(p.model.PageBytes, 1))
	want := p.hashes[:min(len(p.hashes), room)]
	pause, last := fetchPause, time.Now()
	for p.here < len(want) {
		batch := want[p.here:min(len(want), p.here+kvwire.MaxBatch)]
		got, _ := p.n.mesh.Fill(ctx, mesh.FillRequest{Space: p.model.Space, Form: p.model.Form, Shards: p.model.Shards, Hashes: batch, From: pod})
		if got > 0 {
			p.here += got
			pause, last = fetchPause, time.Now()
			continue
		}
		if ctx.Err() != nil || time.Since(last) > fetchSilent {
			break
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		pause = min(2*pause, fetchMost)
	}
	return p.Here()
}

var _ proxy.Cache = (*prompts)(nil)
