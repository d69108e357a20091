package peers

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// server is a system's process and those that it starts: a process group of
// its own, which dies with this process.
type server struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer
	exited chan struct{}
	first  chan string         // its first line on standard output
	ready  chan map[string]any // the log line that names its addresses

	mu   sync.Mutex
	tail bytes.Buffer // the last of its log, for errors
}

const (
	maxTail = 16 << 10
	// maxLine is the longest line that is read: a helper's answer has 20 bytes
	// for each operation of a cell.
	maxLine = 256 << 20
)

// spawn starts a program. dir is its working folder, env goes on top of ours.
func spawn(name, dir string, env []string, program string, args ...string) (*server, error) {
	s := &server{
		name: name, cmd: exec.Command(program, args...), exited: make(chan struct{}),
		first: make(chan string, 1), ready: make(chan map[string]any, 1),
	}
	s.cmd.Dir, s.cmd.Env = dir, append(os.Environ(), env...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	fail := func(err error) (*server, error) { return nil, fmt.Errorf("cannot start %s: %w", name, err) }
	in, err := s.cmd.StdinPipe()
	if err != nil {
		return fail(err)
	}
	s.stdin = in
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return fail(err)
	}
	log, err := s.cmd.StderrPipe()
	if err != nil {
		return fail(err)
	}
	if err := s.cmd.Start(); err != nil {
		return fail(err)
	}
	var wg sync.WaitGroup
	for _, r := range []io.Reader{out, log} {
		wg.Go(func() { s.follow(r, r == io.Reader(out)) })
	}
	go func() {
		wg.Wait()
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	return s, nil
}

// follow keeps the end of what a process says.
func (s *server) follow(r io.Reader, stdout bool) {
	scan := bufio.NewScanner(r)
	scan.Buffer(nil, maxLine)
	for scan.Scan() {
		s.mu.Lock()
		if s.tail.Len() > maxTail {
			s.tail.Reset()
		}
		s.tail.Write(scan.Bytes()[max(len(scan.Bytes())-maxTail, 0):])
		s.tail.WriteByte('\n')
		s.mu.Unlock()
		if stdout {
			select {
			case s.first <- scan.Text():
			default:
			}
		}
		var fields map[string]any
		if json.Unmarshal(scan.Bytes(), &fields) == nil && fields["message"] == "serving" {
			select {
			case s.ready <- fields:
			default:
			}
		}
	}
}

func (s *server) log() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tail.String()
}

func (s *server) ended() error {
	return fmt.Errorf("%s ended before it was ready:\n%s", s.name, s.log())
}

func (s *server) late(ctx context.Context) error {
	return fmt.Errorf("%s was not ready in time: %w\n%s", s.name, ctx.Err(), s.log())
}

// firstLine waits for the first line on standard output.
func (s *server) firstLine(ctx context.Context) (string, error) {
	select {
	case line := <-s.first:
		return line, nil
	case <-s.exited:
		return "", s.ended()
	case <-ctx.Done():
		return "", s.late(ctx)
	}
}

// serving waits for a sidecar's line that names its addresses.
func (s *server) serving(ctx context.Context) (map[string]any, error) {
	select {
	case fields := <-s.ready:
		return fields, nil
	case <-s.exited:
		return nil, s.ended()
	case <-ctx.Done():
		return nil, s.late(ctx)
	}
}

// accepts waits until the address takes connections.
func (s *server) accepts(ctx context.Context, addr string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var d net.Dialer
		if c, err := d.DialContext(ctx, "tcp", addr); err == nil {
			return c.Close()
		}
		select {
		case <-tick.C:
		case <-s.exited:
			return s.ended()
		case <-ctx.Done():
			return s.late(ctx)
		}
	}
}

// kill ends the process group and waits for its first process.
func (s *server) kill() {
	_ = s.signal(syscall.SIGCONT)
	_ = s.signal(syscall.SIGKILL)
	_ = s.stdin.Close()
	<-s.exited
}

func (s *server) signal(sig syscall.Signal) error {
	if err := syscall.Kill(-s.cmd.Process.Pid, sig); err != nil {
		return fmt.Errorf("cannot signal %s: %w\n%s", s.name, err, s.log())
	}
	return nil
}

// pause stops every process of the system and returns once they have stopped.
func (s *server) pause(ctx context.Context) error { return s.change(ctx, syscall.SIGSTOP, true) }

// resume lets them go on.
func (s *server) resume(ctx context.Context) error { return s.change(ctx, syscall.SIGCONT, false) }

func (s *server) change(ctx context.Context, sig syscall.Signal, stopped bool) error {
	if err := s.signal(sig); err != nil {
		return err
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		group, err := s.group()
		if err != nil {
			return err
		}
		done := true
		for _, p := range group {
			if p.state != 'Z' && (p.state == 'T') != stopped {
				done = false
			}
		}
		if done {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("cannot see %s change its state: %w", s.name, ctx.Err())
		}
	}
}

// member is one process of a group.
type member struct {
	pid   int
	state byte
	cpu   time.Duration // its own and of children that it has waited for
}

// group reads the processes of the group from /proc.
func (s *server) group() ([]member, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	var list []member
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // ended meanwhile
		}
		m, pgid, err := parseStat(string(b))
		if err != nil {
			return nil, fmt.Errorf("cannot read %q: %w", path, err)
		}
		if pgid == s.cmd.Process.Pid {
			list = append(list, m)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s has ended:\n%s", s.name, s.log())
	}
	return list, nil
}

// parseStat reads one line of /proc/PID/stat.
func parseStat(line string) (m member, pgid int, err error) {
	pid, rest, ok := strings.Cut(line, " (")
	end := strings.LastIndex(rest, ") ")
	if !ok || end < 0 {
		return m, 0, fmt.Errorf("%q is not a process", line)
	}
	f := strings.Fields(rest[end+2:])
	if len(f) < 15 || len(f[0]) != 1 {
		return m, 0, fmt.Errorf("%q is not a process", line)
	}
	const tick = time.Second / 100 // USER_HZ is 100 on every Linux port of Go
	m.state = f[0][0]
	m.pid, err = strconv.Atoi(pid)
	group, err2 := strconv.Atoi(f[2])
	err = errors.Join(err, err2)
	for _, text := range f[11:15] {
		n, e := strconv.ParseInt(text, 10, 64)
		m.cpu += time.Duration(n) * tick
		err = errors.Join(err, e)
	}
	return m, group, err
}

// cpu returns the processor time of the group.
func (s *server) cpu() (time.Duration, error) {
	group, err := s.group()
	var sum time.Duration
	for _, m := range group {
		sum += m.cpu
	}
	return sum, err
}

// memory returns the proportional set size of the group, in bytes: what is
// shared with another process counts in parts.
func (s *server) memory() (int64, error) { return s.sum("smaps_rollup", "Pss") }

// resident returns the resident set size of the group, in bytes.
func (s *server) resident() (int64, error) { return s.sum("status", "VmRSS") }

func (s *server) sum(file, field string) (int64, error) {
	group, err := s.group()
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, m := range group {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", m.pid, file))
		if err != nil {
			continue // ended meanwhile
		}
		for line := range strings.Lines(string(b)) {
			text, ok := strings.CutPrefix(line, field+":")
			if !ok {
				continue
			}
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(text), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("cannot read %q of %s: %w", field, s.name, err)
			}
			sum += kib << 10
		}
	}
	return sum, nil
}

// freePort returns a port of the loopback interface that nothing listens on.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("cannot find a free port: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}
