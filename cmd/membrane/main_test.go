package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	timeout = 2 * time.Minute
	tick    = 20 * time.Millisecond
)

// binary is the program under test: the one that MEMBRANE_BIN names, else one
// that is built for this run.
var binary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if binary = os.Getenv("MEMBRANE_BIN"); binary != "" {
			return m.Run()
		}
		dir, err := os.MkdirTemp("", "membrane")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() { _ = os.RemoveAll(dir) }()
		binary = filepath.Join(dir, "membrane")
		args := []string{"build", "-buildvcs=false", "-o", binary}
		if race {
			args = append(args, "-race")
		}
		build := exec.Command("go", append(args, ".")...)
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "cannot build membrane: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// command prepares the binary with an environment of its own.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "XDG_RUNTIME_DIR=" + runtimeDir(t)}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// runtimeDir is short, because a socket's path must be.
func runtimeDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "mb")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

type outcome struct {
	status   int
	out, err string
}

// finish runs a command to its end.
func finish(t *testing.T, args ...string) outcome {
	t.Helper()
	return finishCommand(t, command(t, args...))
}

func finishCommand(t *testing.T, cmd *exec.Cmd) outcome {
	t.Helper()
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	require.NoError(t, cmd.Start())
	kill := time.AfterFunc(timeout, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait()
	require.True(t, kill.Stop(), "%v does not end:\n%s", cmd.Args, err.String())
	return outcome{cmd.ProcessState.ExitCode(), out.String(), err.String()}
}

// node is a running `membrane serve`.
type node struct {
	cmd    *exec.Cmd
	exited chan struct{}
	fields map[string]string // of the line "serving"

	mu  sync.Mutex
	log bytes.Buffer
}

// startNode starts `membrane serve` on free ports and waits until it serves.
func startNode(t *testing.T, args ...string) *node {
	t.Helper()
	return startCommand(t, command(t, append([]string{"serve", "--log-format", "json", "--memory", "32MiB", "--inbox", "4MiB", "--port", "0", "--engine-addr", "127.0.0.1:0"}, args...)...))
}

func startCommand(t *testing.T, cmd *exec.Cmd) *node {
	t.Helper()
	return startUntil(t, cmd, "serving")
}

// startUntil starts a process that logs JSON and waits for a message.
func startUntil(t *testing.T, cmd *exec.Cmd, message string) *node {
	t.Helper()
	n := &node{cmd: cmd, exited: make(chan struct{}), fields: make(map[string]string)}
	log, err := n.cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, n.cmd.Start())
	serving := make(chan struct{})
	go func() {
		defer close(n.exited)
		lines := bufio.NewScanner(log)
		for lines.Scan() {
			n.mu.Lock()
			n.log.WriteString(lines.Text() + "\n")
			n.mu.Unlock()
			var fields map[string]any
			if json.Unmarshal(lines.Bytes(), &fields) == nil && fields["message"] == message {
				for k, v := range fields {
					n.fields[k] = fmt.Sprint(v)
				}
				close(serving)
			}
		}
		_ = n.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = n.cmd.Process.Kill()
		<-n.exited
		if t.Failed() {
			t.Logf("log of %v:\n%s", n.cmd.Args, n.text())
		}
	})
	select {
	case <-serving:
	case <-n.exited:
		t.Fatalf("%v ended with status %d:\n%s", n.cmd.Args, n.cmd.ProcessState.ExitCode(), n.text())
	case <-time.After(timeout):
		t.Fatalf("%v does not serve:\n%s", n.cmd.Args, n.text())
	}
	return n
}

func (n *node) text() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.log.String()
}

func (n *node) url() string { return "http://" + n.fields["http"] }

func (n *node) signal(t *testing.T, s os.Signal) {
	t.Helper()
	require.NoError(t, n.cmd.Process.Signal(s))
	if s == syscall.SIGSTOP {
		require.Eventually(t, n.stopped, timeout, tick, "the node stands still")
	}
}

// stopped reports whether every thread of the node stands still: a thread that
// runs goes on for a moment after the signal was sent.
func (n *node) stopped() bool {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", n.cmd.Process.Pid))
	if err != nil || len(tasks) == 0 {
		return false
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		_, state, ok := strings.Cut(string(b), ") ")
		if err != nil || !ok || !strings.HasPrefix(state, "T") {
			return false
		}
	}
	return true
}

// wait returns the status with which the node ends.
func (n *node) wait(t *testing.T) int {
	t.Helper()
	select {
	case <-n.exited:
		return n.cmd.ProcessState.ExitCode()
	case <-time.After(timeout):
		t.Fatalf("%v does not end:\n%s", n.cmd.Args, n.text())
		return -1
	}
}

var plain = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: timeout}

func (n *node) status(t *testing.T, path string) int {
	t.Helper()
	res, err := plain.Get(n.url() + path)
	require.NoError(t, err)
	_ = res.Body.Close()
	return res.StatusCode
}

// client runs `membrane client` against the node and decodes what it prints.
func (n *node) client(t *testing.T, args ...string) map[string]any {
	t.Helper()
	got := finish(t, append([]string{"client", "--base-url", n.url()}, args...)...)
	require.Zero(t, got.status, got.err)
	var v map[string]any
	require.NoError(t, json.Unmarshal([]byte(got.out), &v), got.out)
	return v
}

// meets waits until a node sees so many healthy peers.
func (n *node) meets(t *testing.T, peers int) {
	t.Helper()
	_, port, _ := strings.Cut(n.fields["http"], ":")
	require.Eventually(t, func() bool {
		got := finish(t, "cluster-status", "--host", "127.0.0.1", "--port", port)
		return got.status == 0 && strings.Count(got.out, "true") == peers
	}, timeout, 100*time.Millisecond)
}

func TestHelpShowsNoKey(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"client", "--help"}, {"cluster-status", "--help"}, {"engine", "--help"}} {
		cmd := command(t, args...)
		cmd.Env = append(cmd.Env, "MEMBRANE_API_KEY=mbr_secret")
		got := finishCommand(t, cmd)
		assert.Zero(t, got.status)
		assert.Contains(t, got.out, "MEMBRANE_API_KEY", "%q", args)
		assert.NotContains(t, got.out+got.err, "mbr_secret", "%q", args)
	}
}

func TestBadCommandLinesAreStatusTwo(t *testing.T) {
	t.Parallel()
	f := func(want string, args ...string) {
		t.Helper()
		got := finish(t, args...)
		assert.Equal(t, exitUsage, got.status, "%q", args)
		assert.Contains(t, got.err, want, "%q", args)
		assert.Empty(t, got.out, "%q", args)
	}
	f("needs a command", "bench")
	f(`"cor" is not a command`, "bench", "cor")
	f("is not http://HOST:PORT", "client", "inventory", "--base-url", "localhost:8080")
	f("is not http://HOST:PORT", "client", "inventory", "--base-url", "http://")
}

func TestRelativeSocketIsToldAbsolute(t *testing.T) {
	t.Parallel()
	cmd := command(t, "serve", "--port", "0", "--engine-addr", "off", "--log-format", "json", "--engine-socket", "e.sock")
	cmd.Dir = runtimeDir(t)
	n := startCommand(t, cmd)
	assert.Equal(t, cmd.Dir+"/e.sock", n.fields["engine_socket"])
	n.signal(t, syscall.SIGTERM)
	assert.Zero(t, n.wait(t))
}
