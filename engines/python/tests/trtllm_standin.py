"""A stand-in for TensorRT-LLM: the interface of its KV cache connectors, and a runtime.

It follows the rules of the released line as far as they are documented: the
names and the order of calls, one question for each request at its allocation,
matched tokens missing from the first position, deltas afterwards, metadata
that is pickled for every rank, blocks [layers, 2 or 1, numbers], reuse of full
blocks, chunked prompts. Its model writes numbers that depend on all tokens so
far, and its next token depends on all numbers, so wrong KV gives other tokens.
"""

from __future__ import annotations

import abc
import hashlib
import pickle
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

MODULE = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
_rank = 0


@dataclass
class RequestData:
    """What an iteration does to one request."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    """One iteration."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(abc.ABC):
    """One rank's side."""

    def __init__(self, llm_args):
        self._llm_args = llm_args
        self._metadata = None

    def bind_connector_meta(self, metadata):
        self._metadata = metadata

    def get_connector_meta(self):
        return self._metadata

    def _clear_connector_meta(self):
        self._metadata = None

    def register_forward_pass_callable(self):
        return None

    @abc.abstractmethod
    def register_kv_caches(self, kv_cache_tensor): ...

    @abc.abstractmethod
    def start_load_kv(self, stream): ...

    @abc.abstractmethod
    def wait_for_layer_load(self, layer_idx, stream): ...

    @abc.abstractmethod
    def save_kv_layer(self, layer_idx, stream): ...

    @abc.abstractmethod
    def wait_for_save(self, stream): ...

    @abc.abstractmethod
    def get_finished(self, finished_gen_req_ids, started_loading_req_ids): ...


class KvCacheConnectorScheduler(abc.ABC):
    """Rank 0's decisions."""

    def __init__(self, llm_args):
        self._llm_args = llm_args

    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output): ...

    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abc.abstractmethod
    def request_finished(self, request, cache_block_ids): ...

    @abc.abstractmethod
    def update_state_after_alloc(self, request, block_ids): ...


def install() -> None:
    """Make the stand-in importable under the library's names."""
    names = MODULE.split(".")
    for i in range(1, len(names) + 1):
        sys.modules.setdefault(".".join(names[:i]), types.ModuleType(".".join(names[:i])))
    vars(sys.modules[MODULE]).update(
        KvCacheConnectorScheduler=KvCacheConnectorScheduler,
        KvCacheConnectorWorker=KvCacheConnectorWorker,
    )
    utils = types.ModuleType("tensorrt_llm._utils")
    vars(utils)["mpi_rank"] = lambda: _rank
    sys.modules["tensorrt_llm._utils"] = utils


@dataclass
class Shape:
    """A model's KV, and how a block of one rank lies."""

    layers: int = 3
    heads: int = 4
    dim: int = 8
    mla: bool = False
    tp: int = 1
    backend: str = "TRTLLM"
    block: int = 32
    dtype: Any = np.float32

    @property
    def rank_heads(self) -> int:
        return 1 if self.mla else max(self.heads // self.tp, 1)

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        out = {
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4 * self.heads,
            "num_key_value_heads": self.heads,
            "hidden_size": 4 * self.heads * self.dim,
            "rope_theta": 10000.0,
            "torch_dtype": np.dtype(self.dtype).name,
        }
        if self.mla:
            out |= {"kv_lora_rank": self.dim - 2, "qk_rope_head_dim": 2}
        return out

    def pool(self, blocks: int) -> Any:
        """Return one rank's pool, shape [blocks, layers, 2 or 1, numbers]."""
        numbers = self.rank_heads * self.block * self.dim
        return np.zeros((blocks, self.layers, 1 if self.mla else 2, numbers), self.dtype)

    def first_head(self, rank: int) -> int:
        return 0 if self.mla else rank * self.heads // self.tp


class Request:
    """What the connector sees of a request, and what the runtime keeps."""

    def __init__(self, request_id: int, tokens: list[int], new: int = 3, **more: Any) -> None:
        self.request_id = request_id
        self.prompt = len(tokens)
        self.tokens = list(tokens)
        self.new = new
        self.blocks: list[int] = []
        self.computed = 0
        self.matched = 0
        self.local = 0
        self.seen_tokens = 0
        self.seen_blocks = 0
        self.started = False
        vars(self).update(more)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.new


class Runtime:
    """An engine with its ranks, in one process. `chunk`: most prompt tokens in an iteration."""

    def __init__(
        self,
        module: Any,
        model: str,
        shape: Shape,
        blocks: int = 64,
        chunk: int = 1 << 30,
        **args: Any,
    ) -> None:
        global _rank  # noqa: PLW0603  (what mpi_rank answers while a rank is made)
        cache = {"dtype": "auto", "tokens_per_block": shape.block, "enable_block_reuse": True}
        cache |= args.pop("kv_cache_config", {})
        self.args = SimpleNamespace(
            **{
                "model": model,
                "dtype": "auto",
                "tensor_parallel_size": shape.tp,
                "attn_backend": shape.backend,
                "kv_cache_config": SimpleNamespace(**cache),
                **args,
            }
        )
        self.shape, self.chunk = shape, chunk
        self.scheduler = module.MembraneScheduler(self.args)
        self.workers, self.pools = [], []
        for rank in range(shape.tp):
            _rank = rank
            mine = self.args if rank == 0 else pickle.loads(pickle.dumps(self.args))
            self.workers.append(module.MembraneWorker(mine))
            self.pools.append(shape.pool(blocks))
        _rank = 0
        self.free = list(range(1, blocks))
        self.tree: dict[bytes, int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.computed_tokens = 0

    def register(self, pools: list[Any] | None = None) -> Runtime:
        """Hand the pools over, or other things in their place."""
        for worker, pool in zip(self.workers, pools or self.pools, strict=True):
            worker.register_kv_caches(pool)
        return self

    def close(self) -> None:
        for part in (self.scheduler, *self.workers):
            part.shutdown()

    def _key(self, tokens: list[int]) -> bytes:
        return hashlib.sha256(np.array(tokens, np.int64).tobytes()).digest()

    def _local(self, r: Request) -> int:
        """Return how many tokens this engine's own blocks hold."""
        size, n = self.shape.block, 0
        while n + size < len(r.tokens) and self._key(r.tokens[: n + size]) in self.tree:
            n += size
        return n

    def admit(self, r: Request) -> None:
        """Allocate a request's blocks: all that it can ever need, so none is evicted."""
        size = self.shape.block
        local = self._local(r)
        need = -(-(r.prompt + r.new) // size)
        matched, load_async = self.scheduler.get_num_new_matched_tokens(r, local)
        assert isinstance(matched, int) and isinstance(load_async, bool)
        assert not (load_async and not matched), "an asynchronous load of nothing"
        assert not load_async, "this runtime does not park requests"
        assert matched >= 0 and local + matched < len(r.tokens), "no token is left to compute"
        r.blocks = [self.free.pop(0) for _ in range(need)]
        for i in range(local // size):
            own = self.tree[self._key(r.tokens[: (i + 1) * size])]
            for pool in self.pools:
                pool[r.blocks[i]] = pool[own]
        r.local, r.matched, r.computed = local, matched, local + matched
        self.scheduler.update_state_after_alloc(r, list(r.blocks[: -(-r.prompt // size)]))
        self.running.append(r)

    def iterate(self) -> None:
        """Run one iteration."""
        while self.waiting:
            self.admit(self.waiting.pop(0))
        output, work = SchedulerOutput(), []
        for r in self.running:
            n = min(len(r.tokens) - r.computed, self.chunk)
            position = r.computed if r.started else r.computed - r.matched
            data = RequestData(
                r.request_id, r.tokens[r.seen_tokens :], r.blocks[r.seen_blocks :], position, n
            )
            r.seen_tokens, r.seen_blocks = len(r.tokens), len(r.blocks)
            (output.cached_requests if r.started else output.new_requests).append(data)
            r.started = True
            work.append((r, n))
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(metadata))
            worker.start_load_kv(None)
        for layer in range(self.shape.layers):
            for rank, worker in enumerate(self.workers):
                worker.wait_for_layer_load(layer, None)
                for r, n in work:
                    self._compute(rank, layer, r, n)
                worker.save_kv_layer(layer, None)
        for worker in self.workers:
            worker.wait_for_save(None)
            assert worker.get_finished([], []) == ([], [])
            worker._clear_connector_meta()
        for r, n in work:
            r.computed += n
            self.computed_tokens += n
            if r.computed == len(r.tokens):
                r.tokens.append(self._next(r))
        for r in [r for r in self.running if r.done]:
            self.finish(r)

    def finish(self, r: Request, keep: bool = True) -> None:
        """End a request, also one that is not done; keep its full blocks for reuse."""
        self.running.remove(r)
        assert self.scheduler.request_finished(r, list(r.blocks)) is False
        full = r.computed // self.shape.block if keep else 0
        for i in range(full):
            self.tree[self._key(r.tokens[: (i + 1) * self.shape.block])] = r.blocks[i]
        self.free += r.blocks[full:]

    def _numbers(self, tokens: list[int], position: int, rank: int, layer: int) -> Any:
        """Return K and V of one position, shape [2 or 1, heads of the rank, dim]."""
        s = self.shape
        seed = hashlib.sha256(np.array(tokens[: position + 1], np.int64).tobytes()).digest()
        digest = np.frombuffer(seed, np.uint8).astype(np.int64)
        sides = 1 if s.mla else 2
        side, head, dim = np.ogrid[0:sides, 0 : s.rank_heads, 0 : s.dim]
        head = head + s.first_head(rank)
        i = layer * 131 + side * 31 + head * 7 + dim
        return (digest[i % 32] ^ (i % 251)).astype(s.dtype)

    def _view(self, rank: int, block: int, layer: int) -> Any:
        """Return a block's numbers, shape [2 or 1, heads, tokens, dim]."""
        s = self.shape
        part = self.pools[rank][block, layer]
        if s.backend == "FLASHINFER":
            return part.reshape(-1, s.block, s.rank_heads, s.dim).transpose(0, 2, 1, 3)
        return part.reshape(-1, s.rank_heads, s.block, s.dim)

    def _compute(self, rank: int, layer: int, r: Request, n: int) -> None:
        for p in range(r.computed, r.computed + n):
            view = self._view(rank, r.blocks[p // self.shape.block], layer)
            view[:, :, p % self.shape.block] = self._numbers(r.tokens, p, rank, layer)

    def _next(self, r: Request) -> int:
        h = hashlib.sha256()
        for p in range(r.computed):
            for rank in range(self.shape.tp):
                for layer in range(self.shape.layers):
                    view = self._view(rank, r.blocks[p // self.shape.block], layer)
                    h.update(np.ascontiguousarray(view[:, :, p % self.shape.block]).tobytes())
        return int.from_bytes(h.digest()[:2], "little")

    def generate(self, r: Request) -> list[int]:
        """Run a request to its end; return its new tokens."""
        self.waiting.append(r)
        while not r.done:
            self.iterate()
        return r.generated

    def flush(self) -> None:
        """Forget the blocks that are kept for reuse."""
        self.free += self.tree.values()
        self.tree.clear()
