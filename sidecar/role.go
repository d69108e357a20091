package sidecar

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"membrane/mesh"
	"membrane/sidecar/httpapi"
	"membrane/sidecar/roles"
)

// The tags that this node adds to those of the mesh, all together with them
// below some 400 bytes.
const (
	// tagNodeID carries the name that the user gave; the mesh needs one that
	// was never used before.
	tagNodeID    = "id"
	tagRole      = "role"
	tagAuto      = roles.TagAuto
	tagRoleSince = "since" // Unix seconds
	tagRoleWhy   = "why"
)

// newRoles makes the keeper of this node's role and tells the mesh of it.
func (n *Sidecar) newRoles() (*roles.Keeper, error) {
	n.newBalance()
	k, err := roles.New(roles.Config{
		Setting: n.settings.Role,
		Self:    func() roles.Node { return roles.Node{ID: n.settings.NodeID, Name: n.mesh.Name()} },
		Live:    func() []roles.Node { return autoNodes(n.mesh.Members()) },
		Ratio:   n.prefillRatio, RatioWhy: n.ratioWhy,
		Publish: n.publishRole, Drain: time.Duration(n.settings.DrainTimeout), Log: n.log,
	})
	if err != nil {
		return nil, err
	}
	tags := map[string]string{tagNodeID: n.settings.NodeID}
	if k.State().Auto {
		tags[tagAuto] = "1"
	}
	n.mesh.SetTags(tags)
	n.publishRole(k.State())
	return k, nil
}

func (n *Sidecar) publishRole(s roles.State) {
	n.mesh.SetTags(map[string]string{
		tagRole: string(s.Role), tagRoleSince: strconv.FormatInt(s.Since.Unix(), 10), tagRoleWhy: s.Why,
	})
}

// autoNodes returns the members that choose their role by themselves and are
// believed alive.
func autoNodes(members []mesh.Member) (out []roles.Node) {
	for _, m := range members {
		if m.Tags[tagAuto] != "" && (m.Status == mesh.StatusAlive || m.Status == mesh.StatusSuspect) {
			out = append(out, roles.Node{ID: m.Tags[tagNodeID], Name: m.Name})
		}
	}
	return out
}

// runRoles follows the decision until ctx ends or stop is called.
func (n *Sidecar) runRoles(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { n.roles.Run(ctx) })
	if b := n.queues.balance; b != nil {
		wg.Go(func() { b.Run(ctx) })
	}
	return func() { cancel(); wg.Wait() }
}

// describeRole puts in what this node itself knows at once and others learn
// later.
func (n *Sidecar) describeRole(p *httpapi.Peer) {
	s := n.roles.State()
	p.Role, p.RoleAuto, p.RoleWhy, p.RoleNext = string(s.Role), s.Auto, s.Why, string(s.Next)
	p.RoleSince = s.Since.UTC().Format(time.RFC3339)
	prefill, decode := n.ownQueues()
	p.Queues = &httpapi.Queues{Prefill: prefill, Decode: decode}
}

func (n *Sidecar) roleStatus() any {
	s := n.roles.State()
	prefill, decode := n.ownQueues()
	out := map[string]any{
		"queues": map[string]int{"prefill": prefill, "decode": decode},
		"role":   s.Role, "auto": s.Auto, "since": s.Since.UTC().Format(time.RFC3339), "why": s.Why, "next": s.Next, "changes": s.Changes,
		"in_flight": map[string]int{"prefill": n.roles.InFlight(roles.Prefill), "decode": n.roles.InFlight(roles.Decode)},
	}
	if s.Auto {
		out["prefill_ratio"] = n.prefillRatio()
	}
	if b := n.queues.balance; b != nil {
		s := b.State()
		out["balance"] = map[string]any{"ratio": s.Ratio, "queue_prefill": s.Prefill, "queue_decode": s.Decode, "nodes": s.Nodes, "steps": s.Steps}
	}
	return out
}

func (n *Sidecar) writeRoleMetrics(w io.Writer) {
	s := n.roles.State()
	is := func(b bool) uint64 {
		if b {
			return 1
		}
		return 0
	}
	var list []number
	for _, r := range []roles.Role{roles.RolePrefill, roles.RoleDecode, roles.RoleBoth} {
		list = append(list, number{fmt.Sprintf(`membrane_role{role=%q}`, r), is(r == s.Role)})
	}
	list = append(list,
		number{"membrane_role_auto", is(s.Auto)},
		number{"membrane_role_draining", is(s.Next != "")},
		number{"membrane_role_since_timestamp_seconds", uint64(s.Since.Unix())},
	)
	for _, p := range []roles.Phase{roles.Prefill, roles.Decode} {
		list = append(list, number{fmt.Sprintf(`membrane_phase_in_flight{phase=%q}`, p), uint64(n.roles.InFlight(p))})
	}
	prefill, decode := n.ownQueues()
	list = append(list, number{`membrane_queue_length{phase="prefill"}`, uint64(max(prefill, 0))}, number{`membrane_queue_length{phase="decode"}`, uint64(max(decode, 0))})
	gauge(w, list...)
	counter(w, number{"membrane_role_changes_total", s.Changes})
	if s.Auto {
		metrics.WriteGaugeFloat64(w, "membrane_prefill_ratio", n.prefillRatio())
	}
	if b := n.queues.balance; b != nil {
		s := b.State()
		metrics.WriteGaugeFloat64(w, `membrane_balance_queue{phase="prefill"}`, s.Prefill)
		metrics.WriteGaugeFloat64(w, `membrane_balance_queue{phase="decode"}`, s.Decode)
		counter(w, number{"membrane_balance_steps_total", s.Steps})
	}
}
