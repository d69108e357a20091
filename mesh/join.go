package mesh

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/serf/serf"
)

const (
	maxJoin      = 4 // addresses in one attempt: dead ones cost a timeout each
	joinPauseMin = 100 * time.Millisecond
	joinPauseMax = 10 * time.Second
	joinRepeat   = 30 * time.Second // at most twice that, for ever: it heals partitions
	joinHurry    = time.Minute      // for how long a lost peer is looked for quickly
	addressLimit = 16 << 10         // bytes of an answer to GET /mesh/address
)

// bell wakes all who wait for it at once. The zero value is ready.
type bell struct {
	mu sync.Mutex
	c  chan struct{}
}

// next returns what is closed by the next ring.
func (b *bell) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.c == nil {
		b.c = make(chan struct{})
	}
	return b.c
}

func (b *bell) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.c != nil {
		close(b.c)
		b.c = nil
	}
}

// keepJoined tries one target for ever: quickly until it has worked and after a
// peer was lost, which may be starting anew under another name; else every 30 to
// 60 seconds.
func (m *Mesh) keepJoined(ctx context.Context, what string, addresses func(context.Context) ([]string, error)) {
	pause := joinPauseMin
	said := ""
	var hurry time.Time
	for {
		lost := m.lost.next()
		wait := pause/2 + rand.N(pause)
		err := m.joinOnce(ctx, addresses)
		if err == nil {
			said = ""
		} else {
			m.counters.joinFailures.Add(1)
			if text := err.Error(); text != said && ctx.Err() == nil {
				m.log.Warn().Err(err).Str("target", what).Msg("cannot join yet, will try on")
				said = text
			}
		}
		if err != nil || time.Now().Before(hurry) {
			pause = min(2*pause, joinPauseMax)
		} else {
			wait, pause = joinRepeat+rand.N(joinRepeat), joinPauseMin
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-lost:
			timer.Stop()
			pause, hurry = joinPauseMin, time.Now().Add(joinHurry)
		}
	}
}

func (m *Mesh) joinOnce(ctx context.Context, addresses func(context.Context) ([]string, error)) error {
	found, err := addresses(ctx)
	if err != nil {
		return err
	}
	s, _, own := m.gossip.current()
	known := map[string]bool{own: true}
	for _, mb := range s.Members() {
		if mb.Status == serf.StatusAlive {
			known[net.JoinHostPort(mb.Addr.String(), strconv.Itoa(int(mb.Port)))] = true
		}
	}
	found = slices.DeleteFunc(found, func(a string) bool { return known[a] })
	if len(found) == 0 {
		return nil
	}
	rand.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	if err := join(ctx, s, found[:min(len(found), maxJoin)]); err != nil {
		return fmt.Errorf("cannot join %q: %w", found, err)
	}
	return nil
}

// join returns when ctx ends, although serf goes on with addresses that do not
// answer for some seconds each.
func join(ctx context.Context, s *serf.Serf, addrs []string) error {
	done := make(chan error, 1)
	go func() {
		_, err := s.Join(addrs, true)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// resolve returns the addresses behind a --join value.
func resolve(ctx context.Context, target string) ([]string, error) {
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		host, port = target, strconv.Itoa(defaultGossip)
	}
	if net.ParseIP(host) != nil {
		return []string{net.JoinHostPort(host, port)}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	ips, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("cannot resolve join address %q: %w", target, err)
	}
	for i, ip := range ips {
		ips[i] = net.JoinHostPort(ip, port)
	}
	return ips, nil
}

// askAddress asks the HTTP listener of a peer for its gossip address.
func (m *Mesh) askAddress(ctx context.Context, peer string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+peer+AddressPath, nil)
	if err != nil {
		return nil, fmt.Errorf("cannot ask peer %q for its address: %w", peer, err)
	}
	header, nonce := authorize(m.cfg.ClusterKey, http.MethodGet, AddressPath, m.Name(), time.Now())
	req.Header.Set("Authorization", header)
	resp, err := m.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("cannot ask peer %q for its address: %w", peer, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, addressLimit))
	if err != nil {
		return nil, fmt.Errorf("cannot read the address of peer %q: %w", peer, err)
	}
	if resp.StatusCode != http.StatusOK {
		if resp.StatusCode == http.StatusUnauthorized {
			m.counters.authFailures.Add(1)
		}
		return nil, fmt.Errorf("cannot learn the address of peer %q: status %d", peer, resp.StatusCode)
	}
	a, err := checkAddress(m.cfg.ClusterKey, body, nonce)
	if err != nil {
		m.counters.authFailures.Add(1)
		return nil, fmt.Errorf("peer %q: %w", peer, err)
	}
	if a.Node == m.Name() {
		return nil, nil
	}
	return resolve(ctx, a.Gossip)
}

// startJoining starts a goroutine for each target.
func (m *Mesh) startJoining(ctx context.Context, wg *sync.WaitGroup) {
	for _, t := range m.cfg.Join {
		wg.Go(func() {
			m.keepJoined(ctx, t, func(ctx context.Context) ([]string, error) { return resolve(ctx, t) })
		})
	}
	for _, p := range m.cfg.Peers {
		wg.Go(func() {
			m.keepJoined(ctx, p, func(ctx context.Context) ([]string, error) { return m.askAddress(ctx, p) })
		})
	}
}
