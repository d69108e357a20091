"""The vLLM connector: vLLM's hooks, handed on to `scheduler` and `worker`.

Set it with --kv-transfer-config
{"kv_connector": "MembraneConnector", "kv_connector_module_path": "membrane_kv.vllm",
"kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {...}}, see `settings.Settings` for the last.

Loads are asynchronous only: nothing is computed on top of a page before it is
known to be right. Two hooks wait for the sidecar: `get_num_new_matched_tokens`, a
few milliseconds a step, and the end of `wait_for_save`, the store deadline at most.
None lets an exception out: one kills the engine.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from . import facts as facts_of
from . import wire
from .announce import Announcer
from .device import DevicePool, TorchQueue
from .facts import Facts, Unsupported
from .identity import Adapters, scope
from .jobs import LoadJob, Step
from .pinned import CudaDriver, Driver, PinError
from .pool import Pool
from .record import Recorder, hook
from .scheduler import Scheduler
from .session import Session
from .settings import Settings
from .vllm_events import StoredPages, as_events
from .vllm_stats import MembraneMetrics, MembraneStats
from .worker import Loader, Storer

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # before 0.29
    KVConnectorTransferResults = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.membrane_kv")

_IDLE_WAIT_S = 0.001


def register() -> None:
    """Make the connector known by its name; vLLM calls this as a plugin."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = MembraneConnector.__name__
    if name not in getattr(KVConnectorFactory, "_registry", {}):
        KVConnectorFactory.register_connector(name, __name__, name)


class StepMetadata(KVConnectorMetadata):
    """The jobs of one step, on their way from the scheduler to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class _Blocks:
    """Block tables, for a vLLM whose scheduler output does not give them."""

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}

    def update(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in resumed:
                self._tables[request_id] = list(ids[0]) if ids else []
            elif ids:
                self._tables.setdefault(request_id, []).extend(ids[0])

    def get(self, request_id: str) -> list[int]:
        return self._tables.get(request_id, [])

    def remove(self, request_id: str) -> None:
        self._tables.pop(request_id, None)


class MembraneConnector(KVConnectorBase_V1, SupportsHMA):
    """One process's side of the connector: the scheduler's, or one worker rank's."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        side = role.name.lower()
        self.recorder = Recorder("", side)
        self._settings = Settings()
        self._facts: Facts | None = None
        self._session: Session | None = None
        self._scheduler: Scheduler | None = None
        self._loader: Loader | None = None
        self._storer: Storer | None = None
        self._requests: dict[str, Any] = {}
        self._blocks = _Blocks()
        self._adapters = Adapters()
        self._announcer: Announcer | None = None
        events = getattr(vllm_config, "kv_events_config", None)
        self._tells = bool(getattr(events, "enable_kv_cache_events", False))
        self._asked_at: dict[str, float] = {}
        self._unreported: list[str] = []
        self._lost_blocks: set[int] = set()
        try:
            extra = self._kv_transfer_config.kv_connector_extra_config
            self._settings = Settings.parse(extra)
            self.recorder = Recorder(self._settings.stats_file, side)
            self._facts = facts_of.read(vllm_config, kv_cache_config, self._settings.weights_id)
            if role == KVConnectorRole.SCHEDULER:
                self._start_scheduler(self._facts)
        except (Unsupported, ValueError) as e:
            self._off(str(e))
        except Exception as e:
            log.exception("membrane: cannot read vLLM's configuration")
            self._off(f"{type(e).__name__}: {e}")

    def _off(self, sentence: str) -> None:
        """Be an empty cache from now on."""
        log.warning("membrane: KV caching is off: %s", sentence)
        self.recorder.note(off=sentence)
        self._facts = self._scheduler = None

    def _start_session(
        self, facts: Facts, role: str, rank: int, slots: int, driver: Driver | None = None
    ) -> Session:
        s = self._settings
        engine = str(self._kv_transfer_config.engine_id)
        descriptor = facts.descriptor(rank)
        registration = wire.Register(engine, role, facts.model, descriptor, slots, s.inline)
        name = f"{role}-{rank}"
        self.recorder.note(registration=wire.parse_json(registration.pack()))
        return Session(s.places, registration, s.api_key, f"vllm {name}", driver).start()

    def _start_scheduler(self, facts: Facts) -> None:
        config = self._kv_transfer_config
        self._session = self._start_session(facts, "scheduler", 0, 0)
        self._scheduler = Scheduler(
            self._session,
            facts.block,
            self._settings,
            self.recorder,
            loads=config.is_kv_consumer,
            stores=config.is_kv_producer,
        )
        hash_block = int(getattr(self._kv_cache_config, "hash_block_size", 0) or facts.block)
        if self._tells:
            self._announcer = Announcer(facts.tp_size, hash_block, facts.block)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss and nothing else."""
        return False

    # The scheduler's side.

    @hook(lambda *_: None)
    def on_new_request(self, request: Any) -> None:
        """Take a new request."""
        self._admit(request)

    def _admit(self, request: Any) -> None:
        s = self._scheduler
        if s is None or s.knows(request.request_id) or request.request_id in self._requests:
            return
        self._requests[request.request_id] = request
        found = scope(request, self._adapters)
        if isinstance(found, str):
            self.recorder.add("passed_by_" + found)
            return
        ids = request.all_token_ids
        s.add(
            request.request_id,
            found.salt,
            lambda a, b: wire.tokens(ids[a:b]),
            found.extra,
            found.reads,
        )

    def _no_promise(self, request: Any, *_: Any) -> tuple[int, bool]:
        if self._scheduler is not None:
            self._scheduler.deny(request.request_id)
        return 0, False

    @hook(_no_promise)
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Promise what is leased beyond the engine's own hit; None while that is not known."""
        if self._scheduler is None:
            return 0, False
        self._admit(request)
        promised = self._scheduler.match(
            request.request_id,
            num_computed_tokens,
            request.num_tokens,
            getattr(request, "num_preemptions", 0),
        )
        self._count_none(request.request_id, promised is None)
        return promised, bool(promised)

    def _count_none(self, request_id: str, none: bool) -> None:
        """Count how long a request was put off because its answer was not there."""
        if none:
            self.recorder.add("none_answers")
            self._asked_at.setdefault(request_id, time.monotonic())
        elif (began := self._asked_at.pop(request_id, None)) is not None:
            self.recorder.add("none_us", int((time.monotonic() - began) * 1e6))

    def _failed_load(self, request: Any, _: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0 and self._scheduler is not None:
            self._scheduler.fail(request.request_id, "internal")

    @hook(_failed_load)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Turn the promise into a load, or give the lease back."""
        if self._scheduler is not None:
            ids = blocks.get_block_ids()[0]
            self._scheduler.allocated(request.request_id, num_external_tokens, ids)

    def _bare_step(self, _: Any) -> StepMetadata:
        return StepMetadata(Step(loads=self._scheduler.loads() if self._scheduler else []))

    @hook(_bare_step)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's jobs."""
        s = self._scheduler
        if s is None:
            return StepMetadata(Step())
        out = scheduler_output
        state = getattr(out, "kv_connector_block_state", None)
        if state is None:
            self._blocks.update(out)

        def blocks(request_id: str) -> list[int]:
            if state is None:
                return self._blocks.get(request_id)
            table = state.get_block_ids(request_id)
            return table[0] if table else []

        before = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        idle = not out.total_num_scheduled_tokens
        unsure = self._loaded_by_others(out)
        step = s.step(
            [
                (i, before[i] + n, len(self._requests[i].all_token_ids))
                for i, n in out.num_scheduled_tokens.items()
                if i in before and i in self._requests and i not in unsure
            ],
            blocks,
            idle,
        )
        step.loads = s.loads()
        self._expect(step)
        if idle and not step.loads:
            s.wait_for_answer()
        return StepMetadata(step)

    @staticmethod
    def _loaded_by_others(out: SchedulerOutput) -> set[str]:
        """Return requests whose KV another connector may load in this very step.

        This one never does. Should that load fail, then what the step computes
        is wrong: it is stored with the next step, which knows.
        """
        if not getattr(out, "has_sync_kv_loads", False):
            return set()
        resumed = getattr(out.scheduled_cached_reqs, "resumed_req_ids", ())
        return {*resumed, *(new.req_id for new in out.scheduled_new_reqs)}

    def _expect(self, step: Step) -> None:
        """Note which pages may be announced once the workers have stored them."""
        if self._announcer is None or self._session is None:
            return
        if (up := self._session.up) is not None:
            self._announcer.connection(up.epoch)
        for job in step.stores:
            r = self._requests[job.request]
            self._announcer.expect(job, r.block_hashes, r.all_token_ids, r)

    @hook(lambda *_: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads ended."""
        s = self._scheduler
        if s is None:
            return
        lost = getattr(connector_output, "invalid_block_ids", None)
        if lost:
            s.lost_blocks(lost)
        failed = getattr(connector_output, "failed_recving", None) or ()
        s.loaded(connector_output.finished_recving or (), failed)
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._announcer is not None and isinstance(meta, StoredPages):
            self._announcer.held(meta.pages)

    @hook(lambda *_: ())
    def take_events(self) -> Iterable[Any]:
        """Return BlockStored and BlockRemoved events of the sidecar's memory, medium CPU."""
        if self._announcer is None:
            return ()
        return as_events(self._announcer.take(), self._announcer.hash_tokens)

    def _nothing_kept(self, *_: Any) -> tuple[bool, None]:
        return False, None

    @hook(_nothing_kept)
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks may be freed: stores ended with their step."""
        return self._finished(request.request_id)

    @hook(_nothing_kept)
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See request_finished."""
        return self._finished(request.request_id)

    def _finished(self, request_id: str) -> tuple[bool, None]:
        self._requests.pop(request_id, None)
        self._asked_at.pop(request_id, None)
        self._blocks.remove(request_id)
        if self._scheduler is not None:
            self._scheduler.remove(request_id)
        return False, None

    @hook(lambda *_: False)
    def reset_cache(self) -> bool | None:
        """Drop this namespace's pages in the sidecar, see Scheduler.reset; peers keep theirs."""
        if self._scheduler is None:
            return None
        if self._announcer is not None:
            self._announcer.forget()
        return self._scheduler.reset()

    # Both sides.

    @hook(lambda *_: None)
    def get_kv_connector_stats(self) -> MembraneStats | None:
        """Return what was counted since the last step, or None."""
        counted = self.recorder.take()
        return MembraneStats(data=dict(counted)) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MembraneStats:
        """Return stats that came from another process as a dict."""
        return MembraneStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MembraneMetrics:
        """Return the Prometheus counters of this connector."""
        return MembraneMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The workers' side.

    @hook(lambda *_: None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors, shape [blocks, ...] per layer, and connect."""
        if self._facts is None:
            return
        try:
            self._start_worker(self._facts, kv_caches)
        except (Unsupported, ValueError) as e:
            self._off(str(e))
        except Exception as e:
            self._off(f"{type(e).__name__}: {e}")
            raise

    def _start_worker(self, facts: Facts, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = sorted(kv_caches, key=facts_of.numeric)
        if tuple(layers) != facts.layers:
            raise Unsupported(
                f"the engine has {len(layers)} KV tensors for {len(facts.layers)} layers"
            )
        tensors = [kv_caches[name] for name in layers]
        facts_of.check_shape(facts, tensors[0].device.type, tuple(tensors[0].shape))
        pool = _pool(tensors)
        if pool.block_bytes != facts.block_bytes:
            raise Unsupported(f"a block has {pool.block_bytes} bytes, not {facts.block_bytes}")
        rank = _tp_rank()
        slots = self._settings.inbox_slots if self._kv_transfer_config.is_kv_producer else 0
        driver = _driver(tensors[0].device) if self._settings.pin else None
        session = self._start_session(facts, "worker", rank, slots, driver)
        self._session = session
        shard = facts.descriptor(rank).shard
        self._loader = Loader(session, pool, shard, self._settings, self.recorder)
        if slots:
            self._storer = Storer(
                session, _pool(tensors), self._settings, self.recorder, self._tells
            )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's jobs; ask for inbox slots while the model computes."""
        super().bind_connector_metadata(connector_metadata)
        self._begin_stores(connector_metadata)

    @hook(lambda *_: None)
    def _begin_stores(self, metadata: KVConnectorMetadata) -> None:
        if self._storer is not None and isinstance(metadata, StepMetadata):
            self._storer.begin(metadata.step.stores)

    @property
    def _step(self) -> Step:
        metadata = self._connector_metadata
        return metadata.step if isinstance(metadata, StepMetadata) else Step()

    @hook(lambda *_, **__: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hand the step's loads to the copying thread."""
        for job in self._step.loads:
            self._begin_load(job)

    def _begin_load(self, job: LoadJob) -> None:
        if self._loader is None:
            self._unreported.append(job.request)
        else:
            self._loader.submit(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before their request is computed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are stored after the step."""

    @hook(lambda *_: None)
    def wait_for_save(self) -> None:
        """Hand the step's full pages over, until the store deadline at most."""
        if self._storer is None:
            return
        if sys.exc_info()[0] is not None:
            # vLLM calls this on the way out of a step that has failed, too, in which
            # nobody knows what was computed.
            self._storer.abandon("failed_step")
            return
        self._storer.finish()

    def _ended(self) -> tuple[set[str], set[str], set[int]]:
        """Return the ids of loads that ended, those that failed, and the latter's blocks."""
        done, failed, blocks = set(self._unreported), set(self._unreported), set[int]()
        self._unreported = []
        if self._loader is not None:
            for job, reason in self._loader.take(_IDLE_WAIT_S if self._step.idle else 0.0):
                done.add(job.request)
                if reason:
                    failed.add(job.request)
                    blocks.update(job.block_ids)
        return done, failed, blocks

    def _no_results(self, *_: Any) -> Any:
        return KVConnectorTransferResults()

    @hook(_no_results)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Report loads that ended, each once, good or bad."""
        done, failed, _ = self._ended()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    @hook(lambda *_: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report as get_transfer_results does, to a vLLM that does not have it."""
        done, _, blocks = self._ended()
        self._lost_blocks |= blocks
        return None, done or None

    @hook(lambda *_: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that get_finished has reported as bad."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    @hook(lambda *_: None)
    def build_connector_worker_meta(self) -> StoredPages | None:
        """Tell the scheduler's side what this rank has stored, when vLLM publishes events."""
        held = self._storer.take_held() if self._storer is not None else []
        return StoredPages(dict.fromkeys(held, 1)) if held else None

    @hook(lambda *_: None)
    def shutdown(self) -> None:
        """End threads and connection."""
        began = time.monotonic()
        for part in (self._loader, self._session):
            if part is not None:
                part.stop(max(2.0 - (time.monotonic() - began), 0.1))
        self.recorder.stop()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a layer's tensor [blocks, ...] as bytes [blocks, bytes of a block], not copied."""
    if not tensor.is_contiguous():
        raise Unsupported("a layer's KV tensor does not lie in one piece")
    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1)


def _pool(tensors: list[torch.Tensor]) -> Pool:
    """Return a pool over the layers' tensors, in their order, for one thread."""
    flat = [_as_bytes(t) for t in tensors]
    if tensors[0].device.type == "cpu":
        return Pool([f.numpy() for f in flat])
    return DevicePool(flat, TorchQueue(tensors[0].device))


def _driver(device: torch.device) -> Driver | None:
    """Return what pins the sidecar's memory for copies to a device, if something does."""
    if device.type != "cuda":
        return None
    try:
        return CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
    except PinError as e:
        log.warning("membrane: there is no CUDA driver to pin memory with (%s)", e)
        return None


def _tp_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


# A parent connector rebuilds its children's stats by their registered names.
register()
