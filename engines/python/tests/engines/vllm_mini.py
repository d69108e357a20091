"""vLLM's real scheduler and connector classes in one process, around a model that is made up.

A block's KV is a number that follows from the tokens up to its end, so that a
block with bytes of another prompt is noticed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import membrane_kv.vllm
import torch
from membrane_kv.session import Session
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, LAYERS, HEADS, HEAD = 32, 4, 2, 32
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)

membrane_kv.vllm._tp_rank = lambda: 0  # there is no process group
init_none_hash(sha256)
_numbers = itertools.count()
_PAUSE = threading.Event()


def membrane(sidecar: str, **more: Any) -> dict[str, Any]:
    """Return the connector's entry for a kv_transfer_config."""
    return {
        "kv_connector": "MembraneConnector",
        "kv_connector_module_path": "membrane_kv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"sidecar": sidecar, "store_deadline_ms": 2000},
        **more,
    }


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    """Return a MultiConnector of these, in this order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


class Other(KVConnectorBase_V1):
    """A sibling that promises what `offers` says, in the step itself, and remembers its calls."""

    offers = 0
    bad_blocks: set[int] = set()  # noqa: RUF012
    external: list[int] = []  # noqa: RUF012

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return max(Other.offers - computed, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        Other.external.append(n)
        if n:
            Other.bad_blocks = set(blocks.get_block_ids()[0][: n // BLOCK])
            Other.offers = 0

    def build_connector_meta(self, output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, name: str) -> None: ...

    def save_kv_layer(self, name: str, layer: Any, metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, Other.bad_blocks = Other.bad_blocks, set()
        return lost

    def request_finished_all_groups(self, request: Any, blocks: Any) -> tuple[bool, None]:
        return False, None


class Mini:
    """One engine: a scheduler, a worker's connector, and KV memory."""

    def __init__(self, model: str, transfer: dict[str, Any], blocks: int = 64, **args: Any) -> None:
        self.config = EngineArgs(
            model=model,
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_model_len=1024,
            max_num_batched_tokens=256,
            max_num_seqs=4,
            kv_transfer_config={"engine_id": f"mini-{next(_numbers)}", **transfer},
            **args,
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = blocks
        self.caches = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(NAMES, SPEC)],
            kv_cache_layout="LBHNC",
            hash_block_size=BLOCK,
        )
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self.worker: Any = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.caches
        )
        self.kv = torch.zeros(LAYERS, blocks, HEADS, BLOCK, 2 * HEAD)
        self.worker.register_kv_caches(dict(zip(NAMES, self.kv, strict=True)))
        self.stats: list[dict[str, Any]] = []
        for session in self._sessions():
            assert session.wait_up(time.monotonic() + 10) is not None

    def _sessions(self) -> Iterator[Session]:
        for side in (self.scheduler.connector, self.worker):
            for c in getattr(side, "sub_connectors", [side]):
                if isinstance(c, membrane_kv.vllm.MembraneConnector) and c._session:
                    yield c._session

    def answered(self) -> None:
        """Wait until every request has its answer: commits come on a connection of their own."""
        end = time.monotonic() + 10
        for session in self._sessions():
            busy = True
            while busy:
                assert time.monotonic() < end, "a request is not answered"
                with session._lock:
                    busy = bool(session._queue or session._pending)
                _PAUSE.wait(0.001)

    def request(self, tokens: list[int], n: int = 2, **more: Any) -> Request:
        """Return a request that is not added yet."""
        sampling = more.pop("sampling", {})
        return Request(
            request_id=f"r{next(_numbers)}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=n, ignore_eos=True, **sampling),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **more,
        )

    def run(self, request: Request) -> int:
        """Run a request to its end; return how many tokens of it came from outside."""
        self.scheduler.add_request(request)
        self.computed = 0
        end = time.monotonic() + 20
        while request.request_id in self.scheduler.requests:
            assert time.monotonic() < end, "the request does not end"
            self.step()
        return len(request.all_token_ids) - 1 - self.computed

    def settle(self, done: Callable[[], object]) -> None:
        """Step until something has happened."""
        end = time.monotonic() + 10
        while not done():
            assert time.monotonic() < end, "it did not happen"
            self.step()

    @staticmethod
    def number(tokens: list[int], layer: int) -> float:
        """Return what the KV of a block is, whose last token is the last of `tokens`."""
        return float(sum((i + 1) * t for i, t in enumerate(tokens)) % 65_521 * LAYERS + layer + 1)

    def right(self, request: Request, blocks: list[int], end: int) -> bool:
        """Return whether a request's blocks hold what they should, up to a token."""
        tokens = list(request.all_token_ids)
        return all(
            bool((self.kv[layer, block] == self.number(tokens[: (i + 1) * BLOCK], layer)).all())
            for i, block in enumerate(blocks[: end // BLOCK])
            for layer in range(LAYERS)
        )

    def step(self) -> None:
        """Run one step as the model runner does."""
        out = self.scheduler.schedule()
        w = self.worker
        w.handle_preemptions(out.kv_connector_metadata)
        w.bind_connector_metadata(out.kv_connector_metadata)
        if out.has_sync_kv_loads:
            w.start_load_kv(None)
        before = {r.req_id: r.num_computed_tokens for r in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for name, n in out.num_scheduled_tokens.items():
            r = self.scheduler.requests[name]
            table = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            tokens = list(r.all_token_ids)
            begin, end = before[name], before[name] + n
            self.computed += n
            # Wrong KV below makes wrong KV above, as in a model.
            good = self.right(r, table, begin)
            for i in range(begin // BLOCK, end // BLOCK):
                for layer in range(LAYERS):
                    value = self.number(tokens[: (i + 1) * BLOCK], layer)
                    self.kv[layer, table[i]] = value if good else -1.0
            sampled.append([(7 if good else 9)] if end == len(tokens) else [])
        if not out.has_sync_kv_loads:
            w.start_load_kv(None)
        w.wait_for_save()
        done = w.get_transfer_results(out.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=done.finished_sending,
            finished_recving=done.finished_recving,
            failed_recving=done.failed_recving,
            invalid_block_ids=w.get_block_ids_with_load_errors(),
            kv_connector_stats=w.get_kv_connector_stats(),
            kv_connector_worker_meta=w.build_connector_worker_meta(),
        )
        w.clear_connector_metadata()
        names = list(out.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=said,
        )
        for outputs in self.scheduler.update_from_output(out, ran).values():
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)

    def forget(self) -> None:
        """Drop the engine's own prefix cache, and make its memory wrong, once all is stored."""
        self.answered()
        assert self.scheduler.reset_prefix_cache()
        self.kv.fill_(-2.0)

    def stop(self) -> None:
        self.answered()
        self.worker.shutdown()
        self.scheduler.connector.shutdown()
