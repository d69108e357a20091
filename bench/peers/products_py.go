package peers

import (
	"context"
	"fmt"
	"path/filepath"
)

func lmcacheProduct() *product {
	const program, python = "lmcache/bin/lmcache", "lmcache/bin/python"
	p := &product{name: "lmcache-mp", config: "lmcache server, LRU, memory allocated at the start; driven through the client of its own benchmark"}
	p.find = func(pl place) error {
		_, err := pl.program(program)
		return err
	}
	p.start = func(ctx context.Context, pl place) (*running, error) {
		path, err := pl.program(program)
		if err != nil {
			return nil, err
		}
		http, err := freePort()
		if err != nil {
			return nil, err
		}
		r, err := served(ctx, p.name, "mp", pl, []string{"LMCACHE_TRACK_USAGE=false"}, path, func(port int) []string {
			return []string{
				"server", "--host", "127.0.0.1", "--port", fmt.Sprint(port), "--http-host", "127.0.0.1", "--http-port", fmt.Sprint(http),
				"--l1-size-gb", fmt.Sprintf("%.3g", float64(pl.memory)/gib), "--eviction-policy", "LRU", "--no-l1-use-lazy", "--disable-observability",
			}
		})
		if err != nil {
			return nil, err
		}
		return r.withHelper(ctx, pl, python, nil, "lmcache", r.addrs["mp"])
	}
	return p
}

func mooncakeProduct() *product {
	const python = "mooncake/bin/python"
	p := &product{name: "mooncake", config: "mooncake_master, a process that lends the memory, P2PHANDSHAKE, TCP"}
	p.find = func(pl place) error {
		_, err := pl.program(python)
		return err
	}
	p.start = func(ctx context.Context, pl place) (*running, error) {
		path, err := pl.program(python)
		if err != nil {
			return nil, err
		}
		helperPath, err := writeHelper(pl.dir)
		if err != nil {
			return nil, err
		}
		// Libraries that the wheel expects, where the system has none.
		libraries := filepath.Join(pl.peers, "mooncake-lib")
		env := []string{"LD_LIBRARY_PATH=" + libraries}
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		s, err := spawn(p.name, pl.dir, env, path, helperPath, "mooncake-server", loopback(port), fmt.Sprint(pl.memory))
		if err != nil {
			return nil, err
		}
		r := &running{server: s, addrs: map[string]string{"mooncake": loopback(port)}}
		if _, err := s.firstLine(ctx); err != nil {
			r.close()
			return nil, err
		}
		return r.withHelper(ctx, pl, python, env, "mooncake", loopback(port))
	}
	return p
}

// withHelper adds the Python client and returns once it is connected.
func (r *running) withHelper(ctx context.Context, pl place, python string, env []string, kind, addr string) (*running, error) {
	path, err := pl.program(python)
	if err == nil {
		r.helper, err = startHelper(r.name, pl.dir, path, env, kind, addr)
	}
	if err == nil {
		_, err = r.helper.firstLine(ctx)
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}
