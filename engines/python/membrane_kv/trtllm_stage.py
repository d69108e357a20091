"""Host memory between the sidecar and the ranks of one TensorRT-LLM engine.

TensorRT-LLM cannot be told that a load has failed: what was promised must be
there. So the bytes are copied out of the sidecar's arena and the lease is
released before anything is promised; the ranks copy from here.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .shared import Bytes

_HEADER = 4096


@dataclass(frozen=True)
class Place:
    """Where the ranks find the memory: a descriptor of rank 0's process, and its shape."""

    pid: int
    fd: int
    slots: int
    ranks: int
    block_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the memory."""
        return _HEADER + self.slots * self.ranks * self.block_bytes


class Stage:
    """Slots of one block of every rank: shape [slots, ranks, bytes of a block].

    In front of them each rank has a counter: 0 until it has joined, then 1 and
    the number of the last load that it has copied. Each is written by its rank
    alone.
    """

    def __init__(self, place: Place, memory: mmap.mmap) -> None:
        self.place = place
        self._memory = memory
        whole = np.frombuffer(memory, np.uint8)
        counters = whole[: 8 * place.ranks].view(np.uint64)
        self._counters: npt.NDArray[np.uint64] = counters
        shape = (place.slots, place.ranks, place.block_bytes)
        self._slots: Bytes = whole[_HEADER:].reshape(shape)

    @classmethod
    def make(cls, size: int, ranks: int, block_bytes: int) -> Stage:
        """Make the memory, at most `size` bytes of slots and at least one. Raises OSError."""
        if not 1 <= ranks <= _HEADER // 8:
            raise OSError(f"cannot share memory with {ranks} ranks")
        slots = max(size // (ranks * block_bytes), 1)
        fd = os.memfd_create("membrane-stage", os.MFD_CLOEXEC)
        try:
            place = Place(os.getpid(), fd, slots, ranks, block_bytes)
            os.ftruncate(fd, place.size)
            return cls(place, mmap.mmap(fd, place.size))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def join(cls, place: Place) -> Stage:
        """Map the memory that rank 0 has made. Raises OSError, also on another machine."""
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != place.size or not os.readlink(
                f"/proc/self/fd/{fd}"
            ).startswith("/memfd:membrane-stage"):
                raise OSError(f"process {place.pid} is another machine's")
            return cls(place, mmap.mmap(fd, place.size))
        finally:
            os.close(fd)

    def slot(self, slot: int, rank: int) -> Bytes:
        """Return one block of one rank, shape [bytes of a block]."""
        block: Bytes = self._slots[slot, rank]
        return block

    def done(self, rank: int, load: int) -> None:
        """Say that `rank` has joined (load 0) or has copied all loads up to this one."""
        self._counters[rank] = load + 1

    def joined(self) -> bool:
        """Return whether every rank has mapped the memory and can load."""
        return bool(self._counters.all())

    def copied(self) -> int:
        """Return the number of the last load that every rank has copied."""
        return max(int(self._counters.min()) - 1, 0)

    def close(self) -> None:
        """Close rank 0's descriptor; the memory goes when the last rank has unmapped it."""
        if self.place.pid == os.getpid() and self.place.fd >= 0:
            os.close(self.place.fd)
            object.__setattr__(self.place, "fd", -1)
