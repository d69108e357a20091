"""Unmapping and copies: never both."""

from __future__ import annotations

import mmap
import threading
import time

import pytest
from fake_sidecar import FakeSidecar
from helpers import eventually, registration, soon
from membrane_kv.client import Client
from membrane_kv.session import Session
from membrane_kv.shared import Shared, Unmapped


def shared() -> Shared:
    return Shared(mmap.mmap(-1, 8192), mmap.mmap(-1, 4096), 2048)


def test_close_waits_for_the_last_copy() -> None:
    m = shared()
    arena = m._maps[0]
    with m.use(), m.use():
        m.close()
        assert m.closed
        assert not arena.closed
        assert m.object(0, 4096).sum() == 0
        with pytest.raises(Unmapped), m.use():
            pass
    assert arena.closed
    m.close()


def test_close_without_copies_unmaps_at_once() -> None:
    m = shared()
    arena = m._maps[0]
    m.close()
    assert arena.closed


def test_lost_connection_unmaps_within_a_second_but_not_under_a_copy(
    sidecar: FakeSidecar,
) -> None:
    session = Session((sidecar.path,), registration(), name="w").start()
    up = session.wait_up(soon())
    assert up is not None and up.shared is not None
    m = up.shared
    copying, finish = threading.Event(), threading.Event()

    def copy() -> None:
        with m.use():
            copying.set()
            finish.wait(5)
            m.object(0, 1 << 20).copy()

    t = threading.Thread(target=copy)
    t.start()
    copying.wait(5)
    maps = list(m._maps)
    lost = time.monotonic()
    sidecar.disconnect()
    eventually(lambda: m.closed, timeout=1.0)
    assert not any(x.closed for x in maps)
    finish.set()
    t.join()
    eventually(lambda: all(x.closed for x in maps), timeout=1.0)  # populating is a copy, too
    assert time.monotonic() - lost < 1.0
    session.stop()


def test_populate_ends_with_the_mapping(sidecar: FakeSidecar) -> None:
    client = Client.connect(sidecar.path, soon())
    client.register(registration(), soon())
    assert client.shared is not None
    client.shared.populate()
    client.close()
    client.shared.populate()
