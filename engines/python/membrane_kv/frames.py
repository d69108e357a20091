"""Cuts what a socket brings into frames."""

from __future__ import annotations

import socket

from . import wire


class Frames:
    """The part of a stream that has come and is not taken yet. Belongs to one thread."""

    def __init__(self) -> None:
        self._buf = bytearray(256 << 10)
        self._begin = 0
        self._end = 0

    def receive(self, sock: socket.socket) -> None:
        """Read once. Raises ConnectionError at the end of the stream."""
        if self._end == len(self._buf):
            if self._begin:
                left = self._buf[self._begin : self._end]
                self._buf[: len(left)] = left
                self._begin, self._end = 0, len(left)
            else:
                # Grows as bytes arrive, not because a length says so.
                self._buf.extend(bytes(len(self._buf)))
        n = sock.recv_into(memoryview(self._buf)[self._end :])
        if n == 0:
            raise ConnectionError("the sidecar closed the connection")
        self._end += n

    def frames(self) -> list[tuple[wire.Header, bytes]]:
        """Return the whole frames that have come, and forget them."""
        found = []
        view = memoryview(self._buf)
        try:
            while self._end - self._begin >= wire.HEADER_SIZE:
                header = wire.parse_header(view[self._begin : self._begin + wire.HEADER_SIZE])
                begin = self._begin + wire.HEADER_SIZE
                if self._end - begin < header.length:
                    break
                found.append((header, bytes(view[begin : begin + header.length])))
                self._begin = begin + header.length
        finally:
            view.release()
        if self._begin == self._end:
            self._begin = self._end = 0
        return found
