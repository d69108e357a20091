package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ChaosSidecar is a sidecar that is asked for nothing. Its JSON form is kept
// stable.
type ChaosSidecar struct {
	Name         string `json:"name"`
	HealthyPeers int    `json:"healthy_peers"`
	Engines      int    `json:"engines"`
	// What requests hold, all 0 when none is under way.
	Leases        int64 `json:"leases"`
	EngineLeases  int64 `json:"engine_leases"`
	Pins          int64 `json:"pins"`
	PinnedBytes   int64 `json:"pinned_bytes"`
	Handles       int64 `json:"handles"`
	ReservedSlots int64 `json:"reserved_slots"`
	Held          int64 `json:"held"` // views and slots of the arena
	Pulls         int64 `json:"pulls"`

	Pages         int64 `json:"pages"`
	ResidentBytes int64 `json:"resident_bytes"`
	ArenaBytes    int64 `json:"arena_bytes"`
	PSSBytes      int64 `json:"pss_bytes"`
	Goroutines    int64 `json:"goroutines"`
	OpenFiles     int64 `json:"open_files"`
	// Since this process began.
	Evictions uint64 `json:"evictions"`
	Corrupt   uint64 `json:"corrupt"`
}

// busy says what is not as it is when nothing is under way and all faults are
// healed, "" if nothing is.
func (s ChaosSidecar) busy() string {
	for _, n := range []struct {
		name        string
		value, want int64
	}{
		{"healthy peers", int64(s.HealthyPeers), chaosNodes - 1},
		{"engines", int64(s.Engines), chaosEnginesPerNode},
		{"leases", s.Leases, 0},
		{"leases of engines", s.EngineLeases, 0},
		{"pins", s.Pins, 0},
		{"pinned bytes", s.PinnedBytes, 0},
		{"handles", s.Handles, 0},
		{"reserved slots", s.ReservedSlots, 0},
		{"views and slots held", s.Held, 0},
		{"pulls", s.Pulls, 0},
	} {
		if n.value != n.want {
			return fmt.Sprintf("%s has %d %s instead of %d", s.Name, n.value, n.name, n.want)
		}
	}
	return ""
}

// ChaosEngine is an engine that is asked for nothing.
type ChaosEngine struct {
	Name     string `json:"name"`
	PSSBytes int64  `json:"pss_bytes"`
	// Memfds are the pieces of shared memory that it has mapped or open.
	Memfds int `json:"memfds"`
}

// chaosStatus is what /statusz says of it.
type chaosStatus struct {
	Engines struct {
		Engines []struct {
			Handles int64 `json:"handles"`
			Leases  int64 `json:"leases"`
		} `json:"engines"`
		Reserved int64 `json:"reserved_slots"`
	} `json:"engines"`
	Cache struct {
		Arena     int64             `json:"arena_bytes"`
		Pages     int64             `json:"pages"`
		Resident  int64             `json:"resident_bytes"`
		Pinned    int64             `json:"pinned_bytes"`
		Leases    int64             `json:"leases"`
		Pins      int64             `json:"pins"`
		Held      int64             `json:"held"`
		Corrupt   uint64            `json:"corrupt"`
		Evictions map[string]uint64 `json:"evictions"`
	} `json:"cache"`
}

// lookAt asks a sidecar how it is.
func lookAt(m *member) (ChaosSidecar, error) {
	s := ChaosSidecar{Name: m.name}
	p := m.running()
	if p == nil {
		return s, fmt.Errorf("%s does not run", m.name)
	}
	peers, err := healthyPeers(m.addr)
	if err != nil {
		return s, err
	}
	var st chaosStatus
	if err := getJSON("http://"+m.addr+"/statusz", &st); err != nil {
		return s, err
	}
	s.HealthyPeers, s.Engines, s.ReservedSlots = len(peers), len(st.Engines.Engines), st.Engines.Reserved
	for _, e := range st.Engines.Engines {
		s.Handles, s.EngineLeases = s.Handles+e.Handles, s.EngineLeases+e.Leases
	}
	s.Leases, s.Pins, s.PinnedBytes, s.Held = st.Cache.Leases, st.Cache.Pins, st.Cache.Pinned, st.Cache.Held
	s.Pages, s.ResidentBytes, s.ArenaBytes, s.Corrupt = st.Cache.Pages, st.Cache.Resident, st.Cache.Arena, st.Cache.Corrupt
	for _, n := range st.Cache.Evictions {
		s.Evictions += n
	}
	for name, into := range map[string]*int64{
		"go_goroutines": &s.Goroutines, "membrane_peer_pulls": &s.Pulls,
	} {
		v, err := metric(m.addr, name, "")
		if err != nil {
			return s, err
		}
		*into = int64(v)
	}
	files, err := os.ReadDir(p.proc() + "/fd")
	if err != nil {
		return s, fmt.Errorf("cannot count the open files of %s: %w", m.name, err)
	}
	s.OpenFiles = int64(len(files))
	s.PSSBytes, err = p.memory()
	return s, err
}

// lookEvery is rare enough that looking does not keep a sidecar at work.
const lookEvery = 250 * time.Millisecond

// lookAtAll asks all sidecars how they are; the error is what is not quiet.
func (c *chaos) lookAtAll() ([]ChaosSidecar, error) {
	var all []ChaosSidecar
	var amiss []error
	for _, m := range c.sidecars {
		s, err := lookAt(m)
		if err == nil && s.busy() != "" {
			err = errors.New(s.busy())
		}
		all, amiss = append(all, s), append(amiss, err)
	}
	return all, errors.Join(amiss...)
}

// settle waits until nothing is under way and every member is well, and
// returns how they are then. After patience it returns what is amiss.
func (c *chaos) settle(ctx context.Context, patience time.Duration) ([]ChaosSidecar, []ChaosEngine, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	sidecars, err := c.lookAtAll()
	for err != nil && pause(ctx, lookEvery) == nil {
		sidecars, err = c.lookAtAll()
	}
	var engines []ChaosEngine
	for _, m := range c.engines {
		e := ChaosEngine{Name: m.name}
		p := m.running()
		if p == nil {
			err = errors.Join(err, fmt.Errorf("%s does not run", m.name))
			continue
		}
		var memErr error
		e.PSSBytes, memErr = p.memory()
		err = errors.Join(err, memErr)
		mine := memfdsOf(p.proc())
		e.Memfds = len(mine)
		engines = append(engines, e)
	}
	for _, m := range c.sidecars {
		if p := m.running(); p != nil {
			for id := range memfdsOf(p.proc()) {
				c.memfds[id] = m.name
			}
		}
	}
	return sidecars, engines, err
}

// memfdsOf returns the inodes of membrane's shared memory that a process has
// mapped or open. A process that is not ours to look into has none.
func memfdsOf(proc string) map[string]struct{} {
	found := make(map[string]struct{})
	if maps, err := os.Open(proc + "/maps"); err == nil {
		scan := bufio.NewScanner(maps)
		for scan.Scan() { // address perms offset device inode path
			if f := strings.Fields(scan.Text()); len(f) >= 6 && strings.HasPrefix(f[5], "/memfd:membrane-") {
				found[f[4]] = struct{}{}
			}
		}
		_ = maps.Close()
	}
	fds, err := filepath.Glob(proc + "/fd/*")
	if err != nil {
		return found
	}
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && strings.HasPrefix(target, "/memfd:membrane-") {
			if id, ok := inode(fd); ok {
				found[id] = struct{}{}
			}
		}
	}
	return found
}

// leftovers returns what is still there of the processes and the shared memory
// of this run.
func (c *chaos) leftovers() (processes, memfds []string) {
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, nil
	}
	for _, proc := range procs {
		if cmd, err := os.ReadFile(proc + "/cmdline"); err == nil && strings.Contains(string(cmd), c.dir) {
			processes = append(processes, filepath.Base(proc)+" "+strings.ReplaceAll(string(cmd), "\x00", " "))
		}
		for id := range memfdsOf(proc) {
			if of, ours := c.memfds[id]; ours {
				memfds = append(memfds, fmt.Sprintf("memfd %s of %s in process %s", id, of, filepath.Base(proc)))
			}
		}
	}
	return processes, memfds
}

// inode returns the number of the file that a path leads to.
func inode(path string) (string, bool) {
	info, err := os.Stat(path)
	if err != nil {
		return "", false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", false
	}
	return strconv.FormatUint(st.Ino, 10), true
}
