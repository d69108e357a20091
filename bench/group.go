package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// groupPatience is how long a program gets to end its own children before all
// of them are killed.
const groupPatience = 20 * time.Second

// group is a program together with every process that it starts. They are
// stopped and continued together, and end when this process ends, however that
// comes about: a guard process beside them sees its standard input close.
type group struct {
	name  string
	log   string // path; what the program says
	guard *exec.Cmd
	stdin io.Closer
	pgid  int
	// exited is closed when the guard has ended, after every process of the
	// group.
	exited chan struct{}
	stop   sync.Once
}

// startGroup runs argv with env in a process group of its own, guarded by the
// membrane binary. What it says goes to NAME.log in dir.
func startGroup(binary, dir, name string, env, argv []string) (*group, error) {
	g := &group{name: name, log: filepath.Join(dir, name+".log"), exited: make(chan struct{})}
	out, err := os.Create(g.log)
	if err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	defer func() { _ = out.Close() }()
	g.guard = exec.Command(binary, append([]string{"bench", "keep-group", "--"}, argv...)...)
	g.guard.Env, g.guard.Stderr = env, out
	g.guard.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's Ctrl-C is for this process
	if g.stdin, err = g.guard.StdinPipe(); err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	stdout, err := g.guard.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	if err := g.guard.Start(); err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	line, readErr := bufio.NewReader(stdout).ReadString('\n')
	go func() {
		defer close(g.exited)
		_ = g.guard.Wait()
	}()
	if g.pgid, err = strconv.Atoi(strings.TrimSpace(line)); err != nil {
		g.close()
		return nil, fmt.Errorf("cannot start %s: %w\n%s", name, errors.Join(readErr, err), g.tail())
	}
	return g, nil
}

// signal sends a signal to every process of the group.
func (g *group) signal(s syscall.Signal) error {
	if err := syscall.Kill(-g.pgid, s); err != nil {
		return fmt.Errorf("cannot send %s to %s: %w", s, g.name, err)
	}
	return nil
}

// running reports whether the program has not ended.
func (g *group) running() bool {
	select {
	case <-g.exited:
		return false
	default:
		return true
	}
}

// close ends every process of the group and returns when the last has ended.
// It may be called again.
func (g *group) close() {
	g.stop.Do(func() { _ = g.stdin.Close() })
	<-g.exited
}

const tailLines = 30

// tail returns the last lines of the program's log, for errors.
func (g *group) tail() string {
	b, _ := os.ReadFile(g.log)
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(len(lines)-tailLines, 0):], "\n")
}

// waitUntil asks again until ready is true, the program has ended or ctx is
// done.
func (g *group) waitUntil(ctx context.Context, ready func() bool) error {
	err := poll(ctx, "the start of "+g.name, func() (bool, error) { return !g.running() || ready(), nil })
	if err == nil && !g.running() {
		err = fmt.Errorf("%s ended before it was ready", g.name)
	}
	if err != nil {
		return fmt.Errorf("%w\n%s", err, g.tail())
	}
	return nil
}

// KeepGroup runs argv in a process group of its own, prints the group's id and
// waits until the program has ended or stdin closes; then it ends every process
// of the group. It is the guard that the benchmarks start their engines with.
func KeepGroup(stdin io.Reader, stdout, log io.Writer, argv []string) error {
	if len(argv) == 0 {
		return errors.New("cannot keep a group: no program is given")
	}
	// Whoever started the guard decides when to end, by closing stdin.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	// Processes that lose their parent come to the guard, which reaps them.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("cannot adopt orphans: %w", err)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("cannot start %q: %w", argv[0], err)
	}
	pgid := cmd.Process.Pid
	closed, ended := make(chan struct{}), make(chan struct{})
	var result error
	go func() { defer close(closed); _, _ = io.Copy(io.Discard, stdin) }()
	go func() { defer close(ended); result = cmd.Wait() }()
	if _, err := fmt.Fprintln(stdout, pgid); err != nil {
		endGroup(pgid, cmd, ended)
		return fmt.Errorf("cannot tell the group's id: %w", err)
	}
	select {
	case <-ended:
		killGroup(pgid)
		return result
	case <-closed:
		endGroup(pgid, cmd, ended)
		return nil
	}
}

// endGroup asks the program to end and kills what is left of its group.
func endGroup(pgid int, cmd *exec.Cmd, ended <-chan struct{}) {
	_ = syscall.Kill(-pgid, syscall.SIGCONT)
	_ = cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(groupPatience)
	defer timer.Stop()
	select {
	case <-ended:
		killGroup(pgid)
	case <-timer.C:
		_ = syscall.Kill(-pgid, syscall.SIGKILL)
		<-ended // so that nobody else reaps the program
		killGroup(pgid)
	}
}

// killGroup kills every process of a group and reaps those that are ours by
// now.
func killGroup(pgid int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = poll(ctx, "the end of a process group", func() (bool, error) {
		gone := errors.Is(syscall.Kill(-pgid, syscall.SIGKILL), syscall.ESRCH)
		for {
			if pid, err := syscall.Wait4(-pgid, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
				break
			}
		}
		return gone, nil
	})
}
