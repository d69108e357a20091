"""One request's fate: an answer, an error's name, or neither by its deadline.

Whoever asked looks at the call; whoever reads the socket ends it. It knows of no
socket and starts no thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

log = logging.getLogger("membrane_kv")

UNREACHABLE: Final = "unreachable"
DEADLINE: Final = "deadline"

_T = TypeVar("_T")


class Call(Generic[_T]):
    """A request on its way. `result` once answered, else `reason` says why not.

    `reason` is "" on success, "deadline", "unreachable", or the name of an
    error code. `deadline` is absolute, on time.monotonic().
    """

    def __init__(
        self,
        deadline: float,
        then: Callable[[Call[_T]], None] | None = None,
        late: Callable[[_T], None] | None = None,
    ) -> None:
        self.deadline = deadline
        self.result: _T | None = None
        self.reason = ""
        self._then = then
        self._late = late
        self._lock = threading.Lock()
        self._event = threading.Event()

    @property
    def ok(self) -> bool:
        """True when the answer is in `result`."""
        return self._event.is_set() and not self.reason

    def done(self) -> bool:
        """Return whether the call has ended; the deadline ends it."""
        if self._event.is_set():
            return True
        if time.monotonic() >= self.deadline:
            self._end(None, DEADLINE)
            return True
        return False

    def wait(self) -> bool:
        """Wait for the answer until the deadline; return whether there is one."""
        self._event.wait(max(self.deadline - time.monotonic(), 0))
        self.done()
        return self.ok

    def wait_until(self, when: float) -> bool:
        """Wait as `wait` does, and no longer than `when`; end the call then."""
        self._event.wait(max(min(self.deadline, when) - time.monotonic(), 0))
        if not self.done():
            self._end(None, DEADLINE)
        return self.ok

    def pause(self, seconds: float) -> None:
        """Wait for the answer, at most this long; the call goes on."""
        self._event.wait(seconds)

    def fail(self, reason: str) -> None:
        """End the call without an answer."""
        self._end(None, reason)

    def answer(self, result: _T) -> None:
        """End the call with an answer, or hand a late one to whom it concerns."""
        if time.monotonic() >= self.deadline:
            self._end(None, DEADLINE)
        if not self._end(result, "") and self._late is not None:
            try:
                self._late(result)
            except Exception:
                log.exception("membrane: cannot handle a late answer")

    def _end(self, result: _T | None, reason: str) -> bool:
        with self._lock:
            if self._event.is_set():
                return False
            self.result, self.reason = result, reason
            self._event.set()
        if self._then is not None:
            try:
                self._then(self)
            except Exception:
                log.exception("membrane: cannot handle an answer")
        return True
