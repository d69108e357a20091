"""A connection that is kept up in the background, for hooks that must not wait.

One thread owns the socket. Callers hand it requests and look at the answers;
they never touch the socket, and a request that the sidecar does not answer by
its deadline is a miss for its caller whatever the thread is doing. Requests
are pipelined: answers come in the order of the requests.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import math
import os
import random
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy.typing as npt

from . import wire
from .call import DEADLINE, UNREACHABLE, Call
from .client import Client, left_us
from .frames import Frames
from .pinned import Driver
from .shared import Shared
from .wire import ANSWER, Type

log = logging.getLogger("membrane_kv")

_CONNECT_S = 1.0
_BACKOFF_S = (0.05, 2.0)
_STALL_S = 2.0
_MAX_PENDING = 4096
_MAX_QUEUED = 256 << 20

_T = TypeVar("_T")


class _Pending:
    """A request that was handed to the socket: its id, the answer's type and its parser."""

    __slots__ = ("call", "id", "kind", "parse", "want")

    def __init__(
        self, frame_id: int, kind: Type, parse: Callable[[bytes], Any], call: Call[Any]
    ) -> None:
        self.id = frame_id
        self.kind = kind
        self.want = Type.PAGE if kind == Type.READ else kind | ANSWER
        self.parse = parse
        self.call = call


class Up:
    """One registered connection's life, from `since` (time.monotonic()) on.

    `epoch` counts them; handles and leases die with it.
    """

    def __init__(self, epoch: int, registered: wire.Registered, shared: Shared | None) -> None:
        self.epoch = epoch
        self.since = time.monotonic()
        self.registered = registered
        self.shared = shared


class Session:
    """Keeps one registered connection to the sidecar up, for ever.

    The constructor and every method but `stop` return at once; the sidecar may
    be absent. All methods may be called by any thread.
    """

    def __init__(
        self,
        places: tuple[str, ...],
        registration: wire.Register,
        key: str = "",
        name: str = "",
        driver: Driver | None = None,
    ) -> None:
        self._places = places
        self._registration = registration
        self._key = key
        self._name = name
        self._driver = driver
        self._lock = threading.Lock()
        self._queue: collections.deque[tuple[Type, bytes, Callable[[bytes], Any], Call[Any]]]
        self._queue = collections.deque()
        self._later: list[tuple[float, int, int, int]] = []
        self._order = itertools.count()
        self._pending: collections.deque[_Pending] = collections.deque()
        self._queued_bytes = 0
        self._sent_bytes = 0  # of these, which only the thread counts
        self._up: Up | None = None
        self._epoch = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not at the thread's end: a caller may hold the number, which another file may get.
        weakref.finalize(self, os.close, self._wake).atexit = False  # the thread may use it still
        self._stopping = threading.Event()
        self._renew = 0
        self._owed = 0
        self._changed = threading.Condition(self._lock)
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="membrane-" + name, daemon=True)

    def start(self) -> Session:
        """Begin to connect. Return self."""
        self._thread.start()
        return self

    @property
    def up(self) -> Up | None:
        """The registered connection, or None while there is none."""
        return self._up

    def wait_up(self, deadline: float) -> Up | None:
        """Wait for a registered connection until the deadline. Not for hooks."""
        with self._changed:
            while self._up is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return self._up

    @property
    def lagging(self) -> bool:
        """True while the sidecar owes an answer whose deadline has passed.

        A caller that would have to wait does better not to ask.
        """
        with contextlib.suppress(IndexError):
            return self._pending[0].call.done() and self._pending[0].call.reason == DEADLINE
        return False

    def stop(self, timeout: float = 2.0) -> None:
        """Close the connection and end the thread; wait for it, in seconds, at most."""
        self._stopping.set()
        self._ring()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def renew(self, epoch: int) -> None:
        """Give everything back by closing the connection of `epoch`; another follows."""
        self._renew = epoch
        self._ring()

    def submit(
        self,
        kind: Type,
        body: bytes,
        parse: Callable[[bytes], _T],
        deadline: float,
        then: Callable[[Call[_T]], None] | None = None,
        late: Callable[[_T], None] | None = None,
        epoch: int | None = None,
    ) -> Call[_T]:
        """Send a request when the thread gets to it.

        `then` runs once, in whatever thread ends the call; `late` runs instead
        of it being of use, when an answer comes after the deadline. A request
        for another `epoch` than the present one ends as unreachable.
        """
        call: Call[_T] = Call(deadline, then, late)
        with self._lock:
            up = self._up
            taken = (
                up is not None
                and (epoch is None or epoch == up.epoch)
                and len(self._queue) + len(self._pending) < _MAX_PENDING
                and self._queued_bytes + len(body) <= _MAX_QUEUED
            )
            if taken:
                self._enqueue(kind, body, parse, call)
        if taken:
            self._ring()
        else:
            call.fail(UNREACHABLE)
        return call

    def _enqueue(
        self, kind: Type, body: bytes, parse: Callable[[bytes], Any], call: Call[Any]
    ) -> None:
        """Queue a request. Its bytes count until the socket has them. The lock is held."""
        self._queue.append((kind, body, parse, call))
        self._queued_bytes += wire.HEADER_SIZE + len(body)

    def match(
        self,
        epoch: int,
        ids: bytes,
        deadline: float,
        server_deadline: float,
        held: int,
        lease_ms: int,
        salt: str | None = None,
        flags: int = 0,
        late: Callable[[wire.Leased], None] | None = None,
        extra: str | None = None,
    ) -> Call[wire.Leased]:
        """See Client.match. The sidecar is told `server_deadline`, before the caller's own.

        `late` gets an answer that came after the deadline, and must give its
        lease and handle back.
        """
        body = wire.pack_match(held, left_us(server_deadline), lease_ms, ids, extra, salt, flags)
        return self.submit(Type.MATCH, body, wire.parse_leased, deadline, None, late, epoch)

    def match_hashes(
        self,
        epoch: int,
        hashes: bytes,
        deadline: float,
        server_deadline: float,
        lease_ms: int,
        flags: int = 0,
    ) -> Call[wire.Leased]:
        """Match pages that are named by their hashes, 32 bytes each.

        What an answer that comes after the deadline brings is given back.
        """
        left = left_us(server_deadline) if server_deadline else 0
        body = wire.pack_match_hashes(left, lease_ms, hashes, flags)

        def late(leased: wire.Leased) -> None:
            self.give_back(epoch, leased.lease)
            self.drop(epoch, leased.handle)

        return self.submit(Type.MATCH_HASHES, body, wire.parse_leased, deadline, None, late, epoch)

    def lease(
        self,
        epoch: int,
        handle: int,
        first: int,
        pages: int,
        deadline: float,
        server_deadline: float,
        lease_ms: int,
    ) -> Call[wire.Leased]:
        """See Client.lease. A lease that comes after the deadline is given back."""
        body = wire.pack_lease(handle, first, pages, left_us(server_deadline), lease_ms)

        def late(leased: wire.Leased) -> None:
            self.give_back(epoch, leased.lease)

        return self.submit(Type.LEASE, body, wire.parse_leased, deadline, None, late, epoch)

    def extend(
        self,
        epoch: int,
        handle: int,
        ids: bytes,
        deadline: float,
        then: Callable[[Call[int]], None] | None = None,
    ) -> Call[int]:
        """See Client.extend."""
        body = wire.pack_extend(handle, ids)
        return self.submit(Type.EXTEND, body, wire.parse_u32, deadline, then, epoch=epoch)

    def release(
        self, lease: int, deadline: float, verify: bool = False, epoch: int | None = None
    ) -> Call[wire.Outcome]:
        """See Client.release."""
        body = wire.pack_release(lease, verify)
        return self.submit(Type.RELEASE, body, wire.parse_outcome, deadline, epoch=epoch)

    def reserve(
        self,
        epoch: int,
        handle: int,
        pages: npt.ArrayLike,
        deadline: float,
        late: Callable[[wire.Records], None] | None = None,
    ) -> Call[wire.Records]:
        """See Client.reserve. `late` gets reservations that came after the deadline."""
        body = wire.pack_reserve(handle, pages)
        parse = wire.parse_reservations
        return self.submit(Type.RESERVE, body, parse, deadline, None, late, epoch)

    def commit(
        self,
        epoch: int,
        handle: int,
        pages: npt.ArrayLike,
        slots: npt.ArrayLike,
        deadline: float,
        then: Callable[[Call[wire.Records]], None] | None = None,
    ) -> Call[wire.Records]:
        """See Client.commit."""
        body = wire.pack_commit(handle, pages, slots)
        return self.submit(Type.COMMIT, body, wire.parse_committed, deadline, then, epoch=epoch)

    def write(
        self,
        epoch: int,
        handle: int,
        page: int,
        data: bytes,
        deadline: float,
        then: Callable[[Call[wire.Records]], None] | None = None,
    ) -> Call[wire.Records]:
        """See Client.write."""
        body = wire.pack_write_header(handle, page) + data
        return self.submit(Type.WRITE, body, wire.parse_committed, deadline, then, epoch=epoch)

    def read(self, epoch: int, lease: int, page: int, deadline: float) -> Call[wire.Page]:
        """See Client.read."""
        body = wire.pack_read(lease, page, 1)
        return self.submit(Type.READ, body, wire.parse_page, deadline, epoch=epoch)

    def reset(self, deadline: float) -> Call[dict[str, Any]]:
        """See Client.reset. Without an answer it is sent first of all when connected anew."""
        self._owed += 1
        mine = self._owed

        def late(_: dict[str, Any]) -> None:
            self._paid(mine)

        return self.submit(Type.RESET, b"", wire.parse_json, deadline, self._pays(mine), late)

    def drop(self, epoch: int, handle: int, after_s: float = 0.0) -> None:
        """Forget a chain in a while, so that commits on other connections come first."""
        with self._lock:
            if self._up is None or self._up.epoch != epoch:
                return
            due = time.monotonic() + after_s
            heapq.heappush(self._later, (due, next(self._order), epoch, handle))
        self._ring()

    def drop_now(self) -> None:
        """Forget every chain that was to be forgotten in a while, before what is sent next."""
        with self._lock:
            self._send_drops(math.inf)
        self._ring()

    def _send_drops(self, until: float) -> None:
        """Queue the drops that are due. The lock is held."""
        while self._later and self._later[0][0] <= until:
            _, _, _, handle = heapq.heappop(self._later)
            call: Call[bytes] = Call(time.monotonic() + _CONNECT_S)
            self._enqueue(Type.DROP, wire.pack_handle(handle), bytes, call)

    def give_back(self, epoch: int, lease: int) -> None:
        """Release a lease that nobody will read, without waiting for the answer."""
        if lease:
            self.release(lease, time.monotonic() + _CONNECT_S, epoch=epoch)

    def _ring(self) -> None:
        # Not under the lock: the thread would wake up and wait for it.
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while not self._stopping.is_set():
            began = time.monotonic()
            client = self._connect()
            if client is not None:
                self._serve(client)
                if time.monotonic() - began > _BACKOFF_S[1]:
                    backoff = _BACKOFF_S[0]
            self._stopping.wait(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _BACKOFF_S[1])

    def _connect(self) -> Client | None:
        trouble: Exception | None = None
        for place in self._places:
            if self._stopping.is_set():
                return None
            client: Client | None = None
            try:
                until = time.monotonic() + _CONNECT_S
                inline = self._registration.inline
                client = Client.connect(place, until, self._key, self._name, inline)
                # The sidecar may have to make room for the inbox first.
                r = client.register(self._registration, time.monotonic() + 5 * _CONNECT_S)
                if owed := self._owed:
                    client.reset(time.monotonic() + 5 * _CONNECT_S)
                    self._paid(owed)
            except Exception as e:  # whatever it is, the next attempt must follow
                trouble = trouble if isinstance(e, (FileNotFoundError, ConnectionError)) else e
                trouble = trouble or e
                if client is not None:
                    client.close()
                continue
            how = "shared memory" if client.shared else "pages inline"
            self._say(
                logging.INFO,
                f"membrane: connected to {client.hello.server} at {client.endpoint} ({how},"
                f" {r.page_tokens} tokens in a page)",
            )
            return client
        self._say(
            logging.WARNING,
            f"membrane: no sidecar at {' or '.join(self._places)} ({trouble});"
            " the engine runs without it and keeps trying",
        )
        return None

    def _paid(self, owed: int) -> None:
        """Owe no reset any more, unless another was asked for since."""
        if self._owed == owed:
            self._owed = 0

    def _pays(self, owed: int) -> Callable[[Call[dict[str, Any]]], None]:
        def then(call: Call[dict[str, Any]]) -> None:
            if call.ok:
                self._paid(owed)

        return then

    def _say(self, level: int, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            log.log(level, "%s", sentence)

    def _serve(self, client: Client) -> None:
        assert client.registered is not None
        with self._lock:
            self._epoch += 1
            self._later.clear()
            self._up = Up(self._epoch, client.registered, client.shared)
            if owed := self._owed:  # since _connect has looked
                call = Call(time.monotonic() + 5 * _CONNECT_S, self._pays(owed))
                self._enqueue(Type.RESET, b"", wire.parse_json, call)
            self._changed.notify_all()
        if client.shared is not None:
            threading.Thread(
                target=client.shared.prepare,
                args=(self._driver,),
                name="membrane-populate",
                daemon=True,
            ).start()
        trouble: Exception | None = None
        try:
            self._pump(client)
        except (OSError, wire.WireError) as e:
            trouble = e
        except Exception as e:
            log.exception("membrane: the connection's thread failed")
            trouble = e
        finally:
            with self._lock:
                self._up = None
                lost = [entry[3] for entry in self._queue]
                self._queue.clear()
                self._queued_bytes = self._sent_bytes = 0
                lost += [entry.call for entry in self._pending]
                self._pending.clear()
                self._later.clear()
            client.close()
            for call in lost:
                call.fail(UNREACHABLE)
        if not self._stopping.is_set():
            self._say(
                logging.WARNING, f"membrane: lost the sidecar at {client.endpoint} ({trouble})"
            )

    def _pump(self, client: Client) -> None:
        """Move frames both ways until the connection is lost or stop is called."""
        sock = client.sock
        sock.setblocking(False)
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        out: collections.deque[memoryview] = collections.deque()
        incoming = Frames()
        while not self._stopping.is_set():
            wait = self._fill(client, out)
            poll.register(sock, select.POLLIN | (select.POLLOUT if out else 0))
            for fd, _ in poll.poll(wait * 1000):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    continue
                with contextlib.suppress(BlockingIOError):
                    while out:
                        n = sock.send(out[0])
                        self._sent_bytes += n
                        out[0] = out[0][n:]
                        if not out[0]:
                            out.popleft()
                with contextlib.suppress(BlockingIOError):
                    while True:
                        incoming.receive(sock)
                        for header, body in incoming.frames():
                            self._handle(header, body)
            self._check_stall()
            if self._renew == self._epoch:
                raise ConnectionError("closed to give reservations back")

    def _fill(self, client: Client, out: collections.deque[memoryview]) -> float:
        """Turn what was submitted into frames; return seconds until the next thing is due."""
        now = time.monotonic()
        with self._lock:
            self._queued_bytes -= self._sent_bytes
            self._sent_bytes = 0
            self._send_drops(now)
            while self._queue:
                kind, body, parse, call = self._queue.popleft()
                frame_id = client.next_id()
                try:
                    frame = wire.frame(kind, frame_id, body)
                except wire.WireError as e:
                    self._queued_bytes -= wire.HEADER_SIZE + len(body)
                    call.fail(e.name)
                    continue
                self._pending.append(_Pending(frame_id, kind, parse, call))
                out.append(memoryview(frame))
            due = self._later[0][0] if self._later else now + 1.0
        return min(max(due - now, 0.001), 0.25)

    def _handle(self, header: wire.Header, body: bytes) -> None:
        if not self._pending:
            raise wire.WireError(wire.Code.BAD_FRAME, "id", "an answer that nobody asked for", True)
        # It stays in the queue until it is handled, so that a failure below ends its call.
        entry = self._pending[0]
        if header.type == Type.ERROR | ANSWER:
            error = wire.parse_error(body)
            self._pending.popleft()
            entry.call.fail(error.name)
            log.debug("membrane: %s was refused: %s", entry.kind.name, error)
            if error.fatal:
                raise error
            return
        if header.type != entry.want or header.id != entry.id:
            raise wire.WireError(
                wire.Code.BAD_FRAME,
                "type",
                f"frame {header.type:#04x} with id {header.id} does not answer {entry.kind.name}",
                True,
            )
        result = entry.parse(body)
        self._pending.popleft()
        entry.call.answer(result)

    def _check_stall(self) -> None:
        # Drop calls carry short deadlines, so even an idle session notices.
        if self._pending and time.monotonic() > self._pending[0].call.deadline + _STALL_S:
            raise TimeoutError(f"no answer for {_STALL_S:.0f} s after the deadline")
