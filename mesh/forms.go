package mesh

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"membrane/kvwire"
)

const (
	// formsPatience is how long a peer may take to say what forms it knows, and
	// formsWait how long a caller waits for that, his own deadline aside.
	formsPatience = 2 * time.Second
	formsWait     = 100 * time.Millisecond
	// formsMin and formsMax bound the time until a peer is asked again: longer
	// each time that its answer was the same.
	formsMin = 100 * time.Millisecond
	formsMax = 15 * time.Second
	// maxPeerForms bounds the namespaces of which a peer's answers are kept.
	maxPeerForms = 256
)

// peerForms is what a peer said of the forms of one namespace. It is guarded by
// peer.mu.
type peerForms struct {
	list    []kvwire.Descriptor
	version uint64 // of the peer's directory when it was asked
	again   time.Time
	pause   time.Duration
	asked   chan struct{} // closed when the question that is under way is over; nil: none is
	told    bool          // Forms has returned list
}

// Forms returns descriptors of forms in which peers that can be reached may hold
// pages of a namespace: what they said since it was called last. A peer is asked
// when its directory has changed since, now and then; then Forms waits for the
// answer, a tenth of a second at most and no longer than ctx. It costs no message
// a page.
func (m *Mesh) Forms(ctx context.Context, ns kvwire.Namespace) []kvwire.Descriptor {
	ctx, cancel := context.WithTimeout(ctx, formsWait)
	defer cancel()
	var waits []chan struct{}
	peers := m.peers.all()
	for _, p := range peers {
		if p.isDown() {
			continue
		}
		if asked := p.askForms(ns); asked != nil {
			waits = append(waits, asked)
		}
	}
wait:
	for _, asked := range waits {
		select {
		case <-asked:
		case <-ctx.Done():
			break wait
		}
	}
	var all []kvwire.Descriptor
	for _, p := range peers {
		p.mu.Lock()
		if f := p.forms[ns]; f != nil && !f.told {
			f.told = true
			all = append(all, f.list...)
		}
		p.mu.Unlock()
	}
	return all
}

// askForms asks the peer, unless what it said is still good or it is being
// asked. It returns a channel that is closed when the answer is there, nil
// without a new question.
func (p *peer) askForms(ns kvwire.Namespace) chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.forms[ns]
	version := p.version.Load()
	switch {
	case p.gone:
		return nil
	case f != nil && (f.asked != nil || f.version == version || time.Now().Before(f.again)):
		return nil
	case f == nil && len(p.forms) >= maxPeerForms:
		clear(p.forms)
	}
	if f == nil {
		f = &peerForms{version: ^uint64(0)} // no version that a directory has had
		if p.forms == nil {
			p.forms = make(map[kvwire.Namespace]*peerForms)
		}
		p.forms[ns] = f
	}
	asked := make(chan struct{})
	f.asked = asked
	if !p.m.peers.start(func() { p.fetchForms(ns, f, version) }) {
		f.asked = nil
		return nil
	}
	return asked
}

// fetchForms asks the peer and notes the answer. A peer that does not understand
// the question knows no forms.
func (p *peer) fetchForms(ns kvwire.Namespace, f *peerForms, version uint64) {
	list, err := p.callForms(ns)
	p.m.counters.formsAsked.Add(1)
	if err != nil {
		p.m.log.Debug().Err(err).Str("peer", p.name).Msg("cannot ask a peer for its forms")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil || slices.EqualFunc(list, f.list, func(a, b kvwire.Descriptor) bool { return a.Form() == b.Form() }) {
		f.pause = min(max(2*f.pause, formsMin), formsMax)
	} else {
		f.pause, f.told = formsMin, false
	}
	f.again = time.Now().Add(f.pause)
	if err == nil {
		f.list, f.version = list, version
	}
	close(f.asked)
	f.asked = nil
}

func (p *peer) callForms(ns kvwire.Namespace) ([]kvwire.Descriptor, error) {
	ctx, cancel := context.WithTimeout(p.ctx, formsPatience)
	defer cancel()
	for fresh := false; ; fresh = true {
		c, err := p.take(ctx, fresh)
		if err != nil {
			return nil, err
		}
		stop := c.watch(ctx)
		body, err := c.call(kvwire.TypeForms, kvwire.AppendFormsRequest(nil, ns))
		usable := stop()
		if err == nil {
			body = bytes.Clone(body)
		}
		if err == nil && usable {
			p.give(c)
		} else {
			c.close()
		}
		if err == nil {
			list, err := kvwire.ParseForms(body)
			if err != nil {
				p.m.counters.lies.Add(1)
			}
			return list, err
		}
		// The peer may have closed a connection that was idle.
		if !c.pooled || ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) || kvwire.CodeOf(err) != 0 {
			return nil, err
		}
	}
}

// start runs fn on a goroutine that close waits for, and reports whether it did.
func (t *peerTable) start(fn func()) bool {
	// Not t.mu, which end holds while it takes a peer's.
	t.starting.Lock()
	defer t.starting.Unlock()
	if t.stopped {
		return false
	}
	t.wg.Go(fn)
	return true
}

// forms answers a peer.
func (s *session) forms(id uint32, body []byte) error {
	ns, err := kvwire.ParseFormsRequest(body)
	if err != nil {
		return s.refuse(id, err)
	}
	var ds []kvwire.Descriptor
	if have := s.d.m.cfg.Forms; have != nil {
		ds = have(ns)
	}
	out, err := kvwire.AppendForms(nil, ds)
	if err != nil {
		return err
	}
	_ = s.c.SetWriteDeadline(time.Now().Add(answerTime))
	return s.answer(kvwire.TypeForms, id, out)
}
