"""A real vLLM behind LMCache's multiprocess server, whose second tier is a sidecar."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import (
    BLOCK,
    Engine,
    Process,
    engine_environment,
    eventually,
    free_port,
    make_model,
    prompt,
)
from test_lmcache_client import Store

CHUNK = 256
CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"


class Server(Process):
    """LMCache's multiprocess server. What it stores goes to the sidecar only."""

    def start(self, store: Store) -> None:
        """Start it and wait until it listens."""
        python = os.environ.get("MEMBRANE_LMCACHE_PYTHON")
        assert python, "MEMBRANE_LMCACHE_PYTHON is not set: start the engine tests with run.sh"
        self.port, http = free_port(), free_port()
        adapter = {"type": "resp", "host": "127.0.0.1", "port": store.ports["redis"]}
        argv = [
            *(str(Path(python).with_name("lmcache")), "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--http-port", str(http), "--chunk-size", str(CHUNK)),
            *("--l1-size-gb", "1", "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", "auto"),  # the default waits for ever without a GPU
            *("--l2-adapter", json.dumps(adapter), "--l2-store-policy", "skip_l1"),
        ]
        self.launch(argv, environment())

        def listens() -> bool:
            assert self.alive(), self.tail()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/", timeout=2):
                    return True
            except urllib.error.HTTPError:
                return True
            except OSError:
                return False

        eventually(listens, "the start of LMCache's server", 240)


class LMCacheEngine(Engine):
    """A vLLM of LMCache's environment, with LMCache's connector."""

    def boot(self, server: Server) -> None:
        """Start it and wait until it serves."""
        config = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": server.port,
            },
        }
        argv = [
            os.environ["MEMBRANE_LMCACHE_PYTHON"],
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
            *("--max-model-len", "4096", "--max-num-seqs", "4"),
            *("--max-num-batched-tokens", "2048", "--block-size", str(BLOCK)),
            *("--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(config)),
        ]
        self.launch(argv, environment())
        self.wait(400)


def environment() -> dict[str, str]:
    """Return the engines' environment without our package in it."""
    env: dict[str, str] = engine_environment()
    env["PYTHONPYCACHEPREFIX"] += "-lmcache"
    env.update(PYTHONPATH="", LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1")
    return env


@pytest.fixture(scope="module")
def stack(
    logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, LMCacheEngine]]:
    store = Store("lmcache-store", logs, tmp_path_factory.mktemp("sockets"), "256MiB")
    server = Server("lmcache-server", logs)
    engine = LMCacheEngine("lmcache-vllm", logs, make_model("tiny"), None)
    try:
        store.start()
        server.start(store)
        engine.boot(server)
        yield store, engine
    finally:
        for process in (engine, server, store):
            process.stop()


def test_vllm_loads_its_prompts_from_the_sidecar(stack: tuple[Store, LMCacheEngine]) -> None:
    """The tokens of a prompt whose KV came from the sidecar are those of the first time."""
    store, engine = stack
    for seed in (31, 41):
        ids = prompt(5 * CHUNK + 20, seed)
        stored, hits = (store.metric(f"membrane_resp_{n}_total") for n in ("stored", "hits"))
        sent = store.metric("membrane_resp_sent_bytes_total")
        cold = engine.complete(ids)
        assert cold.cached == 0
        eventually(
            lambda stored=stored: store.metric("membrane_resp_stored_total") >= stored + 5,
            "the store of five chunks",
        )
        engine.forget()
        warm = engine.complete(ids)
        assert warm.tokens == cold.tokens
        assert warm.cached >= 5 * CHUNK
        assert store.metric("membrane_resp_hits_total") >= hits + 5
        # 4 layers, K and V, 2 heads of 32 numbers of 4 bytes.
        size = 5 * CHUNK * 4 * 2 * 2 * 32 * 4
        assert store.metric("membrane_resp_sent_bytes_total") >= sent + size
    assert store.metric("membrane_resp_errors_total") == 0
    assert store.metric("membrane_resp_conflicts_total") == 0
