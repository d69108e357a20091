"""The blocking client against the fake sidecar."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import numpy as np
import pytest
from fake_sidecar import FakeSidecar
from helpers import BLOCK_BYTES, registration, soon
from membrane_kv import wire
from membrane_kv.client import Client, Lost, endpoints
from membrane_kv.wire import Code, Outcome, Store, Type, WireError

IDS = wire.tokens(range(150))
OBJECT = 2 * BLOCK_BYTES


def connect(sidecar: FakeSidecar, role: str = "worker", where: str = "") -> Client:
    client = Client.connect(where or sidecar.path, soon())
    client.register(registration(role), soon())
    return client


def store(client: Client, handle: int, page: int, fill: int) -> int:
    r = client.reserve(handle, [page], soon())
    assert r["status"].tolist() == [Store.SLOT]
    assert client.shared is not None
    with client.shared.use() as m:
        m.slot(int(r["slot"][0]), OBJECT)[:] = fill
    done = client.commit(handle, [page], r["slot"], soon())
    assert done["status"].tolist() == [Store.STORED]
    return int(done["sum"][0])


def test_store_match_load_release(sidecar: FakeSidecar) -> None:
    client = connect(sidecar)
    first = client.match(IDS, soon())
    assert (first.lease, first.chain_pages, first.reason) == (0, 2, wire.Reason.ABSENT)
    sums = [store(client, first.handle, page, 10 + page) for page in range(2)]
    again = client.match(IDS, soon(), held=70)
    assert (again.first, again.pages) == (1, 1)
    assert again.locations["sum"][:, 0].tolist() == sums[1:]
    assert client.shared is not None
    with client.shared.use() as m:
        at = again.locations[0, 0]
        assert (m.object(int(at["offset"]), int(at["length"])) == 11).all()
        with pytest.raises(ValueError, match="lie outside"):
            m.object(1 << 40, 1)
        with pytest.raises(ValueError, match="read-only"):
            m.object(0, 10)[0] = 1
        with pytest.raises(ValueError, match="slot 4 does not hold"):
            m.slot(4, OBJECT)
    assert client.release(again.lease, soon()) == Outcome.LIVE
    with pytest.raises(WireError, match="unknown_lease"):
        client.release(again.lease, soon())
    assert client.extend(first.handle, wire.tokens(range(50)), soon()) == 3
    whole = client.lease(first.handle, 0, 9, soon())
    assert (whole.first, whole.pages, whole.chain_pages) == (0, 2, 3)
    client.drop(first.handle, soon())
    with pytest.raises(WireError) as e:
        client.reserve(first.handle, [0], soon())
    assert e.value.code == Code.UNKNOWN_HANDLE
    assert client.stats(soon()) == {"leases": 1}
    assert client.reset(soon()) == 2
    client.ping(soon())
    client.close()


@pytest.mark.parametrize("said", ["e.sock", "run/e.sock", "x" * 300, "/nul\0"])
def test_socket_that_does_not_open_leaves_the_port(sidecar: FakeSidecar, said: str) -> None:
    """As with `--engine-socket e.sock`: relative to the sidecar's folder."""
    sidecar.path, there = said, sidecar.path
    client = Client.connect(f"localhost:{sidecar.port}", soon())
    assert client.sock.family != socket.AF_UNIX
    client.ping(soon())
    client.close()
    sidecar.path = there


def test_salt_is_another_scope(sidecar: FakeSidecar) -> None:
    client = connect(sidecar)
    store(client, client.match(IDS, soon()).handle, 0, 1)
    assert client.match(IDS, soon(), salt="").pages == 0
    assert client.match(IDS, soon()).pages == 1
    client.close()


def test_localhost_moves_to_shared_memory(sidecar: FakeSidecar) -> None:
    client = connect(sidecar, where=f"localhost:{sidecar.port}")
    assert client.endpoint == sidecar.path
    assert client.shared is not None
    client.close()


def test_localhost_stays_when_the_socket_cannot_be_opened(sidecar: FakeSidecar) -> None:
    good, sidecar.path = sidecar.path, "/nowhere/socket"
    client = connect(sidecar, where=f"127.0.0.1:{sidecar.port}")
    sidecar.path = good
    assert client.shared is None
    handle = client.match(IDS, soon()).handle
    data = np.arange(OBJECT, dtype=np.uint16).astype(np.uint8).tobytes()
    assert client.write(handle, 0, data, soon())["status"].tolist() == [Store.STORED]
    leased = client.match(IDS, soon())
    page = client.read(leased.lease, 0, soon())
    assert bytes(page.object) == data
    assert page.sum == leased.locations["sum"][0, 0]
    client.close()


def test_second_claim_of_a_rank_is_refused(sidecar: FakeSidecar) -> None:
    one = connect(sidecar)
    with pytest.raises(WireError, match="rank_taken: engine"):
        connect(sidecar)
    one.ping(soon())
    one.close()


def test_deadline_ends_a_call_and_the_connection(sidecar: FakeSidecar) -> None:
    client = connect(sidecar)
    sidecar.silent.add(Type.PING)
    began = time.monotonic()
    with pytest.raises(Lost):
        client.ping(time.monotonic() + 0.05)
    assert 0.04 < time.monotonic() - began < 1.0
    with pytest.raises(Lost):
        client.ping(soon())
    client.close()


def test_deadline_that_has_passed_sends_nothing(sidecar: FakeSidecar) -> None:
    client = connect(sidecar)
    with pytest.raises(Lost):
        client.ping(time.monotonic() - 1)
    assert Type.PING not in sidecar.seen
    client.close()


def test_end_of_stream_is_lost(sidecar: FakeSidecar) -> None:
    client = connect(sidecar)
    sidecar.hangup.add(Type.PING)
    with pytest.raises(Lost, match="closed the connection"):
        client.ping(soon())
    client.close()


def test_descriptors_are_closed_and_not_inherited(sidecar: FakeSidecar) -> None:
    before = set(os.listdir("/proc/self/fd"))
    client = connect(sidecar)
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):
            if "fake-" in os.readlink(f"/proc/self/fd/{fd}"):
                assert not os.get_inheritable(int(fd))
    client.close()
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "fake-inbox" in line and " r--s" in line]
    assert not mapped


def test_answer_to_something_else_is_lost() -> None:
    ours, theirs = socket.socketpair()
    client = Client(ours, "pair")
    theirs.sendall(wire.frame(Type.PING | wire.ANSWER, 99))
    with pytest.raises(Lost, match="does not answer"):
        client.ping(soon())
    theirs.close()
    client.close()


def test_another_version_is_fatal() -> None:
    ours, theirs = socket.socketpair()
    client = Client(ours, "pair")
    theirs.sendall(b"MBRN\x02\x83" + bytes(10))
    with pytest.raises(WireError, match="version: 2 is not spoken here, 1 is"):
        client.ping(soon())
    with pytest.raises(Lost):
        client.ping(soon())
    theirs.close()
    client.close()


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMBRANE_SIDECAR", raising=False)
    assert endpoints() == ("/run/membrane/engine.sock", "localhost:7600")
    monkeypatch.setenv("MEMBRANE_SIDECAR", "/x/y")
    assert endpoints("") == ("/x/y",)
    assert endpoints("host:1") == ("host:1",)
