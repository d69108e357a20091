package capacity

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// period is over which a share of a processor is counted, the kernel's default.
const period = 100 * time.Millisecond

// share is a control group that gives each process put under it its own part
// of one processor: cgroup v2, or v1 with the cpu controller.
type share struct {
	root string // the group's folder
	v2   bool
}

// ErrNoGroups says that processes cannot be given parts of a processor here.
var ErrNoGroups = errors.New("no control group with a cpu controller can be written")

// newShare makes a group beside this process's own. The error wraps
// [ErrNoGroups] where that cannot be done.
func newShare() (*share, error) {
	name := fmt.Sprintf("membrane-bench-%d", os.Getpid())
	var tried []string
	for _, place := range []struct {
		mount string
		v2    bool
	}{{"/sys/fs/cgroup", true}, {"/sys/fs/cgroup/cpu", false}, {"/sys/fs/cgroup/cpu,cpuacct", false}} {
		probe := "cpu.cfs_quota_us"
		if place.v2 {
			probe = "cgroup.subtree_control"
		}
		if _, err := os.Stat(filepath.Join(place.mount, probe)); err != nil {
			tried = append(tried, place.mount+": has no "+probe)
			continue
		}
		s := &share{root: filepath.Join(place.mount, name), v2: place.v2}
		if err := s.make(place.mount); err != nil {
			tried = append(tried, err.Error())
			_ = os.Remove(s.root)
			continue
		}
		return s, nil
	}
	return nil, fmt.Errorf("%w: %s", ErrNoGroups, strings.Join(tried, "; "))
}

func (s *share) make(mount string) error {
	if err := os.Mkdir(s.root, 0o755); err != nil {
		return err
	}
	if !s.v2 {
		return nil
	}
	for _, folder := range []string{mount, s.root} {
		if err := os.WriteFile(filepath.Join(folder, "cgroup.subtree_control"), []byte("+cpu"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// put gives a process a part of one processor, between 0 and 1.
func (s *share) put(pid int, part float64) error {
	dir := filepath.Join(s.root, strconv.Itoa(pid))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("cannot make a control group: %w", err)
	}
	quota := int64(part * float64(period.Microseconds()))
	files := [][2]string{
		{"cpu.cfs_period_us", strconv.FormatInt(period.Microseconds(), 10)},
		{"cpu.cfs_quota_us", strconv.FormatInt(quota, 10)},
	}
	if s.v2 {
		files = [][2]string{{"cpu.max", fmt.Sprintf("%d %d", quota, period.Microseconds())}}
	}
	for _, f := range append(files, [2]string{"cgroup.procs", strconv.Itoa(pid)}) {
		if err := os.WriteFile(filepath.Join(dir, f[0]), []byte(f[1]), 0o644); err != nil {
			return fmt.Errorf("cannot limit process %d: %w", pid, err)
		}
	}
	return nil
}

// close removes the group. Its processes must have ended.
func (s *share) close() error {
	entries, err := os.ReadDir(s.root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, os.Remove(filepath.Join(s.root, e.Name())))
		}
	}
	return errors.Join(err, os.Remove(s.root))
}
