"""The background connection: deadlines, pipelining, reconnecting, late answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_sidecar import FakeSidecar
from helpers import eventually, registration, soon
from membrane_kv import wire
from membrane_kv.call import DEADLINE, UNREACHABLE, Call
from membrane_kv.client import Client
from membrane_kv.session import Session
from membrane_kv.wire import Type

Start = Callable[..., Session]
IDS = wire.tokens(range(64))


def match(
    s: Session, wait: float = 5.0, late: Callable[[wire.Leased], None] | None = None
) -> Call[wire.Leased]:
    up = s.up
    assert up is not None
    now = time.monotonic()
    return s.match(up.epoch, IDS, now + wait, now + wait, 0, 10_000, late=late)


def test_absent_sidecar_is_a_miss_at_once_and_found_later(tmp_path: Path) -> None:
    path = str(tmp_path / "later")
    s = Session((path, "localhost:1"), registration(), name="w").start()
    call = s.submit(Type.PING, b"", bytes, soon())
    assert call.done() and not call.ok and call.reason == UNREACHABLE
    sidecar = FakeSidecar(path)
    assert s.wait_up(soon()) is not None
    assert s.submit(Type.PING, b"", bytes, soon()).wait()
    s.stop()
    sidecar.close()


def test_constructor_never_touches_the_socket(sidecar: FakeSidecar) -> None:
    s = Session((sidecar.path,), registration())
    assert s.up is None
    assert not sidecar.registered
    s.stop()


def test_deadline_ends_a_call_without_the_thread(sidecar: FakeSidecar, sessions: Start) -> None:
    s = sessions("scheduler")
    sidecar.silent |= {Type.MATCH, Type.PING}
    ended: list[str] = []
    call = match(s, 0.05)
    assert not call.done()
    began = time.monotonic()
    assert not call.wait()
    assert time.monotonic() - began < 0.2
    assert call.reason == DEADLINE
    assert s.lagging
    other: Call[bytes] = s.submit(
        Type.PING, b"", bytes, time.monotonic() + 0.05, then=lambda c: ended.append(c.reason)
    )
    eventually(other.done)
    assert ended == [DEADLINE]


def test_stopped_sidecar_is_given_up_and_found_again(sidecar: FakeSidecar, sessions: Start) -> None:
    s = sessions("scheduler")
    first = s.up
    sidecar.silent.add(Type.MATCH)
    match(s, 0.01)
    eventually(lambda: s.up is not first, timeout=5)
    sidecar.silent.clear()
    eventually(lambda: s.up is not None and not s.lagging)
    assert match(s).wait()


def test_answers_are_pipelined_and_in_order(sidecar: FakeSidecar, sessions: Start) -> None:
    s = sessions("scheduler")
    sidecar.delay[Type.MATCH] = 0.02
    calls = [match(s) for _ in range(5)]
    last: Call[bytes] = s.submit(Type.PING, b"", bytes, soon())
    assert last.wait()
    assert all(c.ok for c in calls)
    handles = [c.result.handle for c in calls if c.result is not None]
    assert handles == sorted(handles)


def test_late_answer_goes_to_late(sidecar: FakeSidecar, sessions: Start) -> None:
    s = sessions("scheduler")
    sidecar.delay[Type.MATCH] = 0.1
    late: list[wire.Leased] = []
    call = match(s, 0.02, late.append)
    assert not call.wait()
    eventually(lambda: late)
    assert late[0].chain_pages == 1
    assert call.reason == DEADLINE and call.result is None
    eventually(lambda: not s.lagging)


def test_late_lease_is_given_back(sidecar: FakeSidecar, sessions: Start) -> None:
    w, s = sessions("worker"), sessions("scheduler")
    found = match(s)
    assert found.wait() and found.result is not None and s.up is not None and w.up is not None
    handle = found.result.handle
    assert w.write(w.up.epoch, handle, 0, bytes(2048), soon()).wait()
    sidecar.delay[Type.LEASE] = 0.1
    now = time.monotonic()
    late = s.lease(s.up.epoch, handle, 0, 1, now + 0.02, now + 0.02, 10_000)
    assert not late.wait()
    eventually(lambda: Type.RELEASE in sidecar.seen)
    eventually(lambda: not sidecar.leases)


def test_lost_connection_fails_calls_and_a_new_epoch_begins(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    s = sessions("scheduler")
    old = s.up
    assert old is not None
    sidecar.silent.add(Type.MATCH)
    call = match(s)
    eventually(lambda: Type.MATCH in sidecar.seen)
    sidecar.disconnect()
    eventually(call.done)
    assert call.reason == UNREACHABLE
    sidecar.silent.clear()
    eventually(lambda: s.up is not None and s.up.epoch == old.epoch + 1)
    stale = s.release(1, soon(), epoch=old.epoch)
    assert stale.done() and stale.reason == UNREACHABLE


def test_error_frame_ends_its_call_only(sidecar: FakeSidecar, sessions: Start) -> None:
    s = sessions("scheduler")
    assert s.up is not None
    bad = s.extend(s.up.epoch, 12345, IDS, soon())
    good = match(s)
    assert not bad.wait() and bad.reason == "unknown_handle"
    assert good.wait()


def test_drop_waits(sidecar: FakeSidecar, sessions: Start) -> None:
    s = sessions("scheduler")
    call = match(s)
    assert call.wait() and call.result is not None and s.up is not None
    s.drop(s.up.epoch, call.result.handle, 0.05)
    assert s.submit(Type.PING, b"", bytes, soon()).wait()
    assert sidecar.chains
    eventually(lambda: not sidecar.chains)


def test_garbage_is_survived(tmp_path: Path) -> None:
    path = str(tmp_path / "g")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(8)
        s = Session((path,), registration(), name="w").start()
        for junk in (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b"MBRN\x02\x81" + bytes(10), b""):
            connection, _ = listener.accept()
            connection.sendall(junk)
            connection.close()
        assert s.up is None
        s.stop()


@pytest.mark.parametrize("endpoint", ["localhost:76000", "localhost:-1", "x"])
def test_place_that_cannot_be_does_not_end_the_thread(sidecar: FakeSidecar, endpoint: str) -> None:
    s = Session((endpoint, sidecar.path), registration(), name="w").start()
    assert s.wait_up(soon()) is not None
    s.stop()


def test_sidecar_that_answers_nonsense_does_not_end_the_thread(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes from outside may raise what nobody thought of; the next attempt must follow."""
    broken = iter([OverflowError("on purpose"), RuntimeError("on purpose")])
    real = wire.parse_registered

    def parse(body: bytes) -> wire.Registered:
        for e in broken:
            raise e
        return real(body)

    monkeypatch.setattr(wire, "parse_registered", parse)
    s = Session((sidecar.path,), registration(), name="w").start()
    assert s.wait_up(soon()) is not None
    s.stop()


def test_stop_ends_the_thread_and_the_connection(sidecar: FakeSidecar, sessions: Start) -> None:
    s = sessions("worker")
    s.stop()
    eventually(lambda: not sidecar.ranks)
    assert s.up is None
    assert not [t for t in threading.enumerate() if t is s._thread]


def test_descriptor_that_wakes_the_thread_outlives_it(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    """A caller that is about to write to it must not meet another file under its number."""
    s = sessions("worker")
    wake = s._wake
    s.stop()
    assert s._wake == wake
    s.drop_now()
    assert os.eventfd_read(wake) >= 1


def test_large_frames_cross_in_both_directions(sidecar: FakeSidecar, sessions: Start) -> None:
    size = 1 << 20
    d = registration().descriptor
    big = type(d)(**{**d.__dict__, "block_bytes": size // 2})
    s = sessions("worker", inline=True, descriptor=big)
    up, call = s.up, match(s)
    assert up is not None and call.wait() and call.result is not None
    data = bytes(range(256)) * (size // 256)
    assert s.write(up.epoch, call.result.handle, 0, data, soon()).wait()
    found = match(s)
    assert found.wait() and found.result is not None
    read = s.read(up.epoch, found.result.lease, 0, soon())
    assert read.wait() and read.result is not None
    assert bytes(read.result.object) == data


def test_reset_while_the_connection_is_made_is_sent_on_it(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may be connected already, and have stored since the reset that was owed."""
    s = Session((sidecar.path,), registration("scheduler"), name="s")
    registered, serve = [0], s._serve

    def late(client: Client) -> None:
        registered[0] += 1
        assert not s.reset(soon()).wait(), "there is no connection yet"
        assert Type.RESET not in sidecar.seen
        serve(client)

    monkeypatch.setattr(s, "_serve", late)
    s.start()
    eventually(lambda: Type.RESET in sidecar.seen)
    assert registered == [1]
    eventually(lambda: not s._owed)
    s.stop()


def test_requests_on_their_way_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that reads nothing must not fill the engine's memory with pages."""
    most, size = 8 << 20, 1 << 20
    monkeypatch.setattr("membrane_kv.session._MAX_QUEUED", most)
    held, go = threading.Event(), threading.Event()
    real = FakeSidecar(str(tmp_path / "t"), arena_bytes=4 << 20)
    s = Session((real.path,), registration(), name="w").start()
    assert s.wait_up(soon()) is not None
    real.silent.add(Type.WRITE)

    def hold(*_: object) -> bytes:
        held.set()
        go.wait()
        return b""

    monkeypatch.setattr("fake_sidecar._Connection.on_ping", hold)
    assert s.up is not None
    s.submit(Type.PING, b"", bytes, soon(60))
    assert held.wait(5)
    taken = 0
    for _ in range(100):
        call = s.write(s.up.epoch, 1, 0, bytes(size), soon(60))
        taken += not call.done()
        eventually(lambda: not s._queue)  # the thread has made frames of it
    go.set()
    s.stop()
    real.close()
    assert most // size - 1 <= taken <= most // size + 1, "and what the socket holds"


@pytest.mark.parametrize("callback", ["then", "late"])
def test_broken_callback_does_not_end_the_session(
    sidecar: FakeSidecar, sessions: Start, callback: str
) -> None:
    s = sessions("scheduler")

    def broken(_: object) -> None:
        raise RuntimeError("on purpose")

    if callback == "late":
        sidecar.delay[Type.PING] = 0.05
    wait = 0.01 if callback == "late" else 5
    kw: dict[str, Any] = {callback: broken}
    s.submit(Type.PING, b"", bytes, time.monotonic() + wait, **kw).wait()
    assert s.submit(Type.PING, b"", bytes, soon()).wait()
