package bench

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"
)

// lmcacheChunk is how many tokens LMCache stores at a time: its own default.
const lmcacheChunk = 256

// startLMCache starts LMCache's multiprocess server, which is the form of
// LMCache that works without a GPU, with so many GiB of memory, and returns it
// with the --kv-transfer-config of its connector. python is an interpreter that
// has vLLM and LMCache.
func (h *vllmHost) startLMCache(ctx context.Context, python string, gib int) (*group, string, error) {
	ports, err := fixedPorts(2)
	if err != nil {
		return nil, "", err
	}
	argv := []string{
		filepath.Join(filepath.Dir(python), "lmcache"), "server", "--host", "127.0.0.1", "--port", strconv.Itoa(ports[0]),
		"--http-port", strconv.Itoa(ports[1]), "--chunk-size", strconv.Itoa(lmcacheChunk), "--l1-size-gb", strconv.Itoa(gib), "--eviction-policy", "LRU",
		"--supported-transfer-mode", "auto", // the default waits for ever without a GPU
	}
	server, err := startGroup(h.binary, h.logs, "lmcache", pythonEnvironment(h.cache, ""), argv)
	if err != nil {
		return nil, "", err
	}
	ctx, cancel := context.WithTimeout(ctx, vllmBoot)
	defer cancel()
	err = server.waitUntil(ctx, func() bool {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/", ports[1]), http.NoBody)
		if err != nil {
			return false
		}
		resp, err := h.client.Do(req)
		if err != nil {
			return false
		}
		return resp.Body.Close() == nil // any answer: it listens
	})
	if err != nil {
		server.close()
		return nil, "", err
	}
	return server, transferConfig("LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector", map[string]any{
		"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": ports[0],
	}), nil
}
