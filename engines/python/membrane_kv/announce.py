"""Which stored pages a scheduler may tell the world of, and which not any more."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .jobs import StoreJob

_MAX_PENDING = 65_536
_MAX_ANNOUNCED = 65_536

Held = Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class Stored:
    """A page that the sidecar holds for every rank: its blocks' hashes and its tokens.

    `parent` is the hash of the block before the first, or None. `about` is what
    was given to `expect`.
    """

    hashes: tuple[Any, ...]
    parent: Any | None
    tokens: tuple[int, ...]
    about: Any


class Announcer:
    """Pairs what the workers report with what was handed to them. For one thread.

    A page is announced when each of `ranks` ranks has stored it. What the
    sidecar evicts it tells nobody, so an announcement is a hint; what is
    known to be gone is taken back: all of it with the connection or a reset,
    and the oldest when there are more than 65,536 blocks.
    """

    def __init__(self, ranks: int, hash_tokens: int, block_tokens: int) -> None:
        self._ranks = ranks
        self.hash_tokens = hash_tokens
        self._block = block_tokens
        self._pending: collections.OrderedDict[tuple[str, int], tuple[Stored, int]]
        self._pending = collections.OrderedDict()
        self._announced: collections.OrderedDict[Any, None] = collections.OrderedDict()
        self._out: list[Stored | tuple[Any, ...]] = []
        self._epoch = 0

    def expect(self, job: StoreJob, hashes: Any, tokens: Any, about: Any) -> None:
        """Note the pages of a job. `hashes` and `tokens` are those of the whole request."""
        size = self._block * job.blocks
        n = self.hash_tokens
        for i in range(len(job.block_ids) // job.blocks):
            begin, end = (job.page + i) * size, (job.page + i + 1) * size
            if size % n or end // n > len(hashes):
                return
            found = Stored(
                tuple(hashes[begin // n : end // n]),
                hashes[begin // n - 1] if begin else None,
                tuple(tokens[begin:end]),
                about,
            )
            self._pending[job.request, job.page + i] = (found, self._ranks)
        while len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def held(self, pages: Held) -> None:
        """Take what the workers report: how many ranks have stored which page of a request."""
        for key, ranks in pages.items():
            if key not in self._pending:
                continue
            found, left = self._pending.pop(key)
            if left > ranks:
                self._pending[key] = (found, left - ranks)
                continue
            self._out.append(found)
            for h in found.hashes:
                self._announced[h] = None
                self._announced.move_to_end(h)
        extra = len(self._announced) - _MAX_ANNOUNCED
        if extra > 0:
            oldest = [self._announced.popitem(last=False)[0] for _ in range(extra)]
            self._out.append(tuple(oldest))

    def connection(self, epoch: int) -> None:
        """Take back everything when this is another connection: the sidecar may be a new one."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.forget()

    def forget(self) -> None:
        """Take back everything, and what is on its way."""
        self._pending.clear()
        self._out = [o for o in self._out if not isinstance(o, Stored)]
        if self._announced:
            self._out.append(tuple(self._announced))
            self._announced.clear()

    def take(self) -> Iterable[Stored | tuple[Any, ...]]:
        """Return what to announce: pages that are held, or hashes of blocks taken back."""
        out, self._out = self._out, []
        return out
