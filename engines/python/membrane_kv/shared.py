"""The sidecar's shared memory as this process sees it, and its safe unmapping."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .pinned import Driver, PinError

log = logging.getLogger("membrane_kv")

Bytes = npt.NDArray[np.uint8]

_POPULATE_STEP = 32 << 20
_MADV_POPULATE_READ = 22


class Unmapped(Exception):
    """The connection was lost, its memory must not be used any more."""


class Shared:
    """The arena (read only) and the inbox (writable) of one connection.

    Copies run inside `use()`. `close()` unmaps at once when no copy runs, else
    the last copy to end does; from then on `use()` raises Unmapped.
    """

    def __init__(self, arena: mmap.mmap, inbox: mmap.mmap | None, slot_bytes: int) -> None:
        self._maps = [arena] if inbox is None else [arena, inbox]
        self._arena: Bytes | None = np.frombuffer(arena, np.uint8)
        self._inbox: Bytes | None = None if inbox is None else np.frombuffer(inbox, np.uint8)
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        self._pinned: list[tuple[Driver, int]] = []

    @classmethod
    def map(cls, fds: list[int], arena_bytes: int, inbox_bytes: int, slot_bytes: int) -> Shared:
        """Map the descriptors that came with a register; they stay the caller's.

        Raises OSError or ValueError when a file is smaller than said.
        """
        if len(fds) != (2 if inbox_bytes else 1):
            raise ValueError(f"cannot map shared memory: {len(fds)} file descriptors came")
        arena = mmap.mmap(fds[0], arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        inbox = None
        try:
            if inbox_bytes:
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                inbox = mmap.mmap(fds[1], inbox_bytes, mmap.MAP_SHARED, prot)
        except BaseException:
            arena.close()
            raise
        return cls(arena, inbox, slot_bytes)

    @property
    def closed(self) -> bool:
        """True once the connection is lost."""
        return self._closing

    @contextlib.contextmanager
    def use(self) -> Iterator[Shared]:
        """Keep the memory mapped while the body runs. Views must not outlive it."""
        with self._lock:
            if self._closing:
                raise Unmapped("the sidecar's memory is gone")
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
                last = self._closing and self._users == 0
            if last:
                self._unmap()

    @property
    def arena(self) -> Bytes:
        """All of the arena. Only inside `use()`."""
        assert self._arena is not None
        return self._arena

    @property
    def inbox(self) -> Bytes:
        """All of the inbox, slot after slot. Only inside `use()`."""
        if self._inbox is None:
            raise ValueError("this connection has no inbox")
        return self._inbox

    def object(self, offset: int, length: int) -> Bytes:
        """Return the bytes [offset, offset + length) of the arena. Only inside `use()`."""
        assert self._arena is not None
        if offset + length > len(self._arena):
            raise ValueError(f"{length} bytes at {offset} lie outside of {len(self._arena)}")
        return self._arena[offset : offset + length]

    def slot(self, slot: int, length: int) -> Bytes:
        """Return the first `length` bytes of an inbox slot. Only inside `use()`."""
        if self._inbox is None:
            raise ValueError("this connection has no inbox")
        begin = slot * self._slot_bytes
        if length > self._slot_bytes or begin + length > len(self._inbox):
            raise ValueError(f"slot {slot} does not hold {length} bytes")
        return self._inbox[begin : begin + length]

    def close(self) -> None:
        """Forbid further use and unmap as soon as no copy runs. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            idle = self._users == 0
        if idle:
            self._unmap()

    def _unmap(self) -> None:
        self._arena = self._inbox = None
        self.unpin()
        for m in self._maps:
            # A view that a traceback still holds keeps the mapping until it goes.
            with contextlib.suppress(BufferError):
                m.close()
        self._maps = []

    def prepare(self, driver: Driver | None) -> None:
        """Populate the arena, then pin all if there is a driver, and say in the log how it went.

        Runs in a thread of its own; ends early when the memory is unmapped.
        """
        self.populate()
        if driver is None:
            return
        began = time.monotonic()
        try:
            pinned = self.pin(driver)
        except Unmapped:
            pass
        except PinError as e:
            log.warning(
                "membrane: the device does not pin the sidecar's memory (%s); copies are slower", e
            )
        else:
            took = time.monotonic() - began
            log.info("membrane: pinned %d MiB for the device in %.1f s", pinned >> 20, took)

    def populate(self) -> None:
        """Fault the arena's pages in, bit by bit, so that no load pays for it.

        Ends early when the memory is unmapped.
        """
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        at = 0
        with contextlib.suppress(Unmapped):
            while True:
                with self.use():
                    assert self._arena is not None
                    size = len(self._arena)
                    if at >= size:
                        return
                    # ctypes lets go of the interpreter lock, mmap.madvise does not.
                    address = self._arena.ctypes.data + at
                    if madvise(address, min(_POPULATE_STEP, size - at), _MADV_POPULATE_READ):
                        return
                at += _POPULATE_STEP

    def pin(self, driver: Driver) -> int:
        """Register arena and inbox with a device, as far as it takes them. Return their bytes.

        Takes seconds for many gigabytes; `close` lets the memory go. Raises
        PinError, and Unmapped.
        """
        pinned = 0
        with self.use():
            for memory, read_only in ((self._arena, True), (self._inbox, False)):
                if memory is not None:
                    driver.pin(memory.ctypes.data, memory.nbytes, read_only)
                    self._pinned.append((driver, memory.ctypes.data))
                    pinned += memory.nbytes
        return pinned

    def unpin(self) -> None:
        """Take back `pin`. No copy to or from a device may run."""
        for driver, address in self._pinned:
            with contextlib.suppress(PinError):
                driver.unpin(address)
        self._pinned = []
