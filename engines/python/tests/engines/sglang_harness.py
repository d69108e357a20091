"""SGLang servers on CPU for the engine tests, and its controller without a server."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import CACHE, LOAD_MS, MATCH_MS, PAGE, Answer, Engine, eventually, prompt
from harness import engine_environment as vllm_environment

HERE = Path(__file__).resolve().parent / "sglang_cpu"
STORE_MS = 2000


@dataclass
class Generated(Answer):
    """What a server said; `storage`: of its cached tokens, those that its storage backend had."""

    storage: int = 0


def environment() -> dict[str, str]:
    """Return the environment of SGLang's processes: offline, one thread, compiled files kept."""
    env: dict[str, str] = vllm_environment()
    extensions = CACHE / "torch_extensions"
    extensions.mkdir(parents=True, exist_ok=True)
    env["PYTHONPATH"] += os.pathsep + str(HERE)
    env.update(
        SGLANG_USE_CPU_ENGINE="0",  # its own CPU kernels are on no package index
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        SGLANG_NCCL_SO_PATH="/nonexistent",  # ranks talk through gloo
        TORCH_EXTENSIONS_DIR=str(extensions),
        # The hash extension is built with the environment's own ninja.
        PATH=str(Path(os.environ["MEMBRANE_SGLANG_PYTHON"]).parent) + os.pathsep + env["PATH"],
    )
    return env


def run_controller(socket: str, model: Path, *cases: str) -> list[dict[str, Any]]:
    """Run controller.py; return what it says of each case."""
    argv = [os.environ["MEMBRANE_SGLANG_PYTHON"], str(HERE / "controller.py"), socket, str(model)]
    done = subprocess.run(
        [*argv, *cases], env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class SGLang(Engine):
    """An SGLang server on CPU with the storage backend."""

    def launch_server(
        self, layout: str, io: str, *flags: str, extra: dict[str, Any] | None = None
    ) -> None:
        """Start it; `wait` waits until it serves."""
        assert self.sidecar is not None
        config = {
            "backend_name": "membrane",
            "module_path": "membrane_kv.sglang",
            "class_name": "MembraneHiCache",
            "interface_v1": 1,
            "prefetch_threshold": PAGE,
            "sidecar": self.sidecar.socket,
            "match_deadline_ms": MATCH_MS,
            "load_deadline_ms": LOAD_MS,
            "store_deadline_ms": STORE_MS,
            "stats_file": str(self.stats_file),
            **(extra or {}),
        }
        argv = [
            *(os.environ["MEMBRANE_SGLANG_PYTHON"], str(HERE / "serve.py")),
            *("--model-path", str(self.model), "--served-model-name", "m", "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"),
            *("--skip-tokenizer-init", "--skip-server-warmup", "--disable-overlap-schedule"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--cuda-graph-backend-decode", "disabled"),
            *("--cuda-graph-backend-prefill", "disabled"),
            *("--mem-fraction-static", "0.1", "--max-total-tokens", "8192"),
            *("--page-size", str(PAGE), "--enable-hierarchical-cache", "--hicache-ratio", "2"),
            *("--hicache-mem-layout", layout, "--hicache-io-backend", io),
            *("--hicache-storage-prefetch-policy", "wait_complete", "--enable-cache-report"),
            *("--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", json.dumps(config)),
            *flags,
        ]
        self.launch(argv, environment())

    def wait(self, timeout: float = 600.0) -> None:
        """Wait until it serves; the first request of a machine compiles the page hash."""
        eventually(lambda: self.healthy() or not self.alive(), f"the start of {self.name}", timeout)
        assert self.alive(), self.tail()
        self.generate(prompt(PAGE + 9, 1), 2, timeout=240)

    def generate(
        self, ids: list[int], n: int = 16, extra_key: str | None = None, timeout: float = 120.0
    ) -> Generated:
        """Let it generate n tokens, greedily."""
        body: dict[str, Any] = {
            "input_ids": ids,
            "return_logprob": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True},
        }
        if extra_key is not None:
            body["extra_key"] = extra_key
        began = time.monotonic()
        v = self.post("/generate", body, timeout)
        meta = v["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Generated(
            v["output_ids"],
            [x[0] for x in meta["output_token_logprobs"]],
            meta["cached_tokens"],
            time.monotonic() - began,
            details.get("storage") or 0,
        )

    def forget(self) -> None:
        """Empty the device's and the host's cache, once the server is idle."""
        eventually(self._flush, f"that {self.name} empties its caches")

    def _flush(self) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/flush_cache", b"")
        try:
            with urllib.request.urlopen(request, timeout=30) as r:
                return b"Cache flushed" in r.read()
        except OSError:
            return False

    def rank(self, tp_rank: int = 0) -> dict[str, Any]:
        """Return what a rank's backend has written last."""
        return dict(self.stats(f"hicache-0-{tp_rank}"))

    def counted(self, name: str, tp_rank: int = 0) -> int:
        """Return one of a rank's counters."""
        return int(self.rank(tp_rank)["counts"].get(name, 0))

    def page_bytes(self, tp_rank: int = 0) -> int:
        """Return the size of a page of one rank."""
        return int(self.rank(tp_rank)["registration"]["descriptor"]["block_bytes"])

    def held(self, tp_rank: int = 0) -> int:
        """Return how many pages a rank has handed over so far, those already there too."""
        return self.counted("stored_pages", tp_rank) + self.counted("stores_existing", tp_rank)
