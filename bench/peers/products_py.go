package peers

import (
	"context"
	"fmt"
	"path/filepath"
)

func lmcacheProduct() *product {
	const program, python = "lmcache/bin/lmcache", "lmcache/bin/python"
	return installed("lmcache-mp", "lmcache server, LRU, memory allocated at the start; driven through the client of its own benchmark", program, func(ctx context.Context, pl place, path string) (*running, error) {
		http, err := freePort()
		if err != nil {
			return nil, err
		}
		r, err := served(ctx, "lmcache-mp", "mp", pl, []string{"LMCACHE_TRACK_USAGE=false"}, path, func(port int) []string {
			return []string{
				"server", "--host", "127.0.0.1", "--port", fmt.Sprint(port), "--http-host", "127.0.0.1", "--http-port", fmt.Sprint(http),
				"--l1-size-gb", fmt.Sprintf("%.3g", float64(pl.memory)/gib), "--eviction-policy", "LRU", "--no-l1-use-lazy", "--disable-observability",
			}
		})
		if err != nil {
			return nil, err
		}
		return r.withHelper(ctx, pl, python, nil, "lmcache", r.addrs["mp"])
	})
}

func mooncakeProduct() *product {
	const python = "mooncake/bin/python"
	return installed("mooncake", "mooncake_master, a process that lends the memory, P2PHANDSHAKE, TCP", python, func(ctx context.Context, pl place, path string) (*running, error) {
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
		s, err := spawn("mooncake", pl.dir, env, path, helperPath, "mooncake-server", loopback(port), fmt.Sprint(pl.memory))
		if err != nil {
			return nil, err
		}
		r := &running{server: s, addrs: map[string]string{"mooncake": loopback(port)}}
		if _, err := s.firstLine(ctx); err != nil {
			r.close()
			return nil, err
		}
		return r.withHelper(ctx, pl, python, env, "mooncake", loopback(port))
	})
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
