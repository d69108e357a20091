package bench

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// VLLMOptions say which vLLM is measured.
type VLLMOptions struct {
	// Python is an interpreter that has vLLM for CPU; "" measures none.
	Python string
	// Connector is the folder that holds the package membrane_kv; "" where the
	// interpreter has it installed.
	Connector string
	// LMCache is an interpreter that has vLLM and LMCache; "" measures only
	// what needs it not.
	LMCache string
	// Logs is the folder for the servers' logs; "" keeps none.
	Logs string

	// settle is for how long the connector's counters must not have changed to
	// be complete; it writes them a second after a change at the latest.
	settle time.Duration
}

const vllmSettle = 1500 * time.Millisecond

const (
	vllmBlock    = 32
	vllmModel    = "m" // the served name
	vllmBoot     = 6 * time.Minute
	vllmSlowCall = 2 * time.Minute
)

// vllmHost is what all servers of one run share.
type vllmHost struct {
	opts   VLLMOptions
	binary string // membrane, which guards the servers
	dir    string // the run's own, for sockets and counters
	logs   string // folder
	path   string // PYTHONPATH
	cache  string
	model  string // folder
	client *http.Client
}

// newVLLMHost prepares Python path and model. dir is the run's own folder.
func newVLLMHost(ctx context.Context, opts VLLMOptions, binary, dir string) (*vllmHost, error) {
	if opts.settle == 0 {
		opts.settle = vllmSettle
	}
	h := &vllmHost{opts: opts, binary: binary, dir: dir, logs: dir, client: &http.Client{
		// A server that was stopped may close an idle connection as it goes on.
		Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true},
	}}
	if opts.Logs != "" {
		if err := os.MkdirAll(opts.Logs, 0o755); err != nil {
			return nil, fmt.Errorf("cannot make the folder for logs: %w", err)
		}
		h.logs = opts.Logs
	}
	h.path = filepath.Join(dir, "python")
	if err := unpackPython(h.path); err != nil {
		return nil, err
	}
	if opts.Connector != "" {
		connector, err := filepath.Abs(opts.Connector)
		if err == nil {
			_, err = os.Stat(filepath.Join(connector, "membrane_kv"))
		}
		if err != nil {
			return nil, fmt.Errorf("cannot find the package membrane_kv in %q: %w", opts.Connector, err)
		}
		h.path += string(os.PathListSeparator) + connector
	}
	var err error
	if h.cache, err = engineCache(); err != nil {
		return nil, err
	}
	h.model, err = benchModel(ctx, opts.Python, h.path, h.cache)
	return h, err
}

// vllmServer is a running vLLM.
type vllmServer struct {
	*group
	host *vllmHost
	base string // http://HOST:PORT
}

// vllmArgs are the settings that all measured servers share but the connector.
type vllmArgs struct {
	python     string // another interpreter than the host's
	kvMiB      int    // the engine's own KV pool
	maxTokens  int    // of one prompt with its answer
	sequences  int
	transfer   string // --kv-transfer-config, or ""
	membraneKV bool   // whether membrane's packages are on PYTHONPATH
}

// start starts a server; wait waits until it serves.
func (h *vllmHost) start(name string, a vllmArgs) (*vllmServer, error) {
	ports, err := fixedPorts(1)
	if err != nil {
		return nil, err
	}
	if a.python == "" {
		a.python = h.opts.Python
	}
	argv := []string{
		a.python, "-m", "vllm.entrypoints.openai.api_server", "--model", h.model, "--served-model-name", vllmModel,
		"--host", "127.0.0.1", "--port", strconv.Itoa(ports[0]), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32",
		"--max-model-len", strconv.Itoa(a.maxTokens), "--max-num-seqs", strconv.Itoa(a.sequences),
		"--max-num-batched-tokens", "2048", "--block-size", strconv.Itoa(vllmBlock),
		"--kv-cache-memory-bytes", strconv.Itoa(a.kvMiB * mib), "--enable-prompt-tokens-details",
	}
	if a.transfer != "" {
		argv = append(argv, "--kv-transfer-config", a.transfer)
	}
	path := ""
	if a.membraneKV {
		path = h.path
	}
	g, err := startGroup(h.binary, h.logs, name, pythonEnvironment(h.cache, path), argv)
	if err != nil {
		return nil, err
	}
	return &vllmServer{group: g, host: h, base: fmt.Sprintf("http://127.0.0.1:%d", ports[0])}, nil
}

// wait returns when the server serves and has answered two prompts: the first
// token that an engine samples costs it a second or two, once.
func (s *vllmServer) wait(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, vllmBoot)
	defer cancel()
	err := s.waitUntil(ctx, func() bool {
		status, _, err := s.call(ctx, http.MethodGet, "/health")
		return err == nil && status == http.StatusOK
	})
	if err != nil {
		return err
	}
	for seed := range uint32(2) {
		if _, err := s.complete(ctx, newCompletion(vllmModel, vllmPrompt(300, 1000+seed), 4)); err != nil {
			return err
		}
	}
	return nil
}

func (s *vllmServer) call(ctx context.Context, method, path string) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, s.base+path, strings.NewReader(""))
	if err != nil {
		return 0, nil, fmt.Errorf("cannot make a request: %w", err)
	}
	resp, err := s.host.client.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("cannot reach %s: %w", s.name, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, body, err
}

// forget empties the engine's own prefix cache.
func (s *vllmServer) forget(ctx context.Context) error {
	status, body, err := s.call(ctx, http.MethodPost, "/reset_prefix_cache")
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("status %d: %s", status, body)
	}
	if err != nil {
		return fmt.Errorf("cannot reset the prefix cache of %s: %w", s.name, err)
	}
	return nil
}

func (s *vllmServer) complete(ctx context.Context, body completionBody) (streamed, error) {
	ctx, cancel := context.WithTimeout(ctx, vllmSlowCall)
	defer cancel()
	got, err := streamCompletion(ctx, s.host.client, s.base, "", body)
	if err != nil {
		return got, fmt.Errorf("%s: %w\n%s", s.name, err, s.tail())
	}
	return got, nil
}

// vllmPrompt returns n token ids of the benchmarks' model that no prompt of
// another seed begins with.
func vllmPrompt(n int, seed uint32) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		u := uint32(i)
		ids[i] = (u*(37+2*seed)+u*u+seed*seed)%500 + 3
	}
	ids[0], ids[1] = seed%500+3, seed/500%500+3
	return ids
}

// wireTokens returns token ids in wire form.
func wireTokens(ids []uint32) []byte {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return b
}

// baselineTransfer is the --kv-transfer-config of the baseline connector.
func baselineTransfer(folder string) string {
	return transferConfig("BaselineConnector", "membrane_bench.baseline", map[string]any{"folder": folder})
}

// membraneTransfer is the --kv-transfer-config of membrane's connector. The
// deadlines are far above what is measured, so that a busy machine shows as a
// large figure and not as a miss.
func membraneTransfer(socket, stats string) string {
	return transferConfig("MembraneConnector", "membrane_kv.vllm", map[string]any{
		"sidecar": socket, "stats_file": stats,
		"match_deadline_ms": 5000, "load_deadline_ms": 5000, "store_deadline_ms": 5000,
	})
}

func transferConfig(class, module string, extra map[string]any) string {
	b, _ := json.Marshal(map[string]any{ // of strings and numbers
		"kv_connector": class, "kv_connector_module_path": module, "kv_role": "kv_both",
		"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
	})
	return string(b)
}
