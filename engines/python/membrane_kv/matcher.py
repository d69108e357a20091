"""Pages by their hashes: what loads and stores of such pages have in common.

Hashes travel as `bytes`, 32 for each page.
"""

from __future__ import annotations

import time

from . import wire
from .call import UNREACHABLE
from .record import Recorder
from .session import Session, Up
from .settings import Settings
from .wire import HASH_SIZE

BATCH = 128
"""Pages in one request at most. SGLang reads and writes as many at a time."""

INLINE = 8
"""Pages on their way at a time where there is no shared memory."""

_SERVER_SHARE = 0.9


class Matcher:
    """Asks one rank's sidecar for pages. Safe for use by several threads."""

    def __init__(
        self, session: Session, page_bytes: int, settings: Settings, recorder: Recorder
    ) -> None:
        self.session = session
        self.page_bytes = page_bytes
        self.settings = settings
        self.recorder = recorder

    def up(self) -> Up | None:
        """Return the connection, unless it owes an answer: nobody waits for it once more."""
        up = self.session.up
        if up is None or self.session.lagging:
            return None
        if up.registered.object_bytes != self.page_bytes:
            size = up.registered.object_bytes
            self.recorder.note(off=f"the sidecar's pages have {size} bytes, not {self.page_bytes}")
            return None
        return up

    def match(self, up: Up, hashes: bytes, deadline: float, flags: int = 0) -> wire.Leased | None:
        """Match pages; None, and counted, when there is no answer by the deadline.

        With MATCH_PRESENCE in `flags` nothing is leased and peers are not asked.
        The handle is the caller's to drop.
        """
        now = time.monotonic()
        server = 0.0 if flags else now + (deadline - now) * _SERVER_SHARE
        lease_ms = self.settings.lease_ms
        call = self.session.match_hashes(up.epoch, hashes, deadline, server, lease_ms, flags)
        if call.wait() and call.result is not None:
            return call.result
        self.miss(len(hashes) // HASH_SIZE, call.reason)
        return None

    def has(self, hashes: bytes) -> int:
        """Return how many leading pages this sidecar holds itself."""
        up = self.up()
        if up is None:
            return self.miss(len(hashes) // HASH_SIZE, UNREACHABLE)
        deadline = time.monotonic() + self.settings.match_deadline_ms / 1e3
        matched = self.match(up, hashes, deadline, wire.MATCH_PRESENCE)
        if matched is None:
            return 0
        self.session.drop(up.epoch, matched.handle)
        return matched.pages

    def reset(self) -> bool:
        """Drop every page of this engine's namespace in the sidecar; peers keep theirs."""
        if self.up() is None:
            return False
        deadline = time.monotonic() + self.settings.match_deadline_ms / 1e3
        return self.session.reset(deadline).wait()

    def miss(self, pages: int, reason: str) -> int:
        """Count pages that were asked for in vain. Return 0, what was found."""
        self.recorder.add("missed_pages", pages)
        self.recorder.add("missed_pages_" + reason, pages)
        return 0
