package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"
)

// member is a process that is killed, stopped and started again. Its methods
// may be called by several goroutines; faults of one member come one at a
// time.
type member struct {
	name  string
	begin func(context.Context) (p *process, addr string, err error)

	hurt sync.Mutex // held for a fault: the next one waits until it is healed

	mu         sync.Mutex
	proc       *process
	addr       string        // HOST:PORT of its HTTP
	generation int           // counts the ends of its processes
	up         chan struct{} // closed while there is a process
	stoppedAt  time.Time     // zero unless it is stopped now
	stopped    time.Duration // for how long it was stopped before
}

func newMember(name string, begin func(context.Context) (*process, string, error)) *member {
	return &member{name: name, begin: begin, up: make(chan struct{})}
}

// start starts its process and waits until it serves.
func (m *member) start(ctx context.Context) error {
	p, addr, err := m.begin(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.proc, m.addr = p, addr
	close(m.up)
	return nil
}

// current waits until there is a process and returns its address and
// generation.
func (m *member) current(ctx context.Context) (addr string, generation int, err error) {
	for {
		m.mu.Lock()
		up := m.up
		if m.proc != nil {
			defer m.mu.Unlock()
			return m.addr, m.generation, nil
		}
		m.mu.Unlock()
		select {
		case <-up:
		case <-ctx.Done():
			return "", 0, ctx.Err()
		}
	}
}

// gone reports whether the process of a generation is not the present one.
func (m *member) gone(generation int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.generation != generation
}

// running returns the present process, nil if there is none.
func (m *member) running() *process {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proc
}

// take removes the process, so that whatever fails from now on is excused.
func (m *member) take() *process {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.proc
	if p != nil {
		m.proc, m.up = nil, make(chan struct{})
		m.generation++
	}
	return p
}

// stoppedFor is how long the member was stopped in all.
func (m *member) stoppedFor() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stoppedAt.IsZero() {
		return m.stopped
	}
	return m.stopped + time.Since(m.stoppedAt)
}

// freeze stops the process until thaw.
func (m *member) freeze() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stoppedAt = time.Now()
	return m.signal(syscall.SIGSTOP)
}

func (m *member) thaw() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.signal(syscall.SIGCONT)
	m.stopped, m.stoppedAt = m.stopped+time.Since(m.stoppedAt), time.Time{}
	return err
}

// signal is called with mu held.
func (m *member) signal(s syscall.Signal) error {
	if m.proc == nil {
		return fmt.Errorf("cannot send %s to %s: there is no process", s, m.name)
	}
	if err := m.proc.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("cannot send %s to %s: %w", s, m.name, err)
	}
	return nil
}

// died reports a process that ended by itself.
func (m *member) died() error {
	p := m.running()
	if p == nil {
		return nil
	}
	select {
	case <-p.exited:
		return fmt.Errorf("%s ended by itself:\n%s", m.name, p.log())
	default:
		return nil
	}
}

// suffer has the fault and heals. It ends early, healed as well, when ctx
// ends.
func (m *member) suffer(ctx context.Context, f fault) error {
	m.hurt.Lock()
	defer m.hurt.Unlock()
	if err := m.died(); err != nil {
		return err
	}
	if !f.kind.ends() {
		err := m.freeze()
		_ = pause(ctx, f.lasts)
		return errors.Join(err, m.thaw())
	}
	p := m.take()
	if p == nil {
		return fmt.Errorf("cannot %s: there is no process", f)
	}
	var err error
	if f.kind == restartSidecar {
		err = p.stop(stopPatience)
	} else {
		p.kill()
	}
	_ = pause(ctx, f.lasts)
	return errors.Join(err, m.start(context.WithoutCancel(ctx)))
}

const stopPatience = 20 * time.Second
