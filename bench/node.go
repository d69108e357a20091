package bench

import (
	"context"
	"fmt"
	"time"

	"membrane/kvwire"
)

// Node is a sidecar that runs as a process of its own and ends with this one.
type Node struct{ s *sidecar }

// StartNode starts a sidecar of the binary on free ports of the loopback
// interface, with its sockets in dir, and waits until it serves.
func StartNode(ctx context.Context, binary, dir, name string, args ...string) (*Node, error) {
	s, err := startSidecar(ctx, binary, dir, name, args...)
	if err != nil {
		return nil, err
	}
	return &Node{s}, nil
}

// Socket returns the path of its engine socket.
func (n *Node) Socket() string { return n.s.socket }

// HTTP returns its HTTP address.
func (n *Node) HTTP() string { return n.s.http }

// PID returns its process id.
func (n *Node) PID() int { return n.s.cmd.Process.Pid }

// CPU returns the processor time that it has used.
func (n *Node) CPU() (time.Duration, error) { return n.s.cpu() }

// Kill ends it at once.
func (n *Node) Kill() { n.s.kill() }

// Attach connects to its engine socket and registers as an engine with pages
// of so many bytes and tokens and an inbox of so many slots.
func (n *Node) Attach(ctx context.Context, name string, pageBytes, pageTokens, slots int) (*kvwire.Client, kvwire.Registered, error) {
	c, err := kvwire.Dial(ctx, n.s.socket, kvwire.ClientOptions{Name: "bench", Populate: true})
	if err != nil {
		return nil, kvwire.Registered{}, err
	}
	reg, err := c.Register(ctx, registration(name, pageBytes, pageTokens, slots))
	if err != nil {
		_ = c.Close()
		return nil, reg, err
	}
	return c, reg, nil
}

// WaitForMesh waits until every node sees all the others.
func WaitForMesh(ctx context.Context, nodes []*Node) error {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	for _, n := range nodes {
		err := poll(ctx, "peers of "+n.s.name, func() (bool, error) {
			names, err := healthyPeers(n.s.http)
			if err == nil && len(names) < len(nodes)-1 {
				err = fmt.Errorf("%d of %d are healthy", len(names), len(nodes)-1)
			}
			return err == nil, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
