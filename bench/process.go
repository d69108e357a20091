package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a child that runs one of the binary's commands and logs JSON
// lines. It dies with this process.
type process struct {
	name   string
	cmd    *exec.Cmd
	exited chan struct{}

	mu     sync.Mutex
	tail   bytes.Buffer // the last of its log, for errors
	waiter map[string]chan map[string]any
}

const maxTail = 16 << 10

// start runs the binary with args; name is for errors.
func start(binary, name string, args ...string) (*process, error) {
	return startEnv(nil, binary, name, args...)
}

// startEnv is start with further environment variables.
func startEnv(env []string, binary, name string, args ...string) (*process, error) {
	p := &process{name: name, cmd: exec.Command(binary, args...), exited: make(chan struct{}), waiter: map[string]chan map[string]any{}}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if len(env) > 0 {
		p.cmd.Env = append(os.Environ(), env...)
	}
	log, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	go func() {
		defer close(p.exited)
		scan := bufio.NewScanner(log)
		scan.Buffer(nil, 1<<20)
		for scan.Scan() {
			p.line(scan.Bytes())
		}
		_ = p.cmd.Wait()
	}()
	return p, nil
}

func (p *process) line(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tail.Len() > maxTail {
		p.tail.Reset()
	}
	p.tail.Write(b)
	p.tail.WriteByte('\n')
	var fields map[string]any
	if json.Unmarshal(b, &fields) != nil {
		return
	}
	message, _ := fields["message"].(string)
	select {
	case p.channel(message) <- fields:
	default:
	}
}

// channel holds the first log line with a message. Called with mu held.
func (p *process) channel(message string) chan map[string]any {
	c, ok := p.waiter[message]
	if !ok {
		c = make(chan map[string]any, 1)
		p.waiter[message] = c
	}
	return c
}

// logged waits for a log line with the given message and returns its fields.
func (p *process) logged(ctx context.Context, message string) (map[string]any, error) {
	p.mu.Lock()
	c := p.channel(message)
	p.mu.Unlock()
	select {
	case fields := <-c:
		return fields, nil
	case <-p.exited:
		return nil, fmt.Errorf("%s ended before it was ready:\n%s", p.name, p.log())
	case <-ctx.Done():
		return nil, fmt.Errorf("%s was not ready in time: %w\n%s", p.name, ctx.Err(), p.log())
	}
}

func (p *process) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tail.String()
}

// kill ends the process at once and waits for it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// stop asks the process to end, waits for it, and kills it when it takes
// longer than the given time.
func (p *process) stop(patience time.Duration) error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
		p.kill()
		return fmt.Errorf("%s did not stop within %s and was killed:\n%s", p.name, patience, p.log())
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("%s ended with exit status %d:\n%s", p.name, code, p.log())
	}
	return nil
}

// proc returns the folder of a process in /proc.
func (p *process) proc() string { return fmt.Sprintf("/proc/%d", p.cmd.Process.Pid) }

// memory returns the proportional set size of a process, in bytes.
func (p *process) memory() (int64, error) {
	kib, err := strconv.ParseInt(strings.TrimSuffix(field(p.proc()+"/smaps_rollup", "Pss"), " kB"), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("cannot read the memory of %s: %w", p.name, err)
	}
	return kib << 10, nil
}

// cpu returns the processor time that a process has used, user and system.
func (p *process) cpu() (time.Duration, error) {
	b, err := os.ReadFile(p.proc() + "/stat")
	if err != nil {
		return 0, fmt.Errorf("cannot read the processor time of %s: %w", p.name, err)
	}
	_, rest, ok := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	if !ok || len(f) < 13 {
		return 0, fmt.Errorf("cannot read the processor time of %s: %q", p.name, b)
	}
	user, err1 := strconv.ParseInt(f[11], 10, 64)
	system, err2 := strconv.ParseInt(f[12], 10, 64)
	const tick = time.Second / 100 // USER_HZ is 100 on every Linux port of Go
	return time.Duration(user+system) * tick, errors.Join(err1, err2)
}

// sidecar is a running `membrane serve`.
type sidecar struct {
	*process
	http   string         // HOST:PORT
	socket string         // path of the engine socket
	gossip string         // HOST:PORT
	fields map[string]any // of the line that says where it serves
}

// field returns a text of the line that says where the sidecar serves.
func (s *sidecar) field(name string) string { text, _ := s.fields[name].(string); return text }

// startSidecar starts a sidecar on free ports of the loopback interface and
// waits until it serves. Its sockets are in dir.
func startSidecar(ctx context.Context, binary, dir, name string, args ...string) (*sidecar, error) {
	return startSidecarEnv(ctx, nil, binary, dir, name, args...)
}

// startSidecarEnv is startSidecar with further environment variables.
func startSidecarEnv(ctx context.Context, env []string, binary, dir, name string, args ...string) (*sidecar, error) {
	args = append([]string{
		"serve", "--node-id", name, "--port", "0", "--engine-addr", "127.0.0.1:0", "--engine-socket", dir + "/" + name + ".sock",
		"--data-addr", "127.0.0.1:0", "--gossip-addr", "127.0.0.1:0", "--log-format", "json",
	}, args...)
	p, err := startEnv(env, binary, "sidecar "+name, args...)
	if err != nil {
		return nil, err
	}
	fields, err := p.logged(ctx, "serving")
	if err != nil {
		p.kill()
		return nil, err
	}
	s := &sidecar{process: p, fields: fields}
	s.http, s.socket, s.gossip = s.field("http"), s.field("engine_socket"), s.field("gossip")
	return s, nil
}
