"""The workers' side of a connector: copies between the engine's blocks and the sidecar.

Knows nothing of an engine but its blocks. Loads run in a thread of their own,
one after the other; stores run in the engine's thread, because its blocks may
be used again as soon as the step ends.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import wire
from .call import DEADLINE, UNREACHABLE, Call
from .jobs import LoadJob, StoreJob
from .pool import Pool
from .record import Recorder
from .session import Session, Up
from .settings import Settings
from .shared import Bytes, Unmapped

_BATCH = 8
_COMMIT_S = 2.0
_RESERVE_S = 1.0


def _inline(up: Up) -> bool:
    """Return whether pages are stored without an inbox."""
    return up.shared is None or not up.registered.inbox_slots


def _trusted(up: Up | None, granted: float) -> Up | None:
    """Return the connection if it was there before `granted`.

    A sidecar that was restarted since may use the same numbers for other
    leases and chains; a connection that is older cannot be to that one.
    """
    return up if up is not None and up.since <= granted else None


class Loader:
    """Copies leased pages into blocks, in a thread of its own.

    Every job that is handed in comes out of `take` exactly once.
    """

    def __init__(
        self, session: Session, pool: Pool, shard: int, settings: Settings, recorder: Recorder
    ) -> None:
        self._session = session
        self._pool = pool
        self._shard = shard
        self._verify = settings.verify == "all"
        self._recorder = recorder
        self._jobs: queue.SimpleQueue[tuple[LoadJob, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: list[tuple[LoadJob, str]] = []
        self._some = threading.Event()
        self._running = 0
        self._thread = threading.Thread(target=self._run, name="membrane-load", daemon=True)
        self._thread.start()

    def submit(self, job: LoadJob) -> None:
        """Hand a job in. Its blocks may still be read by what compute was given before."""
        event = self._pool.mark()
        with self._lock:
            self._running += 1
        self._jobs.put((job, event))

    def take(self, wait_s: float = 0.0) -> list[tuple[LoadJob, str]]:
        """Return the jobs that ended since, each with "" or why it failed.

        Waits for one, at most `wait_s` seconds, when jobs are running.
        """
        if wait_s and self._running and not self._some.is_set():
            self._some.wait(wait_s)
        if not self._some.is_set():
            return []
        with self._lock:
            ended, self._ended = self._ended, []
            self._running -= len(ended)
            self._some.clear()
        return ended

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread after what was handed in."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, event = entry
            began = time.perf_counter()
            try:
                self._pool.after(event)
                reason = self._load(job)
            except Unmapped:
                reason = UNREACHABLE
            except Exception:
                self._recorder.warn("a load")
                self._give_back(job)
                reason = "internal"
            self._count(job, reason, time.perf_counter() - began)
            with self._lock:
                self._ended.append((job, reason))
                self._some.set()

    def _load(self, job: LoadJob) -> str:
        if job.reason or job.locations is None:
            return job.reason or "internal"
        up = _trusted(self._session.up, job.granted)
        if up is None:
            return UNREACHABLE
        if time.monotonic() >= job.deadline:
            self._session.give_back(up.epoch, job.lease)
            return DEADLINE
        began = time.monotonic()
        at = job.locations[:, self._shard]
        size = job.blocks * self._pool.block_bytes
        if not (at["length"] == size).all():
            raise ValueError(f"leased objects of {set(at['length'].tolist())} bytes, not {size}")
        if up.shared is None:
            reason = self._read_inline(job, up.epoch, len(at))
            if reason:
                self._give_back(job)
                return reason
        else:
            with up.shared.use() as shared:
                try:
                    for i, offset in enumerate(at["offset"].tolist()):
                        self._place(job, i, shared.object(offset, size))
                finally:
                    self._pool.drain()
        # A deadline ends waiting for the sidecar, never a running copy.
        deadline = job.deadline + (time.monotonic() - began if up.shared else 0.0)
        call = self._session.release(job.lease, deadline, self._verify, up.epoch)
        if not call.wait() or call.result is None:
            return call.reason
        return "" if call.result == wire.Outcome.LIVE else call.result.name.lower()

    def _give_back(self, job: LoadJob) -> None:
        """Release the lease of a load that failed: after an abort nobody else does."""
        up = _trusted(self._session.up, job.granted)
        if up is not None:
            self._session.give_back(up.epoch, job.lease)

    def _read_inline(self, job: LoadJob, epoch: int, pages: int) -> str:
        for i in range(pages):
            call = self._session.read(epoch, job.lease, i + job.offset, job.deadline)
            if not call.wait() or call.result is None:
                return call.reason
            if call.result.reason:
                return wire.reason_name(call.result.reason)
            data = np.frombuffer(call.result.object, np.uint8)
            try:
                self._place(job, i, data)
            finally:
                self._pool.drain()
        return ""

    def _place(self, job: LoadJob, page: int, data: Bytes) -> None:
        """Copy the blocks of one page, shape [bytes of an object], to where they belong."""
        blocks = self._pool.cut(data)
        first = page * job.blocks - job.skip
        for i in range(max(-first, 0), min(job.blocks, len(job.block_ids) - first)):
            self._pool.write(job.block_ids[first + i], blocks[i])

    def _count(self, job: LoadJob, reason: str, seconds: float) -> None:
        r = self._recorder
        if reason:
            r.add("failed_loads")
            r.add("failed_loads_" + reason)
            return
        assert job.locations is not None
        at = job.locations[:, self._shard]
        r.add("loads")
        r.add("loaded_pages", len(at))
        r.add("loaded_bytes", int(at["length"].sum()))
        r.add("loaded_blocks", len(job.block_ids))
        r.add("load_us", int(seconds * 1e6))
        r.sums("loaded", at["sum"])


@dataclass
class _Chunk:
    """Some pages of one store job, and the answer to their reserve."""

    job: StoreJob
    first: int
    pages: int
    call: Call[wire.Records] | None = None

    @property
    def index(self) -> range:
        return range(self.first, self.first + self.pages)


class Storer:
    """Hands the pages of one step over to the sidecar.

    `begin` asks for slots before the step computes, `finish` copies and commits
    after it, and waits for the sidecar no longer than the store deadline; what
    has not been handed over by then is counted and not stored. When `finish`
    returns nothing reads the engine's blocks any more. With `tell`, `take_held`
    returns which pages the sidecar has acknowledged since.
    """

    def __init__(
        self,
        session: Session,
        pool: Pool,
        settings: Settings,
        recorder: Recorder,
        tell: bool = False,
    ) -> None:
        self._session = session
        self._pool = pool
        self._deadline_s = settings.store_deadline_ms / 1e3
        self._recorder = recorder
        self._held: collections.deque[tuple[str, int]] | None
        self._held = collections.deque() if tell else None
        self._todo: collections.deque[_Chunk] = collections.deque()
        self._asked: collections.deque[_Chunk] = collections.deque()
        self._credits = 0
        self._begun = 0  # the connection's epoch at `begin`
        self._epoch = 0
        self._orphans = 0

    def begin(self, jobs: list[StoreJob]) -> None:
        """Take the step's jobs and ask for the first slots. Returns at once."""
        self._drop_all("superseded")
        up = self._session.up
        self._begun = up.epoch if up is not None else 0
        batch = _BATCH
        if up is not None and not _inline(up):
            self._count_credits(up)
            batch = max(min(batch, self._credits), 1)
        for job in jobs:
            pages = len(job.block_ids) // job.blocks
            if _trusted(up, job.granted) is None:
                self._drop(pages, UNREACHABLE)
                continue
            for first in range(0, pages, batch):
                self._todo.append(_Chunk(job, job.page + first, min(batch, pages - first)))
        if self._todo and self._session.lagging:
            # It has not answered in time before: do not let the step wait for it again.
            self._drop_all(DEADLINE)
        if self._todo and up is not None and not _inline(up):
            self._reserve(up.epoch)

    def _count_credits(self, up: Up) -> None:
        if self._epoch != up.epoch:
            self._epoch, self._orphans = up.epoch, 0
        slots = up.registered.inbox_slots
        self._credits = slots - self._orphans
        if 2 * self._orphans > slots:
            # Slots that were granted too late for their step stay reserved.
            self._session.renew(up.epoch)

    def finish(self) -> None:
        """Copy and commit what `begin` took. Waits until the store deadline at most."""
        if not (self._todo or self._asked):
            return
        began = time.perf_counter()
        try:
            self._pool.after(self._pool.mark())
            self._finish()
        finally:
            self._recorder.add("store_us", int((time.perf_counter() - began) * 1e6))

    def abandon(self, reason: str) -> None:
        """Store nothing of what `begin` took, and count it."""
        self._drop_all(reason)

    def take_held(self) -> list[tuple[str, int]]:
        """Return request and number of the pages that the sidecar holds now, each once."""
        found = []
        while self._held:
            found.append(self._held.popleft())
        return found

    def _tell(self, job: StoreJob, pages: Iterable[int]) -> None:
        if self._held is not None:
            self._held.extend((job.request, page) for page in pages)

    def _finish(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        while self._todo or self._asked:
            up = self._session.up
            if up is None or up.epoch != self._begun:
                # The jobs' chains are those of the connection that `begin` has trusted.
                self._drop_all(UNREACHABLE)
            elif time.monotonic() >= deadline:
                self._drop_all(DEADLINE)
            elif _inline(up):
                self._write_inline(self._todo.popleft(), up.epoch)
            elif self._asked:
                chunk = self._asked.popleft()
                self._finish_chunk(chunk, up, deadline)
                # The commit, which frees the slots, is ahead of the next reserve on the wire.
                self._credits += chunk.pages
                self._reserve(up.epoch)
            else:
                self._drop_all("over_budget")

    def _reserve(self, epoch: int) -> None:
        while self._todo and self._credits >= self._todo[0].pages:
            chunk = self._todo.popleft()
            self._credits -= chunk.pages
            until = time.monotonic() + _RESERVE_S
            chunk.call = self._session.reserve(
                epoch, chunk.job.handle, chunk.index, until, self._orphaned
            )
            self._asked.append(chunk)

    def _orphaned(self, granted: wire.Records) -> None:
        """Count slots that nobody will write."""
        self._orphans += int((granted["status"] == wire.Store.SLOT).sum())

    def _finish_chunk(self, chunk: _Chunk, up: Up, deadline: float) -> None:
        call = chunk.call
        assert call is not None
        if not call.wait_until(deadline) or call.result is None:
            self._drop(chunk.pages, call.reason)
            return
        granted = call.result
        if len(granted) != chunk.pages:
            raise ValueError(f"{len(granted)} reservations for {chunk.pages} pages")
        for reason in granted["reason"][granted["status"] == wire.Store.REFUSED].tolist():
            self._drop(1, wire.reason_name(reason))
        exist = np.flatnonzero(granted["status"] == wire.Store.EXISTS)
        self._recorder.add("stores_existing", len(exist))
        self._tell(chunk.job, (exist + chunk.first).tolist())
        take = np.flatnonzero(granted["status"] == wire.Store.SLOT)
        if not len(take):
            return
        try:
            self._copy(chunk, up, take, granted["slot"][take])
        except Unmapped:
            self._drop(len(take), UNREACHABLE)
            return
        self._session.commit(
            up.epoch,
            chunk.job.handle,
            take + chunk.first,
            granted["slot"][take],
            time.monotonic() + _COMMIT_S,
            _Committed(self, chunk.job, (take + chunk.first).tolist()),
        )

    def _copy(self, chunk: _Chunk, up: Up, take: np.ndarray, slots: np.ndarray) -> None:
        assert up.shared is not None
        size = chunk.job.blocks * self._pool.block_bytes
        with up.shared.use() as shared:
            try:
                for page, slot in zip(take.tolist(), slots.tolist(), strict=True):
                    self._gather(chunk, page, self._pool.cut(shared.slot(slot, size)))
            finally:
                self._pool.drain()

    def _gather(self, chunk: _Chunk, page: int, out: Bytes) -> None:
        """Copy the blocks of the chunk's page into `out`, shape [blocks, layers, bytes]."""
        blocks = chunk.job.blocks
        begin = (chunk.first - chunk.job.page + page) * blocks
        for i, block in enumerate(chunk.job.block_ids[begin : begin + blocks]):
            self._pool.read(block, out[i])

    def _write_inline(self, chunk: _Chunk, epoch: int) -> None:
        size = chunk.job.blocks * self._pool.block_bytes
        for page in range(chunk.pages):
            data = np.empty(size, np.uint8)
            try:
                self._gather(chunk, page, self._pool.cut(data))
            finally:
                self._pool.drain()
            until = time.monotonic() + _COMMIT_S
            done = _Committed(self, chunk.job, [chunk.first + page])
            self._session.write(
                epoch, chunk.job.handle, chunk.first + page, data.tobytes(), until, done
            )

    def _drop(self, pages: int, reason: str) -> None:
        self._recorder.add("dropped_stores", pages)
        self._recorder.add("dropped_stores_" + reason, pages)

    def _drop_all(self, reason: str) -> None:
        for chunk in (*self._asked, *self._todo):
            self._drop(chunk.pages, reason)
            if chunk.call is not None:
                chunk.call.fail(reason)  # if it is not too late for that:
                if chunk.call.result is not None:
                    self._orphaned(chunk.call.result)
        self._asked.clear()
        self._todo.clear()


class _Committed:
    """Counts the answer to a commit or write of some pages."""

    def __init__(self, storer: Storer, job: StoreJob, pages: list[int]) -> None:
        self._storer = storer
        self._job = job
        self._pages = pages

    def __call__(self, call: Call[wire.Records]) -> None:
        r = self._storer._recorder
        if not call.ok or call.result is None:
            r.add("dropped_stores", len(self._pages))
            r.add("dropped_stores_" + call.reason, len(self._pages))
            return
        done = call.result
        stored = done["status"] == wire.Store.STORED
        exist = done["status"] == wire.Store.EXISTS
        r.add("stored_pages", int(stored.sum()))
        r.add("stores_existing", int(exist.sum()))
        r.sums("stored", done["sum"][stored])
        held = np.flatnonzero(stored | exist).tolist()
        self._storer._tell(self._job, (self._pages[i] for i in held))
        for reason in done["reason"][done["status"] == wire.Store.REFUSED].tolist():
            r.add("dropped_stores")
            r.add("dropped_stores_" + wire.reason_name(reason))
