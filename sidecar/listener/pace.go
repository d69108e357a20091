package listener

import (
	"sync/atomic"
	"time"
)

// slowest is how slowly a value may come, in bytes a second.
const slowest = 1 << 20

// Pace is the [Source] of a connection whose client may take as long as it
// likes before a request, but only a while for the rest of one.
type Pace struct {
	sock  *Sock
	busy  *atomic.Int64
	stall time.Duration

	within  bool // a request
	limited bool // the read deadline is the request's
	bound   bool // one deadline holds, whatever comes
}

// NewPace returns the pace of a connection. The rest of a request may take
// stall, plus a second for each MiB of a value. Busy counts the connections
// that do something; it goes down by one while a request is waited for.
func NewPace(sock *Sock, busy *atomic.Int64, stall time.Duration) *Pace {
	return &Pace{sock: sock, busy: busy, stall: stall}
}

// Await says that no request is under way.
func (p *Pace) Await() { p.within = false }

// Begin says that one is.
func (p *Pace) Begin() { p.within = true }

// Hurry sets the deadline for the rest of a request with n bytes of values. It
// does nothing where [Pace.Bind] has set another.
func (p *Pace) Hurry(n int64) error {
	if p.bound {
		return nil
	}
	p.limited = true
	return p.sock.TCP.SetReadDeadline(time.Now().Add(p.stall + time.Duration(n/slowest)*time.Second))
}

// Done ends the deadline of a request, which was read.
func (p *Pace) Done() error {
	if p.bound || !p.limited {
		return nil
	}
	p.limited = false
	return p.sock.TCP.SetReadDeadline(time.Time{})
}

// Bind gives the client one deadline for all that it sends until [Pace.Free].
func (p *Pace) Bind(limit time.Duration) error {
	p.bound, p.limited = true, false
	return p.sock.TCP.SetReadDeadline(time.Now().Add(limit))
}

// Free ends what Bind began, once the present request is done.
func (p *Pace) Free() { p.bound, p.limited = false, true }

// Read waits for bytes, until a deadline if there is one.
func (p *Pace) Read(b []byte) (int, error) {
	if !p.within {
		p.busy.Add(-1)
		defer p.busy.Add(1)
	} else if !p.limited {
		if err := p.Hurry(0); err != nil {
			return 0, err
		}
	}
	return p.sock.Read(b)
}
