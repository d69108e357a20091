"""The SGLang backend over a real sidecar, with stand-ins for SGLang and its host pools."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_standin as standin
from helpers import eventually
from membrane_kv import wire
from membrane_kv.client import Client
from real_sidecar import RealSidecar
from sglang_standin import (
    LAYOUTS,
    PAGE_BYTES,
    Config,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    P,
    PoolTransfer,
    Tensor,
    keys,
    slots,
)

standin.install()

from membrane_kv.sglang import MembraneHiCache  # noqa: E402

Make = Callable[..., MembraneHiCache]
DEADLINES = {"match_deadline_ms": 1000, "load_deadline_ms": 1000, "store_deadline_ms": 1000}
AT_ONCE_S = 0.5


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in server run a model that has weights."""
    fresh = standin.Server(model_path=standin.checkpoint(tmp_path / "model"))
    for field in dataclasses.fields(fresh):
        monkeypatch.setattr(standin.SERVER, field.name, getattr(fresh, field.name))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[RealSidecar]:
    s = RealSidecar(tmp_path)
    yield s
    s.kill()


@pytest.fixture
def make(sidecar: RealSidecar) -> Iterator[Make]:
    """Return a function that makes a backend over a pool and waits until it is connected."""
    made: list[MembraneHiCache] = []

    def backend(
        pool: Any, connected: bool = True, config: dict[str, Any] | None = None, **extra: Any
    ) -> MembraneHiCache:
        given = {"backend_name": "membrane", "interface_v1": 1, "sidecar": sidecar.socket, **extra}
        b = MembraneHiCache(Config(given, **(config or {})), {})
        made.append(b)
        b.register_mem_pool_host(pool)
        b.register_mem_host_pool_v2(pool, "kv")
        b.on_host_pools_registered()
        if connected:
            up(b)
        return b

    yield backend
    for b in made:
        b.close()


def up(b: MembraneHiCache, timeout: float = 10.0) -> None:
    eventually(lambda: b._session is not None and b._session.up, timeout)


def off(b: MembraneHiCache) -> str:
    return str(b.recorder.snapshot().get("off", ""))


def filled(make: Make, layout: str, n: int, **more: Any) -> tuple[MHATokenToKVPoolHost, list[str]]:
    """Store the first n pages of a pool; return it and their keys."""
    pool = MHATokenToKVPoolHost(layout, 1)
    names = keys(n)
    assert make(pool, **more).batch_set_v1(names, slots(list(range(n)))) == [True] * n
    return pool, names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["shared memory", "inline", "tcp"])
def test_stored_and_loaded_elsewhere(
    sidecar: RealSidecar, make: Make, layout: str, way: str
) -> None:
    sidecar.start()
    more: dict[str, Any] = {}
    if way != "shared memory":
        more = {"inline": True, "sidecar": sidecar.engine_addr if way == "tcp" else sidecar.socket}
    pool, names = filled(make, layout, 20, inbox_slots=3, **more)
    other = MHATokenToKVPoolHost(layout)
    reader = make(other, **more)
    assert reader.batch_exists([*names, *keys(1, 9)]) == 20
    where = np.random.default_rng(2).permutation(standin.N)[:20].tolist()
    assert reader.batch_get_v1(names, slots(where)) == [True] * 20
    assert (other.truth()[:, where] == pool.truth()[:, :20]).all()
    rest = np.setdiff1d(np.arange(standin.N), where)
    assert not other.truth()[:, rest].any()
    leased = sidecar.port("leased_local")
    assert (leased["pages"], leased["tokens"], leased["bytes"]) == (20, 20 * P, 20 * PAGE_BYTES)
    assert sidecar.port("stored_pages") == 20
    assert sidecar.port("stored_bytes") == 20 * PAGE_BYTES
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_object_in_the_sidecar_is_in_sglangs_order(
    sidecar: RealSidecar, make: Make, layout: str
) -> None:
    """Another process finds the page by its hash, with the bytes of get_data_page."""
    sidecar.start()
    pool = MHATokenToKVPoolHost(layout, 1)
    writer = make(pool)
    assert writer.batch_set_v1(keys(3), slots([4, 9, 2])) == [True] * 3
    r = writer.recorder.snapshot()["registration"]
    assert isinstance(r, dict)
    flat = "page_first_direct" if layout == "layer_first" else layout
    assert r["descriptor"]["layout"] == "sglang-" + flat
    assert (r["descriptor"]["block_tokens"], r["page_tokens"]) == (P, P)
    soon = time.monotonic() + 5
    probe = Client.connect(sidecar.socket, soon)
    r["engine"], r["inbox_slots"] = "probe", 0
    answer = wire.parse_registered(probe.call(wire.Type.REGISTER, wire.pack_json(r), soon)[:])
    assert (answer.page_tokens, answer.object_bytes) == (P, PAGE_BYTES)
    body = wire.pack_match_hashes(0, 0, bytes.fromhex("".join(keys(3))))
    leased = wire.parse_leased(probe.call(wire.Type.MATCH_HASHES, body, soon))
    for i, page in enumerate((4, 9, 2)):
        got = bytes(probe.read(leased.lease, i, soon).object)
        assert got == pool.get_data_page(page * P).array.tobytes()
    probe.close()


def test_layer_first_and_page_first_direct_share_their_pages(
    sidecar: RealSidecar, make: Make
) -> None:
    sidecar.start()
    pool, names = filled(make, "layer_first", 5)
    other = MHATokenToKVPoolHost("page_first_direct")
    assert make(other).batch_get_v1(names, slots([4, 3, 2, 1, 0])) == [True] * 5
    assert (other.truth()[:, 4::-1] == pool.truth()[:, :5]).all()
    assert sidecar.port("translated")["pages"] == 0


def ranks_of(make: Make, layout: str, tp: int, truth: Any = None) -> list[Any]:
    """Return the backend and the pool of each rank, which hold their heads of `truth`."""
    out = []
    for rank in range(tp):
        pool = MHATokenToKVPoolHost(layout, heads=standin.H // tp)
        if truth is not None:
            heads = slice(rank * pool.head_num, (rank + 1) * pool.head_num)
            pool.kv_buffer.array[:] = pool.in_layout(truth[..., heads, :])
        out.append((make(pool, config={"tp_size": tp, "tp_rank": rank}), pool))
    return out


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_in_every_layout_and_tensor_parallel_size(
    sidecar: RealSidecar, make: Make, layout: str, tp: int
) -> None:
    """Keys and, with equal ranks, sizes are the same: what differs is where the numbers lie."""
    sidecar.start()
    truth = MHATokenToKVPoolHost("page_first_direct", 5).truth()
    for b, _ in ranks_of(make, layout, tp, truth):
        assert all(b.batch_set_v1(keys(4), slots([0, 1, 2, 3])))
    for other in LAYOUTS:
        for size in (1, 2):
            for rank, (b, pool) in enumerate(ranks_of(make, other, size)):
                assert b.batch_exists(keys(4)) == 4, (other, size)
                assert all(b.batch_get_v1(keys(4), slots([9, 8, 7, 6])))
                heads = slice(rank * pool.head_num, (rank + 1) * pool.head_num)
                got = pool.truth()[:, [9, 8, 7, 6]]
                assert (got == truth[:, :4, ..., heads, :]).all(), (other, size)


def test_other_weights_never_share(
    sidecar: RealSidecar, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar.start()
    _, names = filled(make, "page_first", 3)
    monkeypatch.setattr(standin.SERVER, "model_path", standin.checkpoint(tmp_path / "b", 8))
    assert make(MHATokenToKVPoolHost("page_first")).batch_exists(names) == 0


def test_only_the_held_prefix(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool = MHATokenToKVPoolHost("page_first_direct", 1)
    b, names = make(pool), keys(6)
    some = [0, 1, 2, 4]
    assert b.batch_set_v1([names[i] for i in some], slots(some)) == [True] * 4
    assert b.batch_exists(names) == 3
    assert b.batch_exists_v2(names).kv_hit_pages == 3
    assert b.batch_exists(names[4:]) == 1, "a tail of the prompt, from any page on"
    other = MHATokenToKVPoolHost("page_first_direct")
    r = make(other)
    assert r.batch_get_v1(names, slots([6, 7, 8, 9, 10, 11])) == [True] * 3 + [False] * 3
    assert (other.truth()[:, 6:9] == pool.truth()[:, :3]).all()
    assert not other.truth()[:, 9:].any(), "nothing was written for pages that are not there"
    assert [b.exists(names[3]), b.exists(names[4])] == [False, True]
    assert b.batch_exists([]) == 0
    assert b.batch_get_v1([], Tensor(np.zeros(0, np.int64))) == []


def test_many_batches(sidecar: RealSidecar, make: Make) -> None:
    """One query for all pages, reads of 128, as SGLang's controller does."""
    sidecar.start()
    n = 300
    pool = MHATokenToKVPoolHost("page_first_direct", 1)
    b, names = make(pool), keys(n)
    places = [i % standin.N for i in range(n)]
    for begin in range(0, n, 128):
        part = slice(begin, min(begin + 128, n))
        assert all(b.batch_set_v1(names[part], slots(places[part])))
    other = MHATokenToKVPoolHost("page_first_direct")
    r = make(other)
    assert r.batch_exists(names) == n
    before = sidecar.port("requests")
    for begin in range(0, n, 128):
        part = slice(begin, min(begin + 128, n))
        assert all(r.batch_get_v1(names[part], slots(places[part])))
    after = sidecar.port("requests")
    assert after["release"] - before.get("release", 0) == 3, "each read uses the query's lease"
    assert after["match_hashes"] == before["match_hashes"]
    assert (other.truth() == pool.truth()).all()


def test_a_shorter_read_than_what_was_found(sidecar: RealSidecar, make: Make) -> None:
    """Ranks agree on the smallest hit, so a read may want less than was leased, or other pages."""
    sidecar.start()
    pool, names = filled(make, "page_head", 6)
    other = MHATokenToKVPoolHost("page_head")
    r = make(other)
    assert r.batch_exists(names) == 6
    assert r.batch_get_v1(names[:2], slots([1, 0])) == [True, True]
    assert r.batch_exists(names) == 6
    assert r.batch_get_v1([names[0], names[5]], slots([7, 8])) == [True, True]
    assert (other.truth()[:, [1, 0, 7, 8]] == pool.truth()[:, [0, 1, 0, 5]]).all()
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)


def test_what_is_found_and_not_read_is_given_back(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    _, names = filled(make, "page_first", 4)
    r = make(MHATokenToKVPoolHost("page_first"))
    for _ in range(3):
        assert r.batch_exists(names) == 4
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 1)
    r.close()
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)


def test_stored_twice_moves_no_bytes(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool, names = filled(make, "page_first", 4)
    again = make(pool)
    assert again.batch_set_v1(names, slots([0, 1, 2, 3])) == [True] * 4
    assert sidecar.port("stored_pages") == 4
    assert again.recorder.count("stores_existing") == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_in_tensors_of_their_own(sidecar: RealSidecar, make: Make, layout: str) -> None:
    """The interface without interface_v1; its pages are those of the other one."""
    sidecar.start()
    pool, names = MHATokenToKVPoolHost(layout, 1), keys(3)
    b = make(pool)
    assert b.batch_set(names, [pool.get_data_page(p * P) for p in (5, 6, 7)]) is True
    other = MHATokenToKVPoolHost(layout)
    assert make(other).batch_get_v1(names, slots([0, 1, 2])) == [True] * 3
    assert (other.truth()[:, :3] == pool.truth()[:, 5:8]).all()
    into = [Tensor(np.zeros(PAGE_BYTES // 4, np.float32)) for _ in range(4)]
    got = b.batch_get([*names, keys(1, 5)[0]], into)
    assert [t is into[i] for i, t in enumerate(got)] == [True, True, True, False]
    assert got[3] is None
    for t, p in zip(into, (5, 6, 7), strict=False):
        assert (t.array == pool.get_data_page(p * P).array).all()
    one = Tensor(np.zeros(PAGE_BYTES // 4, np.float32))
    assert b.get(names[1], one) is one
    assert b.set(keys(1, 7)[0], pool.get_data_page(0)) is True
    assert b.exists(keys(1, 7)[0])
    short = Tensor(np.zeros(PAGE_BYTES // 4 - 1, np.float32))
    assert b.get(names[0], short) is None
    assert b.set(keys(1, 8)[0], short) is False
    assert b.set(keys(1, 8)[0]) is False


def test_latents_are_one_shard_for_all_ranks(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool, names = MLATokenToKVPoolHost("page_first", 1), keys(3)
    ranks = {"tp_size": 2, "is_mla_model": True}
    assert all(make(pool, config=ranks).batch_set_v1(names, slots([0, 1, 2])))
    other = MLATokenToKVPoolHost("page_first")
    assert all(make(other, config=ranks | {"tp_rank": 1}).batch_get_v1(names, slots([0, 1, 2])))
    assert (other.kv_buffer.array[: 3 * P] == pool.kv_buffer.array[: 3 * P]).all()


def test_two_ranks(sidecar: RealSidecar, make: Make) -> None:
    """A page is there when every rank has stored its part; each rank loads its own."""
    sidecar.start()
    pools = [MHATokenToKVPoolHost("page_first_direct", seed, heads=1) for seed in (1, 2)]
    both = [make(p, config={"tp_size": 2, "tp_rank": i}) for i, p in enumerate(pools)]
    names, where = keys(4), slots([0, 1, 2, 3])
    assert all(both[0].batch_set_v1(names, where))
    assert [b.batch_exists(names) for b in both] == [0, 0]
    assert all(both[1].batch_set_v1(names, where))
    assert [b.batch_exists(names) for b in both] == [4, 4]
    for i in (1, 0):
        want = pools[i].truth().copy()
        pools[i].kv_buffer.array[:] = 0
        assert all(both[i].batch_get_v1(names, where))
        assert (pools[i].truth()[:, :4] == want[:, :4]).all()
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)


def test_v2(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool, names = MHATokenToKVPoolHost("page_first", 1), keys(2)
    b = make(pool)
    kv, swa = PoolTransfer("kv", slots([0, 1]), names), PoolTransfer("swa", slots([0]), names[:1])
    assert b.batch_set_v2([kv, swa]) == {"kv": [True, True], "swa": [False]}
    assert b.batch_get_v2([kv, swa]) == {"kv": [True, True], "swa": [False]}
    assert b.batch_exists_v2(names, [kv]).kv_hit_pages == 2
    assert b.batch_exists_v2(names, [swa]).kv_hit_pages == 0


def test_clear_and_statistics(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool, names = MHATokenToKVPoolHost("page_first", 1), keys(3)
    b = make(pool, config={"enable_storage_metrics": True})
    assert all(b.batch_set_v1(names, slots([0, 1, 2])))
    assert all(b.batch_get_v1(names, slots([3, 4, 5])))
    stats = b.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([3], [3])
    assert stats.prefetch_bandwidth[0] > 0 and stats.backup_bandwidth[0] > 0
    assert b.get_stats().prefetch_pgs == []
    b.clear()
    assert b.batch_exists(names) == 0
    assert make(MHATokenToKVPoolHost("page_first")).get_stats() is None
    b.close()
    b.close()
    assert b.batch_set_v1(names, slots([0, 1, 2])) == [False] * 3


def test_wrong_arguments_are_misses(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool, names = filled(make, "page_first", 3)
    before = pool.truth().copy()
    b = make(pool)
    odd = slots([0, 1, 2])
    odd.array[:] += 1
    for places in (slots([0, 1]), slots([0, 1, standin.N]), odd):
        assert b.batch_get_v1(names, places) == [False] * 3
        assert b.batch_set_v1(keys(3, 4), places) == [False] * 3
    for wrong in (["no hash"] * 2, ["00"] * 2, [names[0][:-2], names[1] + "00"][::-1][:1]):
        assert b.batch_exists(wrong) == 0
        assert b.batch_get_v1(wrong, slots(list(range(len(wrong))))) == [False] * len(wrong)
        assert b.batch_set_v1(wrong, slots(list(range(len(wrong))))) == [False] * len(wrong)
    assert (pool.truth() == before).all()
    assert b.batch_get_v1(names, slots([0, 1, 2])) == [True] * 3
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)


# The sidecar's absence and failures.


def nothing(b: MembraneHiCache, names: list[str], limit: float) -> None:
    """Every call is a miss and ends in time."""
    where = slots(list(range(len(names))))
    for call, want in (
        (lambda: b.batch_exists(names), 0),
        (lambda: b.batch_get_v1(names, where), [False] * len(names)),
        (lambda: b.batch_set_v1(names, where), [False] * len(names)),
        (lambda: b.exists(names[0]), False),
        (b.clear, None),
    ):
        began = time.monotonic()
        assert call() == want
        assert time.monotonic() - began < limit


def test_absent_sidecar_is_an_empty_cache_until_it_is_there(
    sidecar: RealSidecar, make: Make
) -> None:
    pool, names = MHATokenToKVPoolHost("page_first", 1), keys(3)
    b = make(pool, connected=False)
    nothing(b, names, AT_ONCE_S)
    sidecar.start()
    up(b)
    assert all(b.batch_set_v1(names, slots([0, 1, 2])))
    assert b.batch_exists(names) == 3


def test_killed_sidecar_and_its_successor(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool, names = MHATokenToKVPoolHost("page_first", 1), keys(3)
    b = make(pool, **DEADLINES)
    assert all(b.batch_set_v1(names, slots([0, 1, 2])))
    assert b.batch_exists(names) == 3  # leaves a lease of this life behind
    sidecar.kill()
    nothing(b, names, AT_ONCE_S)
    sidecar.start()
    up(b)
    assert b.batch_get_v1(names, slots([0, 1, 2])) == [False] * 3
    assert all(b.batch_set_v1(names, slots([0, 1, 2])))
    assert b.batch_exists(names) == 3


def test_stopped_sidecar_costs_one_deadline(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    pool, names = MHATokenToKVPoolHost("page_first", 1), keys(3)
    b = make(pool, **DEADLINES)
    assert all(b.batch_set_v1(names, slots([0, 1, 2])))
    sidecar.halt(True)
    try:
        began = time.monotonic()
        assert b.batch_exists(names) == 0
        assert 0.9 < time.monotonic() - began < 1.9
        nothing(b, names, AT_ONCE_S)  # it owes an answer: nobody waits for it again
    finally:
        sidecar.halt(False)
    # What the late answer brought is given back.
    eventually(lambda: sidecar.stats()["cache"]["leases_granted"] == 1)
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)
    assert sidecar.stats()["cache"]["leases_expired"] == 0
    eventually(lambda: b.batch_exists(names) == 3, 10)


@pytest.mark.parametrize("call", ["get", "set"])
def test_sidecar_stopped_in_the_middle(
    sidecar: RealSidecar, make: Make, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar.start()
    pool, names = filled(make, "page_first", 3)
    b = make(pool, **DEADLINES)
    assert b._pool is not None
    copy = {"get": "fill", "set": "take"}[call]
    real = getattr(b._pool, copy)

    def halting(*args: Any) -> None:
        real(*args)
        sidecar.halt(True)

    monkeypatch.setattr(b._pool, copy, halting)
    assert b.batch_exists(names) == 3
    try:
        began = time.monotonic()
        if call == "get":
            assert b.batch_get_v1(names, slots([0, 1, 2])) == [False] * 3
        else:
            assert b.batch_set_v1(keys(3, 6), slots([0, 1, 2])) == [False] * 3
        assert time.monotonic() - began < 1.9
    finally:
        sidecar.halt(False)
    monkeypatch.undo()
    eventually(lambda: b.batch_exists(names) == 3, 10)


def test_lease_that_ends_while_pages_are_copied(
    sidecar: RealSidecar, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar.start()
    pool, names = filled(make, "page_first", 3)
    b = make(pool, lease_ms=200, load_deadline_ms=5000)
    assert b._pool is not None
    real = b._pool.fill

    def slow(*args: Any) -> None:
        real(*args)
        eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)

    monkeypatch.setattr(b._pool, "fill", slow)
    assert b.batch_get_v1(names, slots([0, 1, 2])) == [False] * 3
    assert b.recorder.count("failed_loads_expired") == 1


def test_lease_that_has_ended_is_asked_for_again(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    _, names = filled(make, "page_first", 3)
    b = make(MHATokenToKVPoolHost("page_first"), lease_ms=100)
    assert b.batch_exists(names) == 3
    eventually(lambda: sidecar.stats()["cache"]["leases"] == 0)
    assert b.batch_get_v1(names, slots([0, 1, 2])) == [True] * 3


def test_object_of_another_size_is_not_read(
    sidecar: RealSidecar, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar.start()
    _, names = filled(make, "page_first", 3)
    pool = MHATokenToKVPoolHost("page_first")
    b = make(pool)
    assert b._matcher is not None
    monkeypatch.setattr(b._matcher, "page_bytes", PAGE_BYTES - 4)
    assert b.batch_exists(names) == 0
    assert b.batch_get_v1(names, slots([0, 1, 2])) == [False] * 3
    assert not pool.truth().any()


def test_inbox_without_room_and_pages_without(tmp_path: Path, make: Make) -> None:
    """Pages go inline where no inbox slot fits, and a page above the budget is refused."""
    folder = tmp_path / "small"
    folder.mkdir()
    small = RealSidecar(folder, "--inbox", "4096")
    small.start()
    try:
        pool, names = MHATokenToKVPoolHost("page_first", 1), keys(3)
        b = make(pool, sidecar=small.socket)
        assert b._session is not None and b._session.up is not None
        assert b._session.up.registered.inbox_slots == 0
        assert all(b.batch_set_v1(names, slots([0, 1, 2])))
        other = MHATokenToKVPoolHost("page_first")
        assert all(make(other, sidecar=small.socket).batch_get_v1(names, slots([0, 1, 2])))
        assert (other.truth()[:, :3] == pool.truth()[:, :3]).all()
    finally:
        small.kill()


# What SGLang is told to run without the cache.


def unusual(change: Callable[[MHATokenToKVPoolHost], object]) -> MHATokenToKVPoolHost:
    pool = MHATokenToKVPoolHost("page_first")
    change(pool)
    return pool


def changed(**fields: Any) -> Callable[[MHATokenToKVPoolHost], object]:
    return lambda pool: vars(pool).update(fields)


class MambaPoolHost(MHATokenToKVPoolHost):
    """A pool of another kind."""


@pytest.mark.parametrize(
    ("pool", "args", "config", "sentence"),
    [
        (unusual(changed(page_size=1)), {}, {}, "--page-size is 1: set it to 16 or more"),
        (unusual(changed(layout="page_unified")), {}, {}, "--hicache-mem-layout is page_unified"),
        (unusual(changed(dtype="torch.uint8")), {}, {}, "KV in uint8"),
        (unusual(changed(v_head_dim=4)), {}, {}, "values of 4 and keys of 8"),
        (unusual(changed(layer_num=4)), {}, {}, "draft model"),
        (unusual(changed(kv_buffer=Tensor(np.zeros(4, np.float32)))), {}, {}, "the shape (4,)"),
        (MambaPoolHost("page_first"), {}, {}, "its host pool is a MambaPoolHost"),
        (None, {"speculative_algorithm": "EAGLE"}, {}, "speculative decoding is on"),
        (None, {"kv_cache_dtype": "fp8_e4m3"}, {}, "KV in fp8_e4m3"),
        (None, {"load_format": "dummy"}, {}, "made up"),
        (None, {"model_path": "/nowhere"}, {}, "have no name: set weights_id"),
        (None, {"layers": 9}, {}, "layers 0 to 3 keep KV, of 9"),
        (None, {"kv_heads": 8}, {}, "2 KV heads on each of 1 ranks, of 8"),
        (None, {}, {"attn_cp_size": 2}, "attn_cp_size is 2"),
        (None, {}, {"extra_config": {"sidecars": "x"}}, "sidecars is not a setting"),
        (None, {}, {"extra_config": {"lease_ms": "x"}}, "lease_ms is 'x'"),
    ],
)
def test_runs_without_the_cache(
    pool: Any,
    args: dict[str, Any],
    config: dict[str, Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in args.items():
        monkeypatch.setattr(standin.SERVER, name, value)
    given = Config({"sidecar": "/nowhere", "interface_v1": 1})
    b = MembraneHiCache(dataclasses.replace(given, **config), {})
    b.register_mem_pool_host(pool or MHATokenToKVPoolHost("page_first"))
    b.on_host_pools_registered()
    assert sentence in off(b)
    nothing(b, keys(2), AT_ONCE_S)
    assert b.batch_get(keys(2)) == [None, None]
    assert b.batch_exists_v2(keys(2)).kv_hit_pages == 0
    b.close()


def test_model_with_further_pools_runs_without_the_cache(sidecar: RealSidecar, make: Make) -> None:
    sidecar.start()
    b = make(pool := MHATokenToKVPoolHost("page_first", 1))
    b.register_mem_host_pool_v2(pool, "mamba")
    assert off(b) == "the model keeps mamba beside KV"
    nothing(b, keys(2), AT_ONCE_S)


def test_heads_and_layers_of_a_rank(make: Make, sidecar: RealSidecar) -> None:
    """Windows are those of the whole model, with fewer heads than ranks, too."""

    def windows(**config: Any) -> tuple[list[int], list[int]]:
        pool = MHATokenToKVPoolHost("page_first", heads=1)
        if config.get("pp_size", 1) > 1:
            pool.start_layer, pool.end_layer = 3, 6
        b = make(pool, connected=False, config=config)
        assert not off(b)
        r = b.recorder.snapshot()["registration"]
        assert isinstance(r, dict)
        return r["descriptor"]["layers"], r["descriptor"]["heads"]

    assert windows(tp_size=2, tp_rank=1) == ([0, 3], [1, 2])
    assert windows(tp_size=4, tp_rank=1) == ([0, 3], [0, 1])
    assert windows(tp_size=4, tp_rank=2) == ([0, 3], [1, 2])
    standin.SERVER.layers = 6
    assert windows(tp_size=2, tp_rank=1, pp_size=2, pp_rank=1) == ([3, 6], [1, 2])


def test_hooks_are_counted_and_written(sidecar: RealSidecar, make: Make, tmp_path: Path) -> None:
    sidecar.start()
    b = make(MHATokenToKVPoolHost("page_first", 1), stats_file=str(tmp_path / "stats"))
    assert all(b.batch_set_v1(keys(2), slots([0, 1])))
    assert b.batch_exists(["no hash"]) == 0
    b.close()
    written = json.loads(next(tmp_path.glob("stats.hicache-0-0.*.json")).read_text())
    assert written["counts"]["stored_pages"] == 2
    assert written["counts"]["hook_errors"] == 1
    assert written["hooks"]["batch_set_v1"]["n"] == 1
    assert len(written["sums"]["stored"]) == 2
