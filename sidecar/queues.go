package sidecar

import (
	"context"
	"sync"
	"time"

	"membrane/mesh"
	"membrane/sidecar/roles"
)

// queues is what this node knows of the queues of the auto nodes, whose ratio
// follows them with --prefill-ratio auto.
type queues struct {
	balance *roles.Balance // nil with a fixed ratio

	mu     sync.Mutex
	others map[string]mesh.Queues // by mesh name, of the last measurement
}

// queueTime bounds the question to one node.
const queueTime = time.Second

// newBalance makes the ratio follow the queues where it is to.
func (n *Sidecar) newBalance() {
	if n.settings.Role == roles.Auto && n.settings.PrefillRatio == RatioAuto {
		n.queues.balance = roles.NewBalance(roles.BalanceConfig{Measure: n.measureQueues})
	}
}

// prefillRatio returns the part of the auto nodes that should prefill.
func (n *Sidecar) prefillRatio() float64 {
	if b := n.queues.balance; b != nil {
		return b.Ratio()
	}
	return float64(n.settings.PrefillRatio)
}

// ratioWhy says for people what the ratio follows.
func (n *Sidecar) ratioWhy() string {
	if b := n.queues.balance; b != nil {
		return b.State().String()
	}
	return ""
}

// ownQueues returns how many requests wait on this node.
func (n *Sidecar) ownQueues() (prefill, decode int) {
	if n.disagg == nil {
		return 0, 0
	}
	return n.disagg.Waiting()
}

// measureQueues asks the live auto nodes for their queues, all at once.
func (n *Sidecar) measureQueues(ctx context.Context) (out []roles.Measured) {
	ctx, cancel := context.WithTimeout(ctx, queueTime)
	defer cancel()
	var mu sync.Mutex
	var asked sync.WaitGroup
	others := make(map[string]mesh.Queues)
	for _, m := range n.mesh.Members() {
		if m.Tags[tagAuto] == "" || m.Status != mesh.StatusAlive {
			continue
		}
		if m.Self {
			prefill, decode := n.ownQueues()
			mu.Lock()
			out = append(out, roles.Measured{Role: n.roles.State().Role, Queues: roles.Queues{Prefill: prefill, Decode: decode}})
			mu.Unlock()
			continue
		}
		asked.Go(func() {
			q, err := n.mesh.QueuesOf(ctx, m.Name)
			if err != nil {
				n.log.Debug().Err(err).Msg("cannot ask a node for its queues")
				return
			}
			mu.Lock()
			defer mu.Unlock()
			others[m.Name] = q
			out = append(out, roles.Measured{Role: roles.Role(m.Role), Queues: roles.Queues(q)})
		})
	}
	asked.Wait()
	n.queues.mu.Lock()
	n.queues.others = others
	n.queues.mu.Unlock()
	return out
}

// of returns the queues of another node, where they are known.
func (q *queues) of(name string) (mesh.Queues, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	known, ok := q.others[name]
	return known, ok
}
