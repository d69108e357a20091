"""What SGLang 0.5.23 gives a storage backend, as far as ours uses it, over numpy.

Tensors and host pools have the names and shapes of SGLang's own. The engine
tests run the same backend under SGLang itself.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

L, P, H, D, N = 3, 16, 2, 8, 40  # layers, tokens in a page, heads, numbers in a head, pages
PAGE_BYTES = 2 * L * P * H * D * 4
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

# From the axes (kv, page, layer, token, head, dim) to those of each layout.
_ORDERS = {
    "layer_first": (0, 2, 1, 3, 4, 5),
    "page_first": (0, 1, 3, 2, 4, 5),
    "page_first_direct": (0, 1, 2, 3, 4, 5),
    "page_head": (0, 1, 4, 3, 2, 5),
}

Numbers = npt.NDArray[np.float32]


class Tensor:
    """As much of a torch tensor as a backend looks at."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.device = SimpleNamespace(type="cpu")

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array))

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        return self.array if dtype is None else self.array.astype(dtype)


class MHATokenToKVPoolHost:
    """A host pool of `heads` heads in one of the four layouts."""

    def __init__(self, layout: str, seed: int = 0, heads: int = H) -> None:
        self.layout, self.dtype = layout, "torch.float32"
        self.page_size, self.page_num, self.size = P, N, N * P
        self.layer_num = self.target_layer_num = L
        self.start_layer, self.end_layer = 0, L
        self.head_num, self.head_dim, self.v_head_dim = heads, D, D
        truth = np.zeros((2, N, L, P, heads, D), np.float32)
        if seed:
            truth[:] = np.random.default_rng(seed).random(truth.shape, np.float32)
        self.kv_buffer = Tensor(self.in_layout(truth))

    def in_layout(self, truth: Numbers) -> Numbers:
        """Return numbers [kv, page, layer, token, head, dim] as the pool has them."""
        out = np.ascontiguousarray(truth.transpose(_ORDERS[self.layout]))
        if self.layout == "layer_first":
            return out.reshape(2, L, N * P, *out.shape[-2:])
        if self.layout == "page_first":
            return out.reshape(2, N * P, L, *out.shape[-2:])
        return out

    def truth(self) -> Numbers:
        """Return the pool as numbers [kv, page, layer, token, head, dim]."""
        split = {"layer_first": (2, L, N, P), "page_first": (2, N, P, L)}.get(self.layout)
        a = self.kv_buffer.array
        if split:
            a = a.reshape(*split, *a.shape[-2:])
        return a.transpose(np.argsort(_ORDERS[self.layout]))

    def get_data_page(self, index: int) -> Tensor:
        """Return one page, flat, as SGLang's generic storage path does."""
        a, page = self.kv_buffer.array, index // P
        if self.layout == "layer_first":
            return Tensor(a[:, :, index : index + P].flatten())
        if self.layout == "page_first":
            return Tensor(a[:, index : index + P].flatten())
        return Tensor(a[:, page : page + 1].flatten())


class MLATokenToKVPoolHost:
    """A host pool of latents: no K and V, no heads."""

    def __init__(self, layout: str, seed: int = 0) -> None:
        self.layout, self.dtype = layout, "torch.float32"
        self.page_size, self.page_num, self.size = P, N, N * P
        self.layer_num, self.start_layer, self.end_layer = L, 0, L
        self.kv_cache_dim = D
        shape = {
            "layer_first": (L, N * P, 1, D),
            "page_first": (N * P, L, 1, D),
            "page_first_direct": (N, L, P, 1, D),
        }[layout]
        numbers = np.zeros(shape, np.float32)
        if seed:
            numbers[:] = np.random.default_rng(seed).random(shape, np.float32)
        self.kv_buffer = Tensor(numbers)


@dataclass
class Config:
    """SGLang's HiCacheStorageConfig."""

    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str = "m"
    dp_rank: int = 0


@dataclass
class Server:
    """SGLang's server arguments, and the model that they lead to."""

    model_path: str = ""
    revision: str | None = None
    quantization: str | None = None
    speculative_algorithm: str | None = None
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    kv_heads: int = H
    layers: int = L
    config: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})


SERVER = Server()


class HiCacheStorage:
    """The methods that SGLang's base class has a body for."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool


@dataclass
class PoolTransfer:
    """SGLang's description of what is moved of one pool."""

    name: str
    host_indices: Any = None
    keys: list[str] | None = None


@dataclass(frozen=True)
class PoolTransferResult:
    """How much there is in each pool."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class StorageMetrics:
    """What SGLang's collector takes."""

    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]


class ModelConfig:
    """SGLang's reading of the model's configuration."""

    def __init__(self, args: Server) -> None:
        self._heads = args.kv_heads
        self.hf_config = SimpleNamespace(num_hidden_layers=args.layers, **args.config)
        self.hf_text_config = self.hf_config

    @staticmethod
    def from_server_args(args: Server) -> ModelConfig:
        return ModelConfig(args)

    def get_total_num_kv_heads(self) -> int:
        return self._heads


def install() -> None:
    """Make the modules importable that the backend imports."""
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolTransferResult": PoolTransferResult,
        },
        "sglang.srt.configs": {},
        "sglang.srt.configs.model_config": {"ModelConfig": ModelConfig},
        "sglang.srt.runtime_context": {"get_server_args": lambda: SERVER},
        "sglang.srt.observability": {},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


def keys(n: int, seed: int = 0) -> list[str]:
    """Return the hashes of the pages of a prompt, as SGLang computes them."""
    digest, out = b"", []
    for page in range(n):
        tokens = struct.pack(f"<{P}I", *(seed * 100_000 + page * P + i for i in range(P)))
        digest = hashlib.sha256(digest + tokens).digest()
        out.append(digest.hex())
    return out


def slots(pages: list[int]) -> Tensor:
    """Return the token slots of pages of a host pool."""
    return Tensor(np.concatenate([np.arange(p * P, p * P + P) for p in pages]).astype(np.int64))


def checkpoint(folder: Path, fill: int = 7) -> str:
    """Make a folder that has weights to be named by; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    data = (2).to_bytes(8, "little") + b"{}" + bytes([fill]) * 90
    (folder / "model.safetensors").write_bytes(data)
    return str(folder)
