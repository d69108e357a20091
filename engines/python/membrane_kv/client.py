"""One connection to a sidecar, call by call.

`Client` is the plain, blocking form: every call takes an absolute deadline on
time.monotonic() and ends at it. What an engine's hooks use is `Session`, which
keeps a connection up in the background.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt

from . import wire
from .shared import Shared
from .wire import ANSWER, Type

DEFAULT_ENDPOINTS = ("/run/membrane/engine.sock", "localhost:7600")

_T = TypeVar("_T")


class Lost(OSError):
    """The connection is spent: nobody knows where the next frame begins."""


@dataclass(frozen=True)
class Hello:
    """What a sidecar said of itself; `socket` is its engine socket's path or ""."""

    node: str
    server: str
    socket: str


def endpoints(setting: str | None = None) -> tuple[str, ...]:
    """Return where to look for the sidecar: the setting, MEMBRANE_SIDECAR, or the defaults.

    An endpoint is a path (it has a slash in it) or HOST:PORT.
    """
    chosen = setting or os.environ.get("MEMBRANE_SIDECAR")
    return (chosen,) if chosen else DEFAULT_ENDPOINTS


class Client:
    """A connection. Not safe for use by several threads at a time.

    After `Lost` it is spent, and the caller connects again. A `wire.WireError`
    that is not `fatal` leaves it as it was.
    """

    def __init__(self, sock: socket.socket, endpoint: str) -> None:
        self.sock = sock
        self.endpoint = endpoint
        self.hello = Hello("", "", "")
        self.registered: wire.Registered | None = None
        self.shared: Shared | None = None
        self._id = 0

    @classmethod
    def connect(
        cls,
        endpoint: str,
        deadline: float,
        key: str = "",
        name: str = "",
        inline: bool = False,
    ) -> Client:
        """Connect and say hello; from HOST:PORT move to the engine socket if it opens.

        Raises OSError (also `Lost`) or WireError.
        """
        client = cls._dial(endpoint, deadline, key, name)
        path = client.hello.socket
        # A relative path is one in the sidecar's working directory.
        if "/" in endpoint or inline or not path.startswith("/"):
            return client
        try:
            moved = cls._dial(path, deadline, key, name)
        except (OSError, ValueError, wire.WireError):
            return client  # not in this mount namespace, or not ours to open
        client.close()
        return moved

    @classmethod
    def _dial(cls, endpoint: str, deadline: float, key: str, name: str) -> Client:
        wait = max(deadline - time.monotonic(), 0.001)
        if "/" in endpoint:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(wait)
                sock.connect(endpoint)
            except BaseException:
                sock.close()
                raise
        else:
            host, _, port = endpoint.rpartition(":")
            sock = socket.create_connection((host.strip("[]"), int(port)), wait)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = cls(sock, endpoint)
        try:
            said: dict[str, Any] = {"client": name}
            if key:
                said["key"] = key
            v = wire.parse_json(client.call(Type.HELLO, wire.pack_json(said), deadline))
        except BaseException:
            client.close()
            raise
        client.hello = Hello(
            str(v.get("node", "")), str(v.get("server", "")), str(v.get("socket", ""))
        )
        return client

    def close(self) -> None:
        """End the connection, and with it this client's leases and reservations; unmap."""
        self.sock.close()
        if self.shared is not None:
            self.shared.close()

    def next_id(self) -> int:
        """Return the id of the next request."""
        self._id = (self._id + 1) & 0xFFFFFFFF
        return self._id

    def call(self, kind: Type, body: bytes, deadline: float) -> bytes:
        """Exchange one frame and return the answer's body."""
        answer, fds = self._exchange(kind, body, deadline, files=False)
        assert not fds
        return answer

    def _parsed(self, kind: Type, body: bytes, deadline: float, parse: Callable[[bytes], _T]) -> _T:
        try:
            return parse(self.call(kind, body, deadline))
        except wire.WireError as e:
            if e.fatal:
                self.sock.close()
            raise

    def _exchange(
        self, kind: Type, body: bytes, deadline: float, files: bool
    ) -> tuple[bytes, list[int]]:
        frame_id = self.next_id()
        frame = wire.frame(kind, frame_id, body)
        fds: list[int] = []
        try:
            self._send(frame, deadline)
            if files:
                self._arm(deadline)
                flags = socket.MSG_CMSG_CLOEXEC
                head, fds, _, _ = socket.recv_fds(self.sock, wire.HEADER_SIZE, 2, flags)
                if not head:
                    raise Lost("the sidecar closed the connection")
                head += self._receive(wire.HEADER_SIZE - len(head), deadline)
            else:
                head = self._receive(wire.HEADER_SIZE, deadline)
            header = wire.parse_header(head)
            answer = self._receive(header.length, deadline)
            if header.type == Type.ERROR | ANSWER:
                raise wire.parse_error(answer)
            want = Type.PAGE if kind == Type.READ else kind | ANSWER
            if header.type != want or header.id != frame_id:
                raise Lost(f"frame {header.type:#04x} with id {header.id} does not answer {kind!r}")
        except BaseException as e:
            _close_all(fds)
            if not isinstance(e, wire.WireError) or e.fatal:
                self.sock.close()
            if isinstance(e, OSError) and not isinstance(e, Lost):
                raise Lost(f"cannot exchange {kind.name.lower()} with the sidecar: {e}") from e
            raise
        return answer, fds

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self.sock.settimeout(left)

    def _send(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        while view:
            self._arm(deadline)
            view = view[self.sock.send(view) :]

    def _receive(self, n: int, deadline: float) -> bytes:
        # A length alone makes us allocate no more than this.
        buf = bytearray(min(n, 1 << 20))
        got = 0
        while got < n:
            if got == len(buf):
                buf.extend(bytes(min(n - got, 1 << 20)))
            self._arm(deadline)
            k = self.sock.recv_into(memoryview(buf)[got:])
            if k == 0:
                raise Lost("the sidecar closed the connection")
            got += k
        return bytes(buf)

    def register(self, registration: wire.Register, deadline: float) -> wire.Registered:
        """Say what engine this is. Maps the shared memory when descriptors come."""
        files = self.sock.family == socket.AF_UNIX and not registration.inline
        body, fds = self._exchange(Type.REGISTER, registration.pack(), deadline, files)
        try:
            r = wire.parse_registered(body)
            if r.shared_memory:
                self.shared = Shared.map(fds, r.arena_bytes, r.inbox_bytes, r.slot_bytes)
        except (ValueError, OSError) as e:
            self.close()
            raise Lost(f"cannot map the sidecar's memory: {e}") from e
        except wire.WireError:
            self.close()
            raise
        finally:
            _close_all(fds)
        self.registered = r
        return r

    def ping(self, deadline: float) -> None:
        """Ask for an empty answer."""
        self.call(Type.PING, b"", deadline)

    def match(
        self,
        ids: bytes,
        deadline: float,
        held: int = 0,
        lease_ms: int = 0,
        extra_key: str | None = None,
        salt: str | None = None,
        flags: int = 0,
    ) -> wire.Leased:
        """Ask for the longest prefix of `ids` (tokens in wire form) that can be had in time."""
        body = wire.pack_match(held, left_us(deadline), lease_ms, ids, extra_key, salt, flags)
        return self._parsed(Type.MATCH, body, deadline, wire.parse_leased)

    def extend(self, handle: int, ids: bytes, deadline: float) -> int:
        """Add tokens to a chain; return its full pages."""
        return self._parsed(Type.EXTEND, wire.pack_extend(handle, ids), deadline, wire.parse_u32)

    def lease(
        self,
        handle: int,
        first: int,
        pages: int,
        deadline: float,
        lease_ms: int = 0,
        flags: int = 0,
    ) -> wire.Leased:
        """Lease at most `pages` pages of a known chain, from page `first` on."""
        body = wire.pack_lease(handle, first, pages, left_us(deadline), lease_ms, flags)
        return self._parsed(Type.LEASE, body, deadline, wire.parse_leased)

    def release(self, lease: int, deadline: float, verify: bool = False) -> wire.Outcome:
        """Give a lease back and learn whether it held until now."""
        body = wire.pack_release(lease, verify)
        return self._parsed(Type.RELEASE, body, deadline, wire.parse_outcome)

    def reserve(self, handle: int, pages: npt.ArrayLike, deadline: float) -> wire.Records:
        """Ask for inbox slots for pages of a chain, one answer each."""
        body = wire.pack_reserve(handle, pages)
        return self._parsed(Type.RESERVE, body, deadline, wire.parse_reservations)

    def commit(
        self, handle: int, pages: npt.ArrayLike, slots: npt.ArrayLike, deadline: float
    ) -> wire.Records:
        """Publish written slots, one answer each."""
        body = wire.pack_commit(handle, pages, slots)
        return self._parsed(Type.COMMIT, body, deadline, wire.parse_committed)

    def drop(self, handle: int, deadline: float) -> None:
        """Forget a chain and its reservations."""
        self.call(Type.DROP, wire.pack_handle(handle), deadline)

    def reset(self, deadline: float) -> int:
        """Drop every page of this engine's namespace in the sidecar; return how many."""
        v = self._parsed(Type.RESET, b"", deadline, wire.parse_json)
        return int(v.get("pages", 0))

    def stats(self, deadline: float) -> dict[str, Any]:
        """Return the sidecar's counters."""
        return self._parsed(Type.STATS, b"", deadline, wire.parse_json)

    def read(self, lease: int, page: int, deadline: float) -> wire.Page:
        """Copy one leased page of this rank's shard inline, counted from the lease's first."""
        body = wire.pack_read(lease, page, 1)
        return self._parsed(Type.READ, body, deadline, wire.parse_page)

    def write(self, handle: int, page: int, data: bytes, deadline: float) -> wire.Records:
        """Store one page of a chain inline."""
        body = wire.pack_write_header(handle, page) + data
        return self._parsed(Type.WRITE, body, deadline, wire.parse_committed)


def left_us(deadline: float) -> int:
    """Return the microseconds from now to a deadline, as they travel: 0 to 2**32 - 1."""
    return min(max(int((deadline - time.monotonic()) * 1e6), 0), 0xFFFFFFFF)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
