package bench

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"membrane/kvwire"
)

// fakeEnv makes this test binary a stand-in for the interpreter that has vLLM:
// it answers as a vLLM does whose connector stores and loads pages.
const fakeEnv = "MEMBRANE_BENCH_FAKE"

// fakeFault is what goes wrong in the fake, see the tests.
const fakeFault = "MEMBRANE_BENCH_FAULT"

// fakePython returns the path of a fake interpreter, with a fake lmcache beside
// it.
func fakePython(t *testing.T, fault string) string {
	t.Helper()
	t.Setenv(fakeEnv, "1")
	t.Setenv(fakeFault, fault)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range []string{"python", "lmcache"} {
		if err := os.Symlink(self, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "python")
}

func runFake(args []string) error {
	if filepath.Base(args[0]) == "lmcache" {
		flags := flag.NewFlagSet("lmcache", flag.ContinueOnError)
		for _, name := range []string{"host", "chunk-size", "l1-size-gb", "eviction-policy", "supported-transfer-mode", "port"} {
			flags.String(name, "", "")
		}
		port := flags.String("http-port", "", "")
		if err := flags.Parse(args[2:]); err != nil {
			return err
		}
		return http.ListenAndServe("127.0.0.1:"+*port, http.NotFoundHandler())
	}
	switch args[2] {
	case "membrane_bench.model":
		if err := os.MkdirAll(args[3], 0o755); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(args[3], "config.json"), []byte("{}"), 0o600)
	case "vllm.entrypoints.openai.api_server":
		return fakeVLLM(args[3:])
	}
	return fmt.Errorf("the fake interpreter does not know %q", args[1:])
}

// standIn is a vLLM with a connector: membrane's keeps pages in a sidecar,
// the baseline's here.
type standIn struct {
	mu    sync.Mutex
	files map[string]bool
	rig   *rig
	stats string
	hooks float64
	loads int
	fault string
}

func fakeVLLM(args []string) error {
	if slices.Contains(args, "--kv-transfer-config") && os.Getenv(fakeFault) == "boot" {
		return errors.New("no such model")
	}
	value := func(name string) string {
		if i := slices.Index(args, name); i >= 0 {
			return args[i+1]
		}
		return ""
	}
	e := &standIn{files: map[string]bool{}, fault: os.Getenv(fakeFault)}
	var config struct {
		Connector string `json:"kv_connector"`
		Extra     struct {
			Sidecar string `json:"sidecar"`
			Stats   string `json:"stats_file"`
		} `json:"kv_connector_extra_config"`
	}
	if c := value("--kv-transfer-config"); c != "" {
		if err := json.Unmarshal([]byte(c), &config); err != nil {
			return err
		}
	}
	if config.Connector == "MembraneConnector" {
		if err := e.attach(config.Extra.Sidecar, config.Extra.Stats); err != nil {
			return err
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /reset_prefix_cache", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /v1/completions", e.complete)
	l, err := net.Listen("tcp", "127.0.0.1:"+value("--port"))
	if err != nil {
		return err
	}
	return http.Serve(l, mux)
}

func (e *standIn) attach(socket, stats string) error {
	ctx, cancel := context.WithTimeout(context.Background(), rigTimeout)
	defer cancel()
	const pageBytes = 4096
	c, err := kvwire.Dial(ctx, socket, kvwire.ClientOptions{Name: "fake"})
	if err != nil {
		return err
	}
	reg := registration("vllm", pageBytes, vllmPage, 64)
	e.rig, e.stats = &rig{client: c, page: make([]byte, pageBytes)}, stats
	if e.rig.reg, err = c.Register(ctx, reg); err != nil {
		return err
	}
	return e.write(reg)
}

// write writes the connector's counters as it does.
func (e *standIn) write(reg kvwire.Register) error {
	for _, side := range []string{"scheduler", "worker"} {
		b, err := json.Marshal(map[string]any{
			"registration": reg, "counts": map[string]int{"loaded_pages": e.loads, "none_us": int(e.hooks * 1e6)},
			"hooks": map[string]any{"wait_for_save": map[string]float64{"sum_s": e.hooks}},
		})
		if err != nil {
			return err
		}
		path := e.stats + "." + side + ".1.json"
		if err := errors.Join(os.WriteFile(path+".tmp", b, 0o600), os.Rename(path+".tmp", path)); err != nil {
			return err
		}
	}
	return nil
}

// cached returns how many of a prompt's tokens are not computed, and keeps it
// for the next time.
func (e *standIn) cached(ctx context.Context, body completionBody) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.rig == nil {
		key := string(wireTokens(body.Prompt))
		if body.KVTransferParam["baseline"] == "off" || !e.files[key] {
			e.files[key] = e.files[key] || body.KVTransferParam["baseline"] != "off"
			return 0, nil
		}
		return (len(body.Prompt) - 1) / vllmBlock * vllmBlock, nil
	}
	tokens := wireTokens(body.Prompt)
	l, err := e.rig.match(ctx, tokens, 0)
	if err != nil {
		return 0, err
	}
	e.hooks += 1e-4
	pages := len(body.Prompt) / vllmPage
	if err := e.rig.end(ctx, l); l.Pages > 0 && err != nil {
		return 0, err
	}
	if int(l.Pages) == pages {
		e.loads += pages
		return pages * vllmPage, e.write(registration("vllm", 4096, vllmPage, 64))
	}
	if err := e.rig.storeSome(ctx, tokens, vllmPage); err != nil {
		return 0, err
	}
	return 0, e.write(registration("vllm", 4096, vllmPage, 64))
}

func (e *standIn) complete(w http.ResponseWriter, r *http.Request) {
	var body completionBody
	err := json.NewDecoder(r.Body).Decode(&body)
	cached := 0
	if err == nil {
		cached, err = e.cached(r.Context(), body)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	sum := sha256.Sum256(wireTokens(body.Prompt))
	if e.fault == "tokens" && e.rig != nil && cached > 0 {
		sum[3]++
	}
	if e.fault == "promise" && e.rig == nil {
		cached += vllmBlock
	}
	for i := range body.MaxTokens {
		fmt.Fprintf(w, "data: {\"choices\":[{\"token_ids\":[%d]}]}\n\n", sum[i%len(sum)])
		_ = http.NewResponseController(w).Flush()
	}
	fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"prompt_tokens_details\":{\"cached_tokens\":%d}}}\n\ndata: [DONE]\n\n", len(body.Prompt), cached)
}

// deadline bounds a test of several processes.
func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}
