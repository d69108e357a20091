package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// startTime is how long a system may take to be ready: LMCache imports torch.
const startTime = 90 * time.Second

// place is what a system is started with.
type place struct {
	binary string // membrane
	peers  string // folder with the peers' programs
	dir    string // for sockets and configuration, of this start alone
	memory int64  // what it may keep, in bytes
}

// running is a started system. Several systems may be paths into one.
type running struct {
	*server
	addrs map[string]string // by protocol
	// fragments are hashes that its /retrieve finds.
	fragments []string
	// helper drives the system where Python is its only client.
	helper *helper
}

func (r *running) close() {
	if r.helper != nil {
		r.helper.close()
	}
	r.kill()
}

// rest stops the system and its helper until they are resumed.
func (r *running) rest(ctx context.Context) error {
	var err error
	if r.helper != nil {
		err = r.helper.pause(ctx)
	}
	return errors.Join(err, r.pause(ctx))
}

// while resumes the system for as long as f runs. It rests afterwards also where
// f failed: what runs on would share the machine with what is measured next.
func (r *running) while(ctx context.Context, f func() error) error {
	if err := r.resume(ctx); err != nil {
		return err
	}
	return errors.Join(f(), r.rest(ctx))
}

// product is something that is started as one process group.
type product struct {
	name string
	// find returns an error that says why it cannot be started here.
	find func(p place) error
	// start starts it and returns once it serves.
	start func(ctx context.Context, p place) (*running, error)
	// config is how it is set up, for the report.
	config string
}

// system is one way into a product: what a row is about.
type system struct {
	name    string
	path    string // protocol
	product *product
	ours    bool
	ceiling bool
	// store names what its keys share: systems of one store are filled once.
	store string
	// ops are the operations that it can be measured with.
	ops []string
	// open connects a stream.
	open func(ctx context.Context, r *running, o opening) (Conn, error)
	// fill connects to where values are stored, if not by open.
	fill func(ctx context.Context, r *running, o opening) (Conn, error)
	// unable says why it has no row in a cell that it could be asked for.
	unable map[string]string
	note   string
}

// opening says what a connection is for.
type opening struct {
	name string // unique
	size int
	// writes: the stream stores values.
	writes bool
	// ring is how many different keys of this size are ever written where
	// nothing can be deleted.
	ring int
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// allProducts returns everything that is measured.
func allProducts() map[string]*product {
	list := []*product{
		sidecarProduct("membrane", ""), sidecarProduct("membrane-resp", "--resp-addr"),
		redisProduct("redis", "redis-server"), redisProduct("valkey", "valkey-server"),
		kvblockdProduct(), lmProduct(), lmcacheProduct(), mooncakeProduct(), predecessorProduct(),
		ownProduct("bare TCP copy", "peers-source"), ownProduct("empty fasthttp server", "peers-empty"),
	}
	byName := map[string]*product{}
	for _, p := range list {
		byName[p.name] = p
	}
	return byName
}

// program returns where a peer's program is: in the peers' folder or on the
// path.
func (p place) program(name string) (string, error) {
	for _, path := range []string{filepath.Join(p.peers, name), filepath.Join(p.peers, "bin", name)} {
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s is neither in the peers' folder nor on the path", name)
	}
	return path, nil
}

func sidecarProduct(name, flag string) *product {
	p := &product{name: name, config: "--page-tokens=16"}
	p.find = func(pl place) error {
		if flag == "" {
			return nil
		}
		help, err := exec.Command(pl.binary, "serve", "--help").CombinedOutput()
		if err == nil && !strings.Contains(string(help), flag) {
			err = fmt.Errorf("this binary has no %s", flag)
		}
		return err
	}
	p.start = func(ctx context.Context, pl place) (*running, error) {
		args := []string{
			"serve", "--node-id", name, "--port", "0", "--engine-addr", "127.0.0.1:0", "--engine-socket", filepath.Join(pl.dir, "engine.sock"),
			"--data-addr", "127.0.0.1:0", "--gossip-addr", "127.0.0.1:0", "--log-format", "json",
			fmt.Sprintf("--page-tokens=%d", pageTokens), fmt.Sprintf("--memory=%dMiB", pl.memory>>20),
		}
		addrs := map[string]string{}
		if flag != "" {
			port, err := freePort()
			if err != nil {
				return nil, err
			}
			addrs["resp"] = loopback(port)
			args = append(args, flag, addrs["resp"])
		}
		s, err := spawn(name, pl.dir, nil, pl.binary, args...)
		if err != nil {
			return nil, err
		}
		fields, err := s.serving(ctx)
		if err != nil {
			s.kill()
			return nil, err
		}
		for _, key := range []string{"http", "engine_socket", "engine_addr", "data"} {
			addrs[key], _ = fields[key].(string)
		}
		r := &running{server: s, addrs: addrs}
		if flag != "" {
			if err := s.accepts(ctx, addrs["resp"]); err != nil {
				r.close()
				return nil, err
			}
		}
		return r, nil
	}
	return p
}

// served starts a program that serves one address on a port of its own.
func served(ctx context.Context, name, protocol string, pl place, env []string, program string, args func(port int) []string) (*running, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	s, err := spawn(name, pl.dir, env, program, args(port)...)
	if err != nil {
		return nil, err
	}
	r := &running{server: s, addrs: map[string]string{protocol: loopback(port)}}
	if err := s.accepts(ctx, loopback(port)); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func redisProduct(name, program string) *product {
	return installed(name, "save '', appendonly no, maxmemory, allkeys-lru, one I/O thread (its documentation wants four cores for more)", program, func(ctx context.Context, pl place, path string) (*running, error) {
		return served(ctx, name, "resp", pl, nil, path, func(port int) []string {
			return []string{
				"--bind", "127.0.0.1", "--port", fmt.Sprint(port), "--save", "", "--appendonly", "no", "--dir", pl.dir,
				"--maxmemory", fmt.Sprint(pl.memory), "--maxmemory-policy", "allkeys-lru",
			}
		})
	})
}

func kvblockdProduct() *product {
	return installed("kvblockd", "memory tier only, its own defaults", "kvblockd", func(ctx context.Context, pl place, path string) (*running, error) {
		spaces := filepath.Join(pl.dir, "namespaces.yaml")
		if err := os.WriteFile(spaces, fmt.Appendf(nil, "namespaces:\n  - { name: %s, id: 3, token: %s }\n", kvbNamespace, kvbToken), 0o600); err != nil {
			return nil, err
		}
		metrics, err := freePort()
		if err != nil {
			return nil, err
		}
		admin, err := freePort()
		if err != nil {
			return nil, err
		}
		config := filepath.Join(pl.dir, "kvblockd.yaml")
		return served(ctx, "kvblockd", "kvb1", pl, nil, path, func(port int) []string {
			text := fmt.Sprintf("listen_addr: %q\nmetrics_addr: %q\nadmin_addr: %q\nnamespaces_path: %q\ndram_arena_bytes: %d\npinned_bytes_cap: %d\n",
				loopback(port), loopback(metrics), loopback(admin), spaces, pl.memory, 16<<20)
			_ = os.WriteFile(config, []byte(text), 0o600) // it says itself when it cannot read it
			return []string{"-config", config}
		})
	})
}

func lmProduct() *product {
	const program = "lmcache/bin/lmcache_server"
	return installed("lmcache-lm", "lmcache_server, its own defaults; it evicts nothing", program, func(ctx context.Context, pl place, path string) (*running, error) {
		return served(ctx, "lmcache-lm", "lm", pl, []string{"LMCACHE_TRACK_USAGE=false"}, path, func(port int) []string {
			return []string{"127.0.0.1", fmt.Sprint(port)}
		})
	})
}

// installed is a product that is a program among the peers': it is here where
// its program is.
func installed(name, config, program string, start func(ctx context.Context, pl place, path string) (*running, error)) *product {
	return &product{
		name: name, config: config,
		find: func(pl place) error {
			_, err := pl.program(program)
			return err
		},
		start: func(ctx context.Context, pl place) (*running, error) {
			path, err := pl.program(program)
			if err != nil {
				return nil, err
			}
			return start(ctx, pl, path)
		},
	}
}

// ownProduct is one of this binary's hidden commands.
func ownProduct(name, command string) *product {
	return &product{
		name: name,
		find: func(place) error { return nil },
		start: func(ctx context.Context, pl place) (*running, error) {
			s, err := spawn(name, pl.dir, nil, pl.binary, "bench", command)
			if err != nil {
				return nil, err
			}
			addr, err := s.firstLine(ctx)
			if err != nil {
				s.kill()
				return nil, err
			}
			return &running{server: s, addrs: map[string]string{"bare": addr, "http": addr}}, nil
		},
	}
}

func predecessorProduct() *product {
	const program = "predecessor/bin/membrane"
	return installed("predecessor", "one node, its own defaults", program, func(ctx context.Context, pl place, path string) (*running, error) {
		return served(ctx, "predecessor", "http", pl, nil, path, func(port int) []string {
			return []string{"serve", "--host", "127.0.0.1", "--port", fmt.Sprint(port), "--daemon", "--node-id", "bench", "--log-level", "ERROR"}
		})
	})
}

// allSystems returns every way into the products, in the order of the tables.
func allSystems(products map[string]*product) []*system {
	get, set := opGet, opSet
	values := []string{get, set, opMixed, opAside, opMemory}
	engine := func(ctx context.Context, r *running, o opening) (Conn, error) {
		return dialEngine(ctx, r.addrs["engine_addr"], o.name, o.size)
	}
	resp := func(ctx context.Context, r *running, o opening) (Conn, error) {
		return dialRESP(ctx, r.addrs["resp"], fmt.Sprintf("bench:%d:", o.size))
	}
	metadata := func(ctx context.Context, r *running, _ opening) (Conn, error) {
		return dialHTTP(ctx, r.addrs["http"], r.fragments)
	}
	list := []*system{
		{
			name: sysShm, path: "engine socket", product: products["membrane"], ours: true, store: "membrane", ops: values,
			open: func(ctx context.Context, r *running, o opening) (Conn, error) {
				slots := 0
				if o.writes {
					slots = shmSlots
				}
				return dialShm(ctx, r.addrs["engine_socket"], o.name, o.size, slots)
			},
		},
		{name: sysRESP, path: "RESP", product: products["membrane-resp"], ours: true, ops: values, open: resp},
		{
			name: sysData, path: "kvwire", product: products["membrane"], ours: true, store: "membrane", ops: []string{get}, fill: engine,
			open: func(ctx context.Context, r *running, o opening) (Conn, error) {
				return dialData(ctx, r.addrs["data"], o.name, o.size)
			},
			note: "batch_read, as between sidecars",
		},
		{
			name: sysEngine, path: "kvwire", product: products["membrane"], ours: true, store: "membrane", ops: values, open: engine,
			note: "lease, then read and release in one go, as an engine without shared memory",
		},
		{name: sysHTTP, path: "HTTP", product: products["membrane"], ours: true, ops: []string{opRetrieve}, open: metadata, note: "metadata: its API carries no KV bytes"},
		{name: sysRedis, path: "RESP", product: products["redis"], ops: values, open: resp},
		{name: sysValkey, path: "RESP", product: products["valkey"], ops: values, open: resp},
		{
			name: sysKVB, path: "KVB1", product: products["kvblockd"], ops: values,
			open: func(ctx context.Context, r *running, o opening) (Conn, error) {
				return dialKVB(ctx, r.addrs["kvb1"], fmt.Sprintf("bench:%d:", o.size))
			},
		},
		{
			name: sysLM, path: "lm://", product: products["lmcache-lm"], ops: values,
			open: func(ctx context.Context, r *running, o opening) (Conn, error) {
				return dialLM(ctx, r.addrs["lm"], fmt.Sprintf("bench-%d", o.size), o.ring)
			},
			unable: map[string]string{opAside: "it evicts nothing"},
			note:   "no checksum, no acknowledgement: each write is followed by a look-up",
		},
		{name: sysMP, path: "shared memory", product: products["lmcache-mp"], ops: []string{get}, note: "its own Python client"},
		{name: sysMooncake, path: "TCP", product: products["mooncake"], ops: []string{get}, note: "its own Python client"},
		{name: sysPred, path: "HTTP", product: products["predecessor"], ops: []string{opRetrieve}, open: metadata, note: "metadata: its API carries no KV bytes"},
		{
			name: sysBare, path: "TCP", product: products["bare TCP copy"], ceiling: true, ops: []string{get},
			open: func(ctx context.Context, r *running, _ opening) (Conn, error) { return dialBare(ctx, r.addrs["bare"]) },
		},
		{name: sysEmpty, path: "HTTP", product: products["empty fasthttp server"], ceiling: true, ops: []string{opRetrieve}, open: metadata},
	}
	for _, s := range list {
		if s.store == "" {
			s.store = s.name
		}
	}
	return list
}
