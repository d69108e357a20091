"""The SGLang backend: a HiCache storage class for --hicache-storage-backend dynamic.

Set it with --hicache-storage-backend-extra-config
'{"backend_name": "membrane", "module_path": "membrane_kv.sglang",
"class_name": "MembraneHiCache", "interface_v1": 1, ...}', see
`HiCacheSettings` for what else may stand there.

SGLang's hashes name the pages as they are. Pages are copied between the host
pool and the sidecar's shared memory by SGLang's own storage threads, straight;
a call waits for the sidecar until its deadline at most, and lets no exception
out.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from . import sglang_facts, wire
from .callmetrics import CallMetrics
from .facts import Unsupported
from .hostpool import FlatPages, HostPool, as_bytes, pool_pages
from .matcher import Matcher
from .pageload import PageLoader
from .pagestore import PageStorer
from .record import Recorder, hook
from .session import Session
from .settings import Settings
from .wire import HASH_SIZE

log = logging.getLogger("sglang.membrane_kv")

_KV = "kv"
_SGLANGS_OWN = frozenset(
    (
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    )
)


@dataclass(frozen=True)
class HiCacheSettings(Settings):
    """The keys of the extra config that are ours. Storage threads can wait longer for stores."""

    store_deadline_ms: float = 2000.0

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> HiCacheSettings:
        """Check the user's keys, SGLang's own left out. Raises ValueError."""
        s = cls.parse({k: v for k, v in (extra or {}).items() if k not in _SGLANGS_OWN})
        assert isinstance(s, HiCacheSettings)
        return s


class MembraneHiCache(HiCacheStorage):
    """One rank's storage backend."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self.recorder = Recorder("", "hicache")
        self._settings = HiCacheSettings()
        self._session: Session | None = None
        self._matcher: Matcher | None = None
        self._loader: PageLoader | None = None
        self._storer: PageStorer | None = None
        self._pool: HostPool | None = None
        self._page_tokens = 1
        self._metrics = CallMetrics(bool(getattr(storage_config, "enable_storage_metrics", False)))
        self._usable = False
        try:
            self._settings = HiCacheSettings.of(storage_config.extra_config)
            role = f"hicache-{storage_config.pp_rank}-{storage_config.tp_rank}"
            self.recorder = Recorder(self._settings.stats_file, role)
            self._usable = True
        except Exception as e:
            self._off(str(e))

    def _off(self, sentence: str) -> None:
        """Be an empty cache from now on."""
        log.warning("membrane: KV caching is off: %s", sentence)
        self.recorder.note(off=sentence)
        self._usable = False
        session, self._session = self._session, None
        self._matcher = self._loader = self._storer = None
        if session is not None:
            session.stop()

    # The pools.

    @hook(lambda *_: None)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the KV pool and begin to connect."""
        super().register_mem_pool_host(mem_pool_host)
        if not self._usable:
            return
        try:
            self._start(mem_pool_host)
        except Unsupported as e:
            self._off(str(e))
        except Exception as e:
            self._off(f"{type(e).__name__}: {e}")
            raise

    def _start(self, mem_pool_host: Any) -> None:
        s, config = self._settings, self._config
        pool = sglang_facts.read_pool(mem_pool_host)
        model, descriptor = sglang_facts.describe(
            sglang_facts.read_model(s.weights_id), pool, config
        )
        layers = pool.layers[1] - pool.layers[0]
        try:
            pages = pool_pages(
                mem_pool_host.kv_buffer, mem_pool_host.layout, pool.page_tokens, layers, pool.mla
            )
        except ValueError as e:
            raise Unsupported(str(e)) from e
        self._pool, self._page_tokens = HostPool(pages), pool.page_tokens
        if self._pool.page_bytes != pool.page_bytes:
            raise Unsupported(
                f"a page has {self._pool.page_bytes} bytes in its host pool, not {pool.page_bytes}"
            )
        registration = wire.Register(
            engine=_engine_name(config),
            role="both" if descriptor.shards == 1 else "worker",
            model=model,
            descriptor=descriptor,
            inbox_slots=s.inbox_slots,
            inline=s.inline,
            page_tokens=pool.page_tokens,
        )
        self.recorder.note(registration=wire.parse_json(registration.pack()))
        name = f"sglang {descriptor.shard}"
        self._session = Session(s.places, registration, s.api_key, name).start()
        self._matcher = Matcher(self._session, pool.page_bytes, s, self.recorder)
        self._loader = PageLoader(self._matcher, descriptor.shard)
        self._storer = PageStorer(self._matcher)

    @hook(lambda *_: None)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool. Models that keep more than KV run without the cache."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != _KV and self._usable:
            self._off(f"the model keeps {host_pool_name} beside KV")

    def on_host_pools_registered(self) -> None:
        """Do nothing: what is needed was known before."""

    # Pages in the host pool.

    @hook(lambda *_: False)
    def exists(self, key: str) -> bool:
        """Return whether this sidecar holds a page."""
        return self._matcher is not None and self._matcher.has(_hashes([key])) == 1

    @hook(lambda *_: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many leading pages can be had. They are leased for the get that follows."""
        return self._loader.find(_hashes(keys)) if self._loader is not None and keys else 0

    def _nothing_v2(self, *_: Any) -> PoolTransferResult:
        return PoolTransferResult.empty()

    @hook(_nothing_v2)
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the same of KV pages; nothing where other pools are asked for."""
        if any(str(t.name) != _KV for t in pool_transfers or ()):
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def _none_of(self, keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
        return [False] * len(keys)

    @hook(_none_of)
    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Copy pages into the host pool; say of each whether it is there, and good.

        `host_indices` has the pool's token slots, those of one page one after the other.
        """
        if self._loader is None or self._pool is None:
            return [False] * len(keys)
        began = time.perf_counter()
        got = self._loader.load(_hashes(keys), self._pool, self._index(keys, host_indices))
        self._metrics.add("prefetch", sum(got), self._pool.page_bytes, began)
        return got

    @hook(_none_of)
    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool; say of each whether the sidecar has it."""
        if self._storer is None or self._pool is None:
            return [False] * len(keys)
        began = time.perf_counter()
        got = self._storer.store(_hashes(keys), self._pool, self._index(keys, host_indices))
        self._metrics.add("backup", sum(got), self._pool.page_bytes, began)
        return got

    def _none_of_each(self, transfers: Sequence[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
        return {t.name: [False] * len(t.keys or ()) for t in transfers}

    @hook(_none_of_each)
    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Do as batch_get_v1 for each transfer of the KV pool."""
        return {
            t.name: self.batch_get_v1(t.keys or (), t.host_indices, extra_info)
            if str(t.name) == _KV
            else [False] * len(t.keys or ())
            for t in transfers
        }

    @hook(_none_of_each)
    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Do as batch_set_v1 for each transfer of the KV pool."""
        return {
            t.name: self.batch_set_v1(t.keys or (), t.host_indices, extra_info)
            if str(t.name) == _KV
            else [False] * len(t.keys or ())
            for t in transfers
        }

    def _index(self, keys: Sequence[str], host_indices: Any) -> Any:
        """Return the pages that token slots belong to, shape [keys]."""
        slots = np.asarray(host_indices, np.int64)
        if len(slots) != len(keys) * self._page_tokens:
            raise ValueError(f"{len(slots)} slots for {len(keys)} pages of {self._page_tokens}")
        first = slots[:: self._page_tokens]
        if (first % self._page_tokens).any():
            raise ValueError("a page does not begin where one does in the host pool")
        return first // self._page_tokens

    # Pages in tensors of their own, without interface_v1.

    @hook(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Return a page in `target_location`, or None. See batch_get."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def _no_pages(self, keys: Sequence[str], *_: Any, **__: Any) -> list[Any]:
        return [None] * len(keys)

    @hook(_no_pages)
    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Copy pages into flat tensors, or new ones; return these, None where there is none.

        The order of a page's bytes is that of the host pool's get_data_page.
        """
        if self._loader is None or self._pool is None:
            return [None] * len(keys)
        size = self._pool.page_bytes
        given = target_locations or [None] * len(keys)
        targets = [_empty(size) if t is None else t for t in given]
        flat = FlatPages([as_bytes(t) for t in targets], size)
        got = self._loader.load(_hashes(keys), flat, np.arange(len(keys)))
        return [t if ok else None for t, ok in zip(targets, got, strict=True)]

    @hook(lambda *_, **__: False)
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page. See batch_set."""
        return self.batch_set(
            [key], [value], None if target_location is None else [target_location]
        )

    @hook(lambda *_, **__: False)
    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages that are flat tensors; return whether the sidecar has them all."""
        if self._storer is None or self._pool is None:
            return False
        pages = values if values is not None and values[0] is not None else target_locations
        if pages is None:
            return False
        whole = [p if p.is_contiguous() else p.contiguous() for p in pages]
        flat = FlatPages([as_bytes(p) for p in whole], self._pool.page_bytes)
        return all(self._storer.store(_hashes(keys), flat, np.arange(len(keys))))

    # The rest.

    @hook(lambda *_: None)
    def clear(self) -> None:
        """Drop this namespace's pages in the sidecar; peers keep theirs."""
        if self._matcher is not None and self._loader is not None:
            self._loader.forget()
            self._matcher.reset()

    @hook(lambda *_: None)
    def get_stats(self) -> Any:
        """Return pages and GB/s of each call since the last time, as SGLang's own backends do."""
        kept = self._metrics.take()
        if kept is None:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        (read, read_speed), (written, write_speed) = kept["prefetch"], kept["backup"]
        return StorageMetrics(read, written, read_speed, write_speed)

    @hook(lambda *_: None)
    def close(self) -> None:
        """End thread and connection, and with it every lease."""
        if self._session is not None:
            self._session.stop()
        self._matcher = self._loader = self._storer = None
        self._usable = False
        self.recorder.stop()


def _hashes(keys: Sequence[str]) -> bytes:
    """Return page hashes as bytes. Raises ValueError for what is none."""
    hashes = bytes.fromhex("".join(keys))
    if len(hashes) != len(keys) * HASH_SIZE:
        raise ValueError(f"{len(keys)} keys are not hashes of {HASH_SIZE} bytes")
    return hashes


def _empty(size: int) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8)


def _engine_name(config: Any) -> str:
    """Return a name for this process that no other has, on this host or with its name."""
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:40]
    rank = f"{getattr(config, 'dp_rank', 0)}.{config.pp_rank}.{config.tp_rank}"
    return f"sglang-{host}-{os.getpid()}-{rank}-{os.urandom(2).hex()}"
