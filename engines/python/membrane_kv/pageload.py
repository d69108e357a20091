"""Finds and loads pages that are named by their hashes.

`find` leases what is there, so that what it promises stays; `load` copies it
into the engine's memory and releases the lease, whose answer says whether the
copy is good. No method waits longer than its deadline, and none raises for
anything that the sidecar does.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from . import wire
from .call import UNREACHABLE
from .hostpool import Index, Pages
from .matcher import BATCH, INLINE, Matcher
from .session import Up
from .shared import Unmapped
from .wire import HASH_SIZE

_MARGIN_S = 0.05
_MOST_KEPT = 1024


@dataclass
class _Lease:
    """Leased pages: the hashes that were asked for, of which the first are held.

    `locations` has shape [pages, shards]; `until` is when the lease ends at the
    earliest, on time.monotonic().
    """

    epoch: int
    id: int
    hashes: bytes
    locations: wire.Records
    until: float

    @property
    def pages(self) -> int:
        return len(self.locations)


class PageLoader:
    """One rank's loads. `shard` is its place among the shards of a page."""

    def __init__(self, matcher: Matcher, shard: int) -> None:
        self._matcher = matcher
        self._session = matcher.session
        self._settings = matcher.settings
        self._recorder = matcher.recorder
        self._shard = shard
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Lease] = {}

    def find(self, hashes: bytes) -> int:
        """Return how many leading pages are leased now, peers' pages fetched.

        They stay so for `lease_ms`, to be loaded.
        """
        up = self._matcher.up()
        if up is None:
            return self._matcher.miss(len(hashes) // HASH_SIZE, UNREACHABLE)
        deadline = time.monotonic() + self._settings.match_deadline_ms / 1e3
        found = 0
        for begin in range(0, len(hashes), BATCH * HASH_SIZE):
            part = hashes[begin : begin + BATCH * HASH_SIZE]
            lease = self._lease(up, part, deadline)
            if lease is None:
                break
            self._keep(lease)
            found += lease.pages
            if lease.pages * HASH_SIZE < len(part):
                break
        return found

    def load(self, hashes: bytes, pages: Pages, index: Index) -> list[bool]:
        """Copy pages to `index` of `pages`; say of each whether it is there, and good.

        Ends at the first that is not. The deadline does not count the copying.
        """
        n, done = len(hashes) // HASH_SIZE, 0
        if pages.page_bytes != self._matcher.page_bytes or len(index) != n:
            raise ValueError(
                f"{len(index)} pages of {pages.page_bytes} bytes for {n} of"
                f" {self._matcher.page_bytes}"
            )
        deadline = time.monotonic() + self._settings.load_deadline_ms / 1e3
        while done < n:
            part = hashes[done * HASH_SIZE : (done + BATCH) * HASH_SIZE]
            lease = self._take(part) or self._lease_now(part, deadline)
            if lease is None:
                break
            began = time.monotonic()
            m = min(lease.pages, len(part) // HASH_SIZE)
            copied, reason = self._load(lease, pages, index[done : done + m], deadline)
            if reason:
                self._recorder.add("failed_loads")
                self._recorder.add("failed_loads_" + reason)
                break
            done += m
            deadline += copied
            self._count(lease.locations[:m, self._shard], time.monotonic() - began)
        return [True] * done + [False] * (n - done)

    def forget(self) -> None:
        """Give back what was found and not loaded."""
        with self._lock:
            kept, self._kept = self._kept, {}
        for lease in kept.values():
            self._session.give_back(lease.epoch, lease.id)

    def _lease_now(self, hashes: bytes, deadline: float) -> _Lease | None:
        up = self._matcher.up()
        if up is None:
            self._matcher.miss(len(hashes) // HASH_SIZE, UNREACHABLE)
            return None
        return self._lease(up, hashes, deadline)

    def _lease(self, up: Up, hashes: bytes, deadline: float) -> _Lease | None:
        """Lease the longest prefix there is; None when that is nothing."""
        asked = time.monotonic()
        matched = self._matcher.match(up, hashes, deadline)
        if matched is None:
            return None
        self._session.drop(up.epoch, matched.handle)
        at = matched.locations
        if missing := len(hashes) // HASH_SIZE - len(at):
            self._matcher.miss(missing, wire.reason_name(matched.reason))
        if not matched.lease:
            return None
        size = self._matcher.page_bytes
        if at.shape[1] <= self._shard or not (at[:, self._shard]["length"] == size).all():
            self._session.give_back(up.epoch, matched.lease)
            raise ValueError(f"leased objects of other sizes than {size} bytes")
        self._recorder.add("matched_pages", len(at))
        self._recorder.add("peer_pages", matched.from_peers)
        until = asked + matched.lease_ms / 1e3 - _MARGIN_S
        return _Lease(up.epoch, matched.lease, hashes, at, until)

    def _keep(self, lease: _Lease) -> None:
        now, first = time.monotonic(), lease.hashes[:HASH_SIZE]
        with self._lock:
            gone = [self._kept.pop(first, None)]
            self._kept[first] = lease
            while len(self._kept) > _MOST_KEPT:
                gone.append(self._kept.pop(next(iter(self._kept))))
            for ended in [k for k, v in self._kept.items() if v.until < now]:
                del self._kept[ended]
        for old in gone:
            if old is not None:
                self._session.give_back(old.epoch, old.id)

    def _take(self, hashes: bytes) -> _Lease | None:
        """Return the lease that `find` has kept of these pages, or of the first of them."""
        with self._lock:
            lease = self._kept.pop(hashes[:HASH_SIZE], None)
        if lease is None:
            return None
        up = self._session.up
        n = min(lease.pages * HASH_SIZE, len(hashes))
        good = lease.until > time.monotonic() and lease.hashes[:n] == hashes[:n]
        if up is not None and up.epoch == lease.epoch and good:
            return lease
        self._session.give_back(lease.epoch, lease.id)
        return None

    def _load(
        self, lease: _Lease, pages: Pages, index: Index, deadline: float
    ) -> tuple[float, str]:
        """Copy the first pages of a lease, as many as `index` has, and release it.

        Return how long copying took, in seconds, and "" or why they must not be used.
        """
        up = self._session.up
        if up is None or up.epoch != lease.epoch:
            return 0.0, UNREACHABLE
        reason, copied = "internal", 0.0
        began = time.monotonic()
        try:
            if up.shared is None:
                reason = self._read_inline(lease, pages, index, deadline)
            else:
                offsets = lease.locations[: len(index), self._shard]["offset"].astype(np.int64)
                with up.shared.use() as shared:
                    pages.fill(index, shared.arena, offsets)
                reason, copied = "", time.monotonic() - began
        except Unmapped:
            reason = UNREACHABLE
        finally:
            if reason:
                self._session.give_back(lease.epoch, lease.id)
        if reason:
            return 0.0, reason
        verify = self._settings.verify == "all"
        call = self._session.release(lease.id, deadline + copied, verify, lease.epoch)
        if not call.wait() or call.result is None:
            return copied, call.reason
        live = call.result == wire.Outcome.LIVE
        return copied, "" if live else call.result.name.lower()

    def _read_inline(self, lease: _Lease, pages: Pages, index: Index, deadline: float) -> str:
        zero = np.zeros(1, np.int64)
        for begin in range(0, len(index), INLINE):
            which = range(begin, min(begin + INLINE, len(index)))
            calls = [self._session.read(lease.epoch, lease.id, i, deadline) for i in which]
            for i, call in zip(which, calls, strict=True):
                if not call.wait() or call.result is None:
                    return call.reason
                if call.result.reason:
                    return wire.reason_name(call.result.reason)
                data = np.frombuffer(call.result.object, np.uint8)
                if len(data) != pages.page_bytes:
                    raise ValueError(f"a page of {len(data)} bytes, not {pages.page_bytes}")
                pages.fill(index[i : i + 1], data, zero)
        return ""

    def _count(self, at: wire.Records, seconds: float) -> None:
        self._recorder.add("loads")
        self._recorder.add("loaded_pages", len(at))
        self._recorder.add("loaded_bytes", int(at["length"].sum()))
        self._recorder.add("load_us", int(seconds * 1e6))
        self._recorder.sums("loaded", at["sum"])
