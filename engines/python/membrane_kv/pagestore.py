"""Stores pages that are named by their hashes: through the inbox, else inline.

The engine's own process copies its pages into the inbox, and nothing reads the
engine's memory after `store` has returned. It waits until the store deadline at
most; pages that are not acknowledged by then are not stored.
"""

from __future__ import annotations

import collections
import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import wire
from .call import DEADLINE, UNREACHABLE, Call
from .hostpool import Index, Pages
from .matcher import INLINE, Matcher
from .session import Up
from .shared import Unmapped
from .wire import HASH_SIZE

Mask = npt.NDArray[np.bool_]
Which = npt.NDArray[np.intp]


class PageStorer:
    """One rank's stores."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()

    def store(self, hashes: bytes, pages: Pages, index: Index) -> list[bool]:
        """Hand over the pages at `index` of `pages`; say of each whether the sidecar has it."""
        n = len(hashes) // HASH_SIZE
        if pages.page_bytes != self._matcher.page_bytes or len(index) != n:
            raise ValueError(
                f"{len(index)} pages of {pages.page_bytes} bytes for {n} of"
                f" {self._matcher.page_bytes}"
            )
        deadline = time.monotonic() + self._matcher.settings.store_deadline_ms / 1e3
        here = np.zeros(n, np.bool_)
        # One at a time: they share the inbox.
        if self._lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            try:
                self._store(hashes, pages, index, here, deadline)
            finally:
                self._lock.release()
        else:
            self._drop(n, DEADLINE)
        return [bool(h) for h in here]

    def _store(
        self, hashes: bytes, pages: Pages, index: Index, here: Mask, deadline: float
    ) -> None:
        up = self._matcher.up()
        if up is None:
            self._drop(len(here), UNREACHABLE)
            return
        matched = self._matcher.match(up, hashes, deadline, wire.MATCH_PRESENCE)
        if matched is None:
            self._drop(len(here), DEADLINE)
            return
        here[: matched.pages] = True
        self._matcher.recorder.add("stores_existing", matched.pages)
        todo = np.arange(matched.pages, len(here))
        way = _Way(self._matcher, up, matched.handle, pages, index, here, deadline)
        try:
            if up.shared is None or not up.registered.inbox_slots:
                way.inline(todo)
            else:
                way.inbox(todo)
        except Unmapped:
            pass  # its calls have ended as unreachable
        finally:
            # On the wire it follows the commits, and frees slots that nobody will write.
            self._matcher.session.drop(up.epoch, matched.handle)
            way.end()

    def _drop(self, pages: int, reason: str) -> None:
        drop(self._matcher, pages, reason)


def drop(matcher: Matcher, pages: int, reason: str) -> None:
    """Count pages that were not stored."""
    matcher.recorder.add("dropped_stores", pages)
    matcher.recorder.add("dropped_stores_" + reason, pages)


@dataclass
class _Chunk:
    which: Which
    call: Call[wire.Records]


class _Way:
    """Some pages on their way into the sidecar. `here` is set for those that it has."""

    def __init__(
        self,
        matcher: Matcher,
        up: Up,
        handle: int,
        pages: Pages,
        index: Index,
        here: Mask,
        deadline: float,
    ) -> None:
        self._matcher = matcher
        self._session = matcher.session
        self._up = up
        self._handle = handle
        self._pages = pages
        self._index = index
        self._here = here
        self._deadline = deadline
        self._reserved: collections.deque[_Chunk] = collections.deque()
        self._committed: collections.deque[_Chunk] = collections.deque()

    def inbox(self, todo: Which) -> None:
        """Copy pages into the inbox and commit them, one half of it after the other."""
        half = max(self._up.registered.inbox_slots // 2, 1)
        ahead = 2 if self._up.registered.inbox_slots > 1 else 1
        parts = collections.deque(todo[i : i + half] for i in range(0, len(todo), half))
        while parts or self._reserved:
            if time.monotonic() >= self._deadline:
                drop(self._matcher, sum(map(len, parts)), DEADLINE)
                parts.clear()
            while parts and len(self._reserved) < ahead:
                which = parts.popleft()
                call = self._session.reserve(self._up.epoch, self._handle, which, self._deadline)
                self._reserved.append(_Chunk(which, call))
            chunk = self._reserved.popleft()
            granted = self._answer(chunk)
            if granted is None:
                continue
            self._note(chunk.which, granted)
            slot = granted["status"] == wire.Store.SLOT
            which, slots = chunk.which[slot], granted["slot"][slot]
            if len(which):
                self._copy(which, slots)
                commit = self._session.commit(
                    self._up.epoch, self._handle, which, slots, self._deadline
                )
                self._committed.append(_Chunk(which, commit))

    def _copy(self, which: Which, slots: npt.NDArray[np.uint32]) -> None:
        assert self._up.shared is not None
        offsets = slots.astype(np.int64) * self._up.registered.slot_bytes
        with self._up.shared.use() as shared:
            self._pages.take(self._index[which], shared.inbox, offsets)

    def inline(self, todo: Which) -> None:
        """Send pages inline."""
        page, zero = np.empty(self._pages.page_bytes, np.uint8), np.zeros(1, np.int64)
        for n, i in enumerate(todo.tolist()):
            if len(self._committed) >= INLINE:
                self._finish(self._committed.popleft())
            if time.monotonic() >= self._deadline:
                drop(self._matcher, len(todo) - n, DEADLINE)
                return
            self._pages.take(self._index[i : i + 1], page, zero)
            call = self._session.write(
                self._up.epoch, self._handle, i, page.tobytes(), self._deadline
            )
            self._committed.append(_Chunk(np.array([i]), call))

    def end(self) -> None:
        """Wait for what is under way."""
        while self._reserved:
            drop(self._matcher, len(self._reserved.popleft().which), UNREACHABLE)
        while self._committed:
            self._finish(self._committed.popleft())

    def _finish(self, chunk: _Chunk) -> None:
        done = self._answer(chunk)
        if done is None:
            return
        self._note(chunk.which, done)
        stored = done["status"] == wire.Store.STORED
        self._here[chunk.which[stored]] = True
        recorder = self._matcher.recorder
        recorder.add("stored_pages", int(stored.sum()))
        recorder.add("stored_bytes", int(stored.sum()) * self._pages.page_bytes)
        recorder.sums("stored", done["sum"][stored])

    def _answer(self, chunk: _Chunk) -> wire.Records | None:
        if not chunk.call.wait() or chunk.call.result is None:
            drop(self._matcher, len(chunk.which), chunk.call.reason)
            return None
        if len(chunk.call.result) != len(chunk.which):
            raise ValueError(f"{len(chunk.call.result)} answers for {len(chunk.which)} pages")
        return chunk.call.result

    def _note(self, which: Which, answers: wire.Records) -> None:
        """Take those that are there already, and those that were refused, out of the answers."""
        exists = answers["status"] == wire.Store.EXISTS
        self._here[which[exists]] = True
        self._matcher.recorder.add("stores_existing", int(exists.sum()))
        for reason in answers["reason"][answers["status"] == wire.Store.REFUSED].tolist():
            drop(self._matcher, 1, wire.reason_name(reason))
