"""The TensorRT-LLM connector: its scheduler's and its workers' hooks.

Set it with

    kv_connector_config:
      connector_module: membrane_kv.trtllm
      connector_scheduler_class: MembraneScheduler
      connector_worker_class: MembraneWorker

and the settings, one JSON object, in the environment variable TLLM_MEMBRANE:
see `settings.Settings`, and `stage_mib` for the size of the host memory
through which loads pass (default 1024).

The runtime asks once, holds its block manager's lock meanwhile, and cannot be
told that a load has failed. So a promise is made only of bytes that lie in
host memory which every rank has mapped, after the sidecar has said that their
lease held throughout: see `trtllm_stage`. No hook lets an exception out but
those that carry a promise out, `update_state_after_alloc` and `start_load_kv`:
where they fail, wrong tokens would be the alternative.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import trtllm_facts as facts_of
from . import wire
from .facts import Facts, Unsupported
from .jobs import LoadJob, StoreJob
from .pool import Pool
from .record import Recorder, hook
from .scheduler import Scheduler
from .session import Session
from .settings import Settings
from .shared import Unmapped
from .trtllm_pool import on_stream, pool_of
from .trtllm_stage import Place, Stage
from .worker import Storer

try:
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ImportError:  # moved since
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )

log = logging.getLogger("membrane_kv.trtllm")

_MATCH_MS = 100.0
_STAGE_MIB = 1024


@dataclass
class Load:
    """Blocks to copy from the stage: slots[i] into block block_ids[i]. Numbered from 1."""

    number: int
    slots: list[int]
    block_ids: list[int]


@dataclass
class Metadata:
    """What the scheduler tells every rank in one iteration."""

    engine: str
    place: Place | None
    loads: list[Load] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)


def _settings(environment: Mapping[str, str] = os.environ) -> tuple[Settings, int]:
    """Return the settings and the stage's size in bytes. Raises ValueError."""
    try:
        given = json.loads(environment.get("TLLM_MEMBRANE") or "{}")
    except ValueError as e:
        raise ValueError(f"TLLM_MEMBRANE is no JSON: {e}") from e
    if not isinstance(given, dict):
        raise ValueError("TLLM_MEMBRANE is no JSON object")
    stage = given.pop("stage_mib", _STAGE_MIB)
    if not isinstance(stage, int) or isinstance(stage, bool) or not 1 <= stage <= 1 << 20:
        raise ValueError(f"stage_mib is {stage!r}, not between 1 and {1 << 20}")
    return Settings.parse({"match_deadline_ms": _MATCH_MS, **given}), stage << 20


def _rank() -> int:
    from tensorrt_llm._utils import mpi_rank

    return int(mpi_rank())


class _Side:
    """What both classes share: settings, facts, and being off."""

    def _begin(self, llm_args: Any, side: str) -> None:
        self.recorder = Recorder("", side)
        self._settings, self._stage_bytes = Settings(), 0
        self._facts: Facts | None = None
        self._session: Session | None = None
        try:
            self._settings, self._stage_bytes = _settings()
            self.recorder = Recorder(self._settings.stats_file, side)
            self._facts = facts_of.read(llm_args, self._settings.weights_id)
        except (Unsupported, ValueError) as e:
            self._off(str(e))
        except Exception as e:
            log.exception("membrane: cannot read TensorRT-LLM's arguments")
            self._off(f"{type(e).__name__}: {e}")

    def _off(self, sentence: str) -> None:
        """Be an empty cache from now on."""
        log.warning("membrane: KV caching is off: %s", sentence)
        self.recorder.note(off=sentence)
        self._facts = None

    def _connect(self, facts: Facts, engine: str, role: str, rank: int, slots: int) -> Session:
        s = self._settings
        descriptor = facts.descriptor(rank)
        registration = wire.Register(engine, role, facts.model, descriptor, slots, s.inline)
        name = f"tensorrt-llm {role}-{rank}"
        return Session(s.places, registration, s.api_key, name).start()


# The worker of this process by its arguments, which both classes are given.
_workers: weakref.WeakValueDictionary[int, MembraneWorker] = weakref.WeakValueDictionary()
_schedulers: weakref.WeakValueDictionary[int, MembraneScheduler] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class MembraneWorker(KvCacheConnectorWorker, _Side):
    """One rank: copies from the stage into its blocks, and stores blocks."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._begin(llm_args, "worker")
        self._pool: Pool | None = None
        self._storer: Storer | None = None
        self._stage: Stage | None = None
        self._rank = 0
        try:
            self._rank = _rank()
        except Exception as e:
            self._off(f"the rank is not known: {type(e).__name__}: {e}")
        self.args = llm_args
        if self._rank == 0:
            with _lock:
                _workers[id(llm_args)] = self

    @hook(lambda *_: None)
    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Take the KV pool, shape [blocks, layers, 2 or 1, numbers of a layer's K or V]."""
        if self._facts is None:
            return
        try:
            itemsize = kv_cache_tensor.dtype.itemsize
            facts_of.check_shape(self._facts, kv_cache_tensor.shape, itemsize)
            self._pool = pool_of(kv_cache_tensor)
        except (Unsupported, ValueError) as e:
            self._off(str(e))
            return
        with _lock:
            scheduler = _schedulers.get(id(self.args))
        if self._rank == 0 and scheduler is not None and scheduler.args is self.args:
            self._join(scheduler.engine, scheduler.place)

    def _join(self, engine: str, place: Place | None) -> None:
        """Connect as a rank of `engine`, and say that loads from `place` can be copied."""
        facts, pool = self._facts, self._pool
        if facts is None or pool is None:
            return
        if self._session is None:
            slots = self._settings.inbox_slots
            self._session = self._connect(facts, engine, "worker", self._rank, slots)
            self._storer = Storer(self._session, pool, self._settings, self.recorder)
        if self._stage is None and place is not None:
            try:
                self._stage = Stage.join(place)
            except OSError as e:
                self._off(f"rank {self._rank} cannot map the memory of rank 0: {e}")
                return
            self._stage.done(self._rank, 0)

    def fetch(self, job: LoadJob, stage: Stage, slots: list[int]) -> int:
        """Copy leased blocks of every rank into the stage; release; return how many are there.

        Called by the scheduler of this process, in its thread. Ends at the
        job's deadline; 0 when the lease did not hold, or without shared memory.
        """
        session = self._session
        up = session.up if session is not None else None
        if session is None or up is None or up.since > job.granted or job.locations is None:
            return 0
        if up.shared is None:
            self.recorder.add("failed_loads_inline")
            return 0
        ready = 0
        try:
            with up.shared.use() as shared:
                for ready in range(len(slots)):
                    if time.monotonic() >= job.deadline:
                        break
                    page, block = divmod(job.skip + ready, job.blocks)
                    for rank in range(stage.place.ranks):
                        out = stage.slot(slots[ready], rank)
                        at = job.locations[page, rank]
                        if int(at["length"]) != job.blocks * len(out):
                            raise ValueError(f"a leased object has {at['length']} bytes")
                        offset = int(at["offset"]) + block * len(out)
                        out[:] = shared.object(offset, len(out))
                else:
                    ready = len(slots)
        except Unmapped:
            return 0
        call = session.release(
            job.lease,
            max(job.deadline, time.monotonic() + self._settings.match_deadline_ms / 1e3),
            self._settings.verify == "all",
            up.epoch,
        )
        if not call.wait() or call.result is None or call.result != wire.Outcome.LIVE:
            name = call.result.name.lower() if call.result is not None else call.reason
            self.recorder.add("failed_loads_" + name)
            return 0
        return ready

    def bind_connector_meta(self, metadata: Any) -> None:
        """Take the iteration's work; ask for inbox slots while the model computes."""
        super().bind_connector_meta(metadata)
        self._take(metadata)

    @hook(lambda *_: None)
    def _take(self, metadata: Any) -> None:
        if not isinstance(metadata, Metadata):
            return
        self._join(metadata.engine, metadata.place)
        if self._storer is not None:
            self._storer.begin(metadata.stores)

    def start_load_kv(self, stream: Any) -> None:
        """Copy what was promised from the stage into the blocks, on `stream`."""
        metadata = self._metadata
        if not isinstance(metadata, Metadata) or not metadata.loads:
            return
        stage, pool = self._stage, self._pool
        if stage is None or pool is None:
            raise RuntimeError("membrane: a load was promised to a rank that cannot load")
        with on_stream(pool, stream):
            for load in metadata.loads:
                for slot, block in zip(load.slots, load.block_ids, strict=True):
                    pool.write(block, pool.cut(stage.slot(slot, self._rank))[0])
                stage.done(self._rank, load.number)
                self.recorder.add("loads")
                self.recorder.add("loaded_blocks", len(load.slots))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: loads have ended when `start_load_kv` returns."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: whole blocks are stored after the forward pass."""

    @hook(lambda *_: None)
    def wait_for_save(self, stream: Any) -> None:
        """Hand the iteration's full pages over, until the store deadline at most."""
        if self._storer is not None and self._pool is not None:
            with on_stream(self._pool, stream):
                self._storer.finish()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Report nothing: loads and stores end inside their iteration."""
        return [], []

    def shutdown(self) -> None:
        """End the connection. The runtime does not call it; tests do."""
        if self._session is not None:
            self._session.stop()
        self.recorder.stop()


@dataclass
class _Known:
    """What is known of a request: deltas of the runtime, added up.

    `tokens` are those that the request had when it was last seen, `matched`
    is what was promised and not yet seen in a scheduled iteration.
    """

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    matched: int = 0
    local: int = 0
    slots: list[int] = field(default_factory=list)


class MembraneScheduler(KvCacheConnectorScheduler, _Side):
    """Rank 0's decisions: what is promised, loaded and stored."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._begin(llm_args, "scheduler")
        self.args = llm_args
        self.engine = f"trtllm-{uuid.uuid4().hex}"
        self._scheduler: Scheduler | None = None
        self._stage: Stage | None = None
        self._requests: dict[int, _Known] = {}
        self._loads: list[tuple[int, Load]] = []
        self._sent: list[Load] = []
        self._free: list[int] = []
        self._number = 0
        facts = self._facts
        if facts is not None:
            try:
                self._stage = Stage.make(self._stage_bytes, facts.tp_size, facts.block_bytes)
            except (OSError, ValueError) as e:
                self._off(f"cannot make the memory for loads: {e}")
                return
            self._free = list(range(self._stage.place.slots))
            self._session = self._connect(facts, self.engine, "scheduler", 0, 0)
            self._scheduler = Scheduler(self._session, facts.block, self._settings, self.recorder)
        with _lock:
            _schedulers[id(llm_args)] = self

    @property
    def place(self) -> Place | None:
        """Where the ranks find the stage."""
        return self._stage.place if self._stage is not None else None

    @hook(lambda *_: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens beyond the engine's own hit are in the stage, never async."""
        s, facts = self._scheduler, self._facts
        if s is None or facts is None:
            return 0, False
        number = int(request.request_id)
        self._forget(number)
        if not _plain(request):
            return 0, False
        known = _Known([int(t) for t in request.get_tokens(0)])
        self._requests[number] = known
        s.add(str(number), _salt(request), lambda a, b: wire.tokens(known.tokens[a:b]))
        if num_computed_tokens % facts.block:
            return 0, False  # a block that is partly the engine's own
        promised = s.match(str(number), num_computed_tokens, len(known.tokens), 0)
        while promised is None:
            s.wait_for_answer()
            promised = s.match(str(number), num_computed_tokens, len(known.tokens), 0)
        if not promised:
            s.allocated(str(number), 0, [])
            return 0, False
        known.local = num_computed_tokens
        known.matched = self._fetch(number, known, promised // facts.block) * facts.block
        return known.matched, False

    def _fetch(self, number: int, known: _Known, blocks: int) -> int:
        """Bring up to `blocks` blocks into the stage; return how many are there."""
        s, stage, facts = self._scheduler, self._stage, self._facts
        assert s is not None and stage is not None and facts is not None
        with _lock:
            worker = _workers.get(id(self.args))
        name = str(number)
        self._reclaim(stage)
        if worker is None or worker.args is not self.args or not stage.joined():
            self.recorder.add("misses_not_joined")
            s.allocated(name, 0, [])
            return 0
        first = known.local // facts.block
        # The blocks' ids are not known yet, and not needed here.
        s.allocated(name, blocks * facts.block, [0] * (first + blocks))
        (job,) = s.loads()
        slots = [self._free.pop() for _ in range(min(blocks, len(self._free)))]
        ready = 0
        try:
            job.deadline = min(
                job.deadline, time.monotonic() + self._settings.match_deadline_ms / 1e3
            )
            ready = worker.fetch(job, stage, slots)
        finally:
            self._free += slots[ready:]
            known.slots = slots[:ready]
            s.loaded([name], [] if ready else [name])
        if ready and stage.place.ranks > 1 and self._session is not None and self._session.up:
            # The other ranks never release it.
            self._session.give_back(self._session.up.epoch, job.lease)
        return ready

    def _reclaim(self, stage: Stage) -> None:
        """Free the slots of loads that every rank has copied."""
        copied = stage.copied()
        while self._sent and self._sent[0].number <= copied:
            self._free += self._sent.pop(0).slots

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Learn where the promised blocks belong. `block_ids` are all of the prompt."""
        number, facts = int(request.request_id), self._facts
        known = self._requests.get(number)
        if known is None or not known.slots or facts is None:
            return
        first = known.local // facts.block
        ids = [int(i) for i in block_ids][first : first + len(known.slots)]
        if len(ids) != len(known.slots) or min(ids) < 0:
            raise RuntimeError(
                f"membrane: {len(known.slots)} blocks from {first} on were promised,"
                f" and {len(block_ids)} blocks were allocated"
            )
        self._number += 1
        load = Load(self._number, known.slots, ids)
        known.slots = []
        self._loads.append((number, load))

    def _bare(self, _: Any) -> Metadata:
        return Metadata(self.engine, self.place, self._take_loads())

    def _take_loads(self) -> list[Load]:
        loads = [load for _, load in self._loads]
        self._loads.clear()
        self._sent += loads
        return loads

    @hook(_bare)
    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Return the iteration's work."""
        s = self._scheduler
        if s is None:
            return Metadata(self.engine, None)
        scheduled = [self._progress(d, True) for d in scheduler_output.new_requests]
        scheduled += [self._progress(d, False) for d in scheduler_output.cached_requests]
        step = s.step([x for x in scheduled if x is not None], self._table, False)
        return Metadata(self.engine, self.place, self._take_loads(), step.stores)

    def _table(self, name: str) -> list[int]:
        known = self._requests.get(int(name))
        return known.blocks if known is not None else []

    def _progress(self, data: Any, new: bool) -> tuple[str, int, int] | None:
        """Add one request's delta; return its name, tokens computed after this iteration, known."""
        known = self._requests.get(int(data.request_id))
        if known is None:
            return None
        tokens = [int(t) for t in data.new_tokens]
        if new:
            known.tokens, known.blocks = tokens, []
        else:
            known.tokens += tokens
        known.blocks += [int(i) for i in data.new_block_ids]
        computed = int(data.computed_position) + int(data.num_scheduled_tokens)
        matched, known.matched = known.matched, 0
        if new and computed + matched == len(known.tokens):
            # At first the position lacks the matched tokens. A chunk of a prompt is
            # counted short, never long: the next iteration says how far it really is.
            computed += matched
        return str(data.request_id), min(computed, len(known.tokens)), len(known.tokens)

    @hook(lambda *_: False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Forget the request, also one that was aborted. Its blocks may be freed."""
        self._forget(int(request.request_id))
        return False

    def _forget(self, number: int) -> None:
        known = self._requests.pop(number, None)
        if known is None:
            return
        self._free += known.slots
        # A load that no rank has heard of must not write blocks that are freed.
        for entry in [e for e in self._loads if e[0] == number]:
            self._loads.remove(entry)
            self._free += entry[1].slots
        if self._scheduler is not None:
            self._scheduler.remove(str(number))

    def shutdown(self) -> None:
        """End the connection and free the stage. The runtime does not call it; tests do."""
        if self._session is not None:
            self._session.stop()
        if self._stage is not None:
            self._stage.close()
        self.recorder.stop()


def _plain(request: Any) -> bool:
    """Return whether the request's KV depends on its tokens and salt only."""
    for name in (
        "lora_task_id",
        "multimodal_hashes",
        "multimodal_embedding",
        "py_multimodal_data",
        "prompt_embedding_table",
        "mrope_rotary_cos_sin",
        "encoder_tokens",
    ):
        if getattr(request, name, None) is not None:
            return False
    return not getattr(request, "is_generation_only_request", False)


def _salt(request: Any) -> str | None:
    """Return what keeps the request's KV apart from others', None for nothing."""
    salt = getattr(request, "cache_salt", None)
    if salt:
        return str(salt)
    number = getattr(request, "cache_salt_id", None)
    return None if number is None else f"trtllm-salt-id-{int(number)}"
