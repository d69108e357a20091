"""Blocks of KV in files, one file a block, read straight into and written straight from memory.

Nothing is evicted and nothing is checked but the length: this is what a
baseline needs, not what a cache needs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

# One system call takes no more pieces than this (IOV_MAX of Linux).
_PIECES = 1024


class BlockFiles:
    """The blocks of one rank in `folder`.

    A block is a list of writable byte buffers, one a layer; its file has them one
    after the other. `rank` keeps the ranks' files apart. Safe for several threads
    and processes: a file appears whole or not at all.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rank = rank

    def path(self, key: bytes, rank: int | None = None) -> str:
        """Return where a rank's block of that key lies, this rank's without `rank`."""
        return f"{self._folder}/{key.hex()}-{self._rank if rank is None else rank}"

    def has(self, key: bytes, ranks: int) -> bool:
        """Return whether every one of `ranks` ranks has stored the block."""
        return all(os.path.exists(self.path(key, rank)) for rank in range(ranks))

    def write(self, key: bytes, block: Sequence[memoryview]) -> None:
        """Store a block, if it is not there yet. Raises OSError."""
        path = self.path(key)
        if os.path.exists(path):
            return
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for first in range(0, len(block), _PIECES):
                pieces = block[first : first + _PIECES]
                if os.writev(fd, pieces) != sum(p.nbytes for p in pieces):
                    raise OSError(f"cannot write all of {path!r}")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        os.rename(temporary, path)

    def read(self, key: bytes, block: Sequence[memoryview]) -> None:
        """Read a block to where it belongs. Raises OSError, also for a file of another length."""
        path = self.path(key)
        fd = os.open(path, os.O_RDONLY)
        try:
            want = sum(p.nbytes for p in block)
            if os.fstat(fd).st_size != want:
                raise OSError(f"{path!r} does not have {want} bytes")
            for first in range(0, len(block), _PIECES):
                pieces = block[first : first + _PIECES]
                if os.readv(fd, pieces) != sum(p.nbytes for p in pieces):
                    raise OSError(f"cannot read all of {path!r}")
        finally:
            os.close(fd)
