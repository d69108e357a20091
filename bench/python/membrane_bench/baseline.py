"""The baseline: the least that a vLLM KV connector without a sidecar can be.

Blocks are files on tmpfs, named by vLLM's own block hashes; they are written
after the step that computed them and read, by one thread, straight into the
engine's blocks. There is no process to ask, no checksum, no eviction, no limit and
nobody to share with: what membrane costs beyond this is the price of those.

Set it with --kv-transfer-config
{"kv_connector": "BaselineConnector", "kv_connector_module_path": "membrane_bench.baseline",
"kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"folder": "/dev/shm/..."}}.

A request with kv_transfer_params {"baseline": "off"} is left alone: neither
looked up nor stored. For vLLM 0.29 or newer, one KV-cache group, CPU tensors.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from .files import BlockFiles

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.membrane_bench")

_IDLE_WAIT_S = 0.001


@dataclass
class Job:
    """Load or store blocks, each under its key."""

    request: str
    keys: list[bytes]
    block_ids: list[int]


@dataclass
class Jobs(KVConnectorMetadata):
    """The jobs of one step; `idle`: the engine computes nothing in it."""

    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    idle: bool = False


class BaselineConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side, or one worker rank's."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = str(self._kv_transfer_config.kv_connector_extra_config["folder"])
        self._block: int = vllm_config.cache_config.block_size
        self._ranks: int = vllm_config.parallel_config.tensor_parallel_size
        # The scheduler's.
        self._files = BlockFiles(self._folder, 0)
        self._requests: dict[str, Any] = {}
        self._off: set[str] = set()
        self._local: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        self._loads: list[Job] = []
        # The workers'.
        self._pool: list[list[memoryview]] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._running = 0
        self._thread: threading.Thread | None = None

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        """Take a new request."""
        params = request.kv_transfer_params or {}
        if params.get("baseline") == "off":
            self._off.add(request.request_id)
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Promise every block that is there, and leave a token to compute."""
        if request.request_id in self._off:
            return 0, False
        first = num_computed_tokens // self._block
        most = min((request.num_tokens - 1) // self._block, len(request.block_hashes))
        end = first
        while end < most and self._files.has(request.block_hashes[end], self._ranks):
            end += 1
        self._local[request.request_id] = first
        return (end - first) * self._block, end > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Turn the promise into a load."""
        if num_external_tokens <= 0:
            return
        first = self._local[request.request_id]
        end = first + num_external_tokens // self._block
        keys = list(request.block_hashes[first:end])
        ids = list(blocks.get_block_ids()[0][first:end])
        self._loads.append(Job(request.request_id, keys, ids))
        self._stored[request.request_id] = end

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's jobs."""
        out = scheduler_output
        before = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        loads, self._loads = self._loads, []
        jobs = Jobs(loads, idle=not out.total_num_scheduled_tokens)
        for request_id, n in out.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or request_id in self._off:
                continue
            first = self._stored.get(request_id, 0)
            end = min((before[request_id] + n) // self._block, len(request.block_hashes))
            if end > first:
                ids = out.kv_connector_block_state.get_block_ids(request_id)[0][first:end]
                keys = list(request.block_hashes[first:end])
                jobs.stores.append(Job(request_id, keys, list(ids)))
                self._stored[request_id] = end
        return jobs

    def update_connector_output(self, connector_output: Any) -> None:
        """Never promise to a request again whose load failed."""
        for request_id in getattr(connector_output, "failed_recving", None) or ():
            self._off.add(request_id)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; stores ended with their step."""
        self._requests.pop(request.request_id, None)
        self._local.pop(request.request_id, None)
        self._stored.pop(request.request_id, None)
        self._off.discard(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See request_finished."""
        return self.request_finished(request, block_ids[0])

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors, shape [blocks, ...] per layer."""
        from vllm.distributed import get_tensor_model_parallel_rank

        layers = [
            t.view(torch.uint8).reshape(t.shape[0], -1).numpy()
            for _, t in sorted(kv_caches.items(), key=lambda named: _numeric(named[0]))
        ]
        self._files = BlockFiles(self._folder, int(get_tensor_model_parallel_rank()))
        self._pool = [[memoryview(layer[b]) for layer in layers] for b in range(len(layers[0]))]
        self._thread = threading.Thread(target=self._run, name="baseline-load", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            ok = False
            try:
                for key, block in zip(job.keys, job.block_ids, strict=True):
                    self._files.read(key, self._pool[block])
                ok = True
            except Exception:
                log.exception("baseline: a load failed; the request is computed")
            self._ended.put((job.request, ok))

    @property
    def _step(self) -> Jobs:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, Jobs) else Jobs()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hand the step's loads to the reading thread."""
        for job in self._step.loads:
            self._running += 1
            self._jobs.put(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before their request is computed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are written after the step."""

    def wait_for_save(self) -> None:
        """Write the step's full blocks."""
        try:
            for job in self._step.stores:
                for key, block in zip(job.keys, job.block_ids, strict=True):
                    self._files.write(key, self._pool[block])
        except OSError:
            log.exception("baseline: a store failed")

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Report loads that ended, each once, good or bad.

        When the engine has nothing else to do a load gets a millisecond: an
        engine that spins takes the interpreter from the reading thread.
        """
        results = KVConnectorTransferResults()
        wait = self._step.idle and self._running > 0
        while True:
            try:
                request_id, ok = (
                    self._ended.get(timeout=_IDLE_WAIT_S) if wait else self._ended.get(False)
                )
            except queue.Empty:
                return results
            wait = False
            self._running -= 1
            results.finished_recving.add(request_id)
            if not ok:
                results.failed_recving.add(request_id)

    def shutdown(self) -> None:
        """End the thread after what was handed in."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(2.0)


def _numeric(name: str) -> list[tuple[int, str]]:
    """Return a sort key that has layer 10 behind layer 9."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in name.split(".")]
