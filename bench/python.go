package bench

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// pythonFiles are the baseline connector and the model maker, which run inside
// of vLLM's interpreter.
//
//go:embed python/membrane_bench/*.py
var pythonFiles embed.FS

// unpackPython writes the package membrane_bench below dir, for PYTHONPATH.
func unpackPython(dir string) error {
	files, err := fs.Sub(pythonFiles, "python")
	if err == nil {
		err = os.CopyFS(dir, files)
	}
	if err != nil {
		return fmt.Errorf("cannot unpack the baseline connector to %q: %w", dir, err)
	}
	return nil
}

// engineCache returns the folder that keeps what engines compile and the
// models that are made for them, the same as the engine tests use.
func engineCache() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cannot find the cache folder: %w", err)
	}
	dir := filepath.Join(base, "membrane", "engines")
	for _, sub := range []string{"pyc", "vllm", "hf", "tmp", "models"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return "", fmt.Errorf("cannot make the cache folder: %w", err)
		}
	}
	return dir, nil
}

// pythonEnvironment returns the environment of an engine's processes: offline,
// one thread, compiled files kept, no usage reports. path is PYTHONPATH.
func pythonEnvironment(cache, path string) []string {
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "PYTHON") && !strings.HasPrefix(v, "VLLM_") {
			env = append(env, v)
		}
	}
	in := func(sub string) string { return filepath.Join(cache, sub) }
	return append(env,
		"PYTHONPATH="+path, "PYTHONPYCACHEPREFIX="+in("pyc"), "PYTHONHASHSEED=0",
		"VLLM_CACHE_ROOT="+in("vllm"), "VLLM_CONFIG_ROOT="+in("vllm"), "HF_HOME="+in("hf"), "TMPDIR="+in("tmp"),
		"VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_NO_USAGE_STATS=1", "VLLM_SERVER_DEV_MODE=1",
		"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "LMCACHE_TRACK_USAGE=false",
	)
}

// benchModelName must change with what python/membrane_bench/model.py makes.
const benchModelName = "bench-12x512"

// benchModel makes the benchmarks' model, or finds the one that an earlier run
// made, and returns its folder.
func benchModel(ctx context.Context, python, path, cache string) (string, error) {
	folder := filepath.Join(cache, "models", benchModelName)
	if _, err := os.Stat(filepath.Join(folder, "config.json")); err == nil {
		return folder, nil
	}
	cmd := exec.CommandContext(ctx, python, "-m", "membrane_bench.model", folder)
	cmd.Env = pythonEnvironment(cache, path)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cannot make the model with %q: %w\n%s", python, err, out)
	}
	return folder, nil
}
