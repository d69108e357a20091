"""Pages and speed of each call, for an engine that collects them now and then."""

from __future__ import annotations

import threading
import time


class CallMetrics:
    """Keeps the figures of calls since they were taken last; nothing when it is off."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[list[int], list[float]]] = {}
        self.take()

    def add(self, kind: str, pages: int, page_bytes: int, began: float) -> None:
        """Count a call that moved pages and began at `began`, on time.perf_counter()."""
        if not self._on or not pages:
            return
        speed = pages * page_bytes / 1e9 / max(time.perf_counter() - began, 1e-9)
        with self._lock:
            self._kept[kind][0].append(pages)
            self._kept[kind][1].append(speed)

    def take(self) -> dict[str, tuple[list[int], list[float]]] | None:
        """Return pages and GB/s of each call, "prefetch" and "backup"; None when it is off."""
        if not self._on:
            return None
        with self._lock:
            kept, self._kept = self._kept, {"prefetch": ([], []), "backup": ([], [])}
        return kept
