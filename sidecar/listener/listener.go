package listener

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// Conn is one connection.
type Conn interface {
	comparable
	// Run serves it until it ends, and closes it.
	Run()
	// Shut ends it, whatever is under way. It is called by other goroutines.
	Shut()
}

// Config is what a [Listener] needs. Log may be the zero value, the rest not.
type Config[C Conn] struct {
	// Who connects, for the log: "a Redis client".
	Who string
	// Connections is the most at a time, FromOne the most of them from one
	// address, and Strangers the most that have not said who they are, beyond
	// which the oldest makes room.
	Connections, FromOne, Strangers int
	// Open makes a connection; known says that it is no stranger.
	Open func(nc *net.TCPConn) (c C, known bool, err error)
	// Refuse tells somebody beyond a limit so; the listener then closes it.
	Refuse func(nc *net.TCPConn)
	// TurnedAway counts who was refused, and strangers who made room.
	TurnedAway func()
	Log        zerolog.Logger
}

// Listener accepts clients and keeps their goroutines.
type Listener[C Conn] struct {
	cfg    Config[C]
	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	listeners []net.Listener
	conns     map[C]netip.Addr
	from      map[netip.Addr]int
	strangers []C // oldest first
}

// New checks the configuration and returns a listener that listens nowhere.
func New[C Conn](cfg Config[C]) (*Listener[C], error) {
	if cfg.Who == "" || cfg.Open == nil || cfg.Refuse == nil || cfg.TurnedAway == nil {
		return nil, errors.New("cannot make a listener: Who, Open, Refuse and TurnedAway are needed")
	}
	if cfg.Connections < 1 || cfg.FromOne < 1 || cfg.Strangers < 1 {
		return nil, errors.New("cannot make a listener: Connections, FromOne and Strangers are at least 1")
	}
	l := &Listener[C]{cfg: cfg, conns: make(map[C]netip.Addr), from: make(map[netip.Addr]int)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l, nil
}

// Context ends at Close.
func (l *Listener[C]) Context() context.Context { return l.ctx }

// Connections returns how many clients are connected.
func (l *Listener[C]) Connections() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.conns)
}

// Serve accepts clients on a TCP listener until Close. It returns at once; the
// error is [net.ErrClosed] after Close.
func (l *Listener[C]) Serve(on net.Listener) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	l.listeners = append(l.listeners, on)
	l.wg.Go(func() { l.accept(on) })
	return nil
}

func (l *Listener[C]) accept(on net.Listener) {
	for {
		nc, err := on.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			l.cfg.Log.Warn().Err(err).Msg("cannot accept " + l.cfg.Who)
			select { // out of descriptors, most likely: let some be closed
			case <-time.After(100 * time.Millisecond):
			case <-l.ctx.Done():
				return
			}
			continue
		}
		if tcp, ok := nc.(*net.TCPConn); ok {
			l.admit(tcp)
		} else {
			_ = nc.Close()
		}
	}
}

// admit starts the goroutine of a new connection.
func (l *Listener[C]) admit(nc *net.TCPConn) {
	c, known, err := l.cfg.Open(nc)
	if err != nil {
		l.cfg.Log.Warn().Err(err).Msg("cannot serve " + l.cfg.Who)
		_ = nc.Close()
		return
	}
	var addr netip.Addr
	if a, ok := nc.RemoteAddr().(*net.TCPAddr); ok {
		addr = a.AddrPort().Addr().Unmap()
	}
	l.mu.Lock()
	refused := l.closed || len(l.conns) >= l.cfg.Connections || l.from[addr] >= l.cfg.FromOne
	var oldest []C
	if !refused {
		if !known {
			if len(l.strangers) >= l.cfg.Strangers {
				oldest = append(oldest, l.strangers[0])
				l.strangers = slices.Delete(l.strangers, 0, 1)
			}
			l.strangers = append(l.strangers, c)
		}
		l.conns[c] = addr
		l.from[addr]++
		l.wg.Go(func() {
			defer l.forget(c)
			c.Run()
		})
	}
	l.mu.Unlock()
	if refused {
		l.cfg.TurnedAway()
		_ = nc.SetWriteDeadline(time.Now().Add(time.Second))
		l.cfg.Refuse(nc)
		_ = nc.Close()
	}
	for _, o := range oldest {
		l.cfg.TurnedAway()
		o.Shut()
	}
}

// Met takes a connection out of the strangers.
func (l *Listener[C]) Met(c C) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.met(c)
}

func (l *Listener[C]) met(c C) {
	if i := slices.Index(l.strangers, c); i >= 0 {
		l.strangers = slices.Delete(l.strangers, i, i+1)
	}
}

func (l *Listener[C]) forget(c C) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.met(c)
	addr := l.conns[c]
	delete(l.conns, c)
	if l.from[addr]--; l.from[addr] == 0 {
		delete(l.from, addr)
	}
}

// Close ends every connection and waits for all goroutines. The second time
// it returns [net.ErrClosed].
func (l *Listener[C]) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.closed = true
	l.cancel()
	var err error
	for _, on := range l.listeners {
		err = errors.Join(err, on.Close())
	}
	for c := range l.conns {
		c.Shut()
	}
	l.mu.Unlock()
	l.wg.Wait()
	return err
}
