"""What a connector counts, and how long the engine stood in its hooks."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

log = logging.getLogger("membrane_kv")

_KEEP = 8192
_F = TypeVar("_F", bound=Callable[..., Any])


class Recorder:
    """Counters, checksums and hook times of one process's side of a connector.

    With a `path` they are written there as one JSON object, with the role and
    the process id behind the name, about once a second when they changed.
    Checksums are kept only then, the last of them. Safe for several threads.
    """

    def __init__(self, path: str, role: str) -> None:
        self._path = f"{path}.{role}.{os.getpid()}.json" if path else ""
        self._role = role
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._since: dict[str, int] = {}
        self._hooks: dict[str, list[float]] = {}
        self._sums: dict[str, collections.deque[str]] = {}
        self._facts: dict[str, object] = {}
        self._changed = False
        self._said: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if self._path:
            self._thread = threading.Thread(target=self._run, name="membrane-stats", daemon=True)
            self._thread.start()

    def add(self, name: str, n: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += n
            self._since[name] = self._since.get(name, 0) + n
            self._changed = True

    def take(self) -> dict[str, int]:
        """Return what was counted since it was last asked."""
        if not self._since:
            return {}
        with self._lock:
            since, self._since = self._since, {}
        return since

    def count(self, name: str) -> int:
        """Return a counter."""
        with self._lock:
            return self._counts[name]

    def note(self, **facts: object) -> None:
        """Keep facts for the file."""
        with self._lock:
            self._facts.update(facts)
            self._changed = True

    def sums(self, name: str, values: Any) -> None:
        """Keep the checksums of pages that were loaded or stored."""
        if not self._path:
            return
        with self._lock:
            kept = self._sums.setdefault(name, collections.deque(maxlen=_KEEP))
            kept.extend(f"{int(v):016x}" for v in values)
            self._changed = True

    def hook(self, name: str, seconds: float) -> None:
        """Count one run of a hook."""
        with self._lock:
            h = self._hooks.setdefault(name, [0, 0.0, 0.0])
            h[0] += 1
            h[1] += seconds
            h[2] = max(h[2], seconds)
            self._changed = True

    def warn(self, what: str) -> None:
        """Log the exception in flight, each `what` at most every ten seconds."""
        now = time.monotonic()
        with self._lock:
            quiet = now - self._said.get(what, -60.0) < 10.0
            if not quiet:
                self._said[what] = now
        if not quiet:
            log.exception("membrane: %s failed; the engine goes on without the cache here", what)

    def snapshot(self) -> dict[str, object]:
        """Return everything that the file holds. Hooks: runs, seconds in sum, longest."""
        with self._lock:
            return {
                "role": self._role,
                "pid": os.getpid(),
                **self._facts,
                "counts": dict(self._counts),
                "hooks": {
                    k: {"n": int(n), "sum_s": total, "max_s": longest}
                    for k, (n, total, longest) in self._hooks.items()
                },
                "sums": {k: list(v) for k, v in self._sums.items()},
            }

    def stop(self) -> None:
        """Write the last state."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stopping.wait(1.0)
            with self._lock:
                changed, self._changed = self._changed, False
            if changed or last:
                with contextlib.suppress(OSError):
                    self._write()

    def _write(self) -> None:
        temporary = self._path + ".tmp"
        with open(temporary, "w", encoding="utf-8") as f:
            json.dump(self.snapshot(), f)
        os.replace(temporary, self._path)


def hook(otherwise: Callable[..., Any]) -> Callable[[_F], _F]:
    """Make a method of a connector safe: time it, and let no exception out.

    After an exception it returns `otherwise(self, *args)`, what an empty cache
    would. The method's object has a Recorder as `recorder`.
    """

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def safe(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.recorder.add("hook_errors")
                self.recorder.warn(method.__name__)
                return otherwise(self, *args, **kwargs)
            finally:
                self.recorder.hook(method.__name__, time.perf_counter() - began)

        return cast(_F, safe)

    return wrap
