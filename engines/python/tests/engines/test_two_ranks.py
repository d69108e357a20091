"""An engine of two worker ranks: a page is two shards, and is offered only when both are there."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matrix
import pytest
from checks import PAGES, N, crossing, hooks_in_time, leased_pages, memfds, port, quiet, same
from harness import PAGE, Answer, Engine, Sidecar, eventually, make_model, prompt

LEASE_MS, LOAD_PATIENCE_MS = 2000, 5000


@pytest.fixture(scope="module")
def engines(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    model = make_model("tiny")
    sidecar = Sidecar("sidecar-ranks", logs, tmp_path_factory.mktemp("sockets"))
    made = [Engine("vllm-ranks", logs, model, sidecar), Engine("vllm-one", logs, model, None)]
    try:
        made[0].start(
            *("--tensor-parallel-size", "2"),
            extra={"lease_ms": LEASE_MS, "load_deadline_ms": LOAD_PATIENCE_MS},
        )
        made[1].start()
        sidecar.start()
        for engine in made:
            engine.wait()
        yield made
    finally:
        for process in (*made, sidecar):
            process.stop()


def workers(engine: Engine) -> list[dict[str, Any]]:
    """Return what each rank's side has written last."""
    files = engine.stats_file.parent.glob(f"{engine.stats_file.name}.worker.*.json")
    ranks = [json.loads(f.read_text()) for f in files]
    return sorted(ranks, key=lambda v: int(v["registration"]["descriptor"]["tp_rank"]))


def counts(engine: Engine, name: str) -> list[int]:
    return [int(w["counts"].get(name, 0)) for w in workers(engine)]


def test_both_shards_are_stored_and_loaded(engines: list[Engine]) -> None:
    ranks, one = engines
    ids = prompt(N, 51)
    want = one.complete(ids)
    ranks.complete(ids, 1)
    eventually(lambda: counts(ranks, "stored_pages") == [PAGES] * 2, "the store of both shards")
    ranks.forget()
    start = port(sidecar_of(ranks))
    got = ranks.complete(ids)
    now = port(sidecar_of(ranks))
    matrix.record(crossing("vLLM TP 2", "vLLM TP 2", start, now, got, want))
    assert got.cached == PAGES * PAGE
    assert got.tokens == want.tokens
    eventually(lambda: counts(ranks, "loaded_pages") == [PAGES] * 2, "the load of both shards")
    for worker in workers(ranks):
        assert worker["sums"]["loaded"] == worker["sums"]["stored"]
    shards = [w["sums"]["stored"] for w in workers(ranks)]
    assert set(shards[0]).isdisjoint(shards[1])


def sidecar_of(engine: Engine) -> Sidecar:
    assert engine.sidecar is not None
    return engine.sidecar


def stored(engines: list[Engine], seed: int) -> tuple[list[int], Answer]:
    """Return a prompt whose shards are all stored, and its right answer."""
    ranks, one = engines
    ids = prompt(N, seed)
    want = one.complete(ids)
    quiet(ranks)
    before = counts(ranks, "stored_pages")
    ranks.complete(ids, 1)
    eventually(lambda: counts(ranks, "stored_pages") == [n + PAGES for n in before], "the store")
    ranks.forget()
    return ids, want


def loads_again(ranks: Engine, ids: list[int], want: Answer) -> None:
    """Every page is served to both ranks, and is good."""
    before = counts(ranks, "loaded_pages")
    ranks.forget()
    got = ranks.complete(ids)
    same(got, want)
    assert got.cached == PAGES * PAGE
    eventually(
        lambda: all(n > b for n, b in zip(counts(ranks, "loaded_pages"), before, strict=True)),
        "the load of both shards",
    )


def test_pages_of_another_tensor_parallel_size(engines: list[Engine], logs: Path) -> None:
    """An engine of one rank reads the pages of two, and the other way round: the same tokens."""
    ranks, one = engines
    sidecar = sidecar_of(ranks)

    def translated() -> int:
        return int(port(sidecar)["translated"]["pages"])

    single = Engine("vllm-single", logs, ranks.model, sidecar)
    try:
        single.start()
        single.wait()
        ids, want = stored(engines, 71)
        start = port(sidecar)
        before = translated()
        got = single.complete(ids)
        matrix.record(crossing("vLLM TP 2", "vLLM TP 1", start, port(sidecar), got, want))
        assert got.cached == PAGES * PAGE
        assert got.tokens == want.tokens
        assert translated() == before + PAGES

        ids = prompt(N, 73)
        want = one.complete(ids)
        had = single.count("worker", "stored_pages")
        single.complete(ids, 1)
        eventually(
            lambda: single.count("worker", "stored_pages") == had + PAGES, "the store of one rank"
        )
        loaded = counts(ranks, "loaded_pages")
        start = port(sidecar)
        got = ranks.complete(ids)
        matrix.record(crossing("vLLM TP 1", "vLLM TP 2", start, port(sidecar), got, want))
        assert got.cached == PAGES * PAGE
        assert got.tokens == want.tokens
        assert translated() == before + 2 * PAGES
        eventually(
            lambda: counts(ranks, "loaded_pages") == [n + PAGES for n in loaded],
            "the load of both shards",
        )
    finally:
        assert not single.stop(), "it had to be killed"
    eventually(lambda: len(sidecar.status()["engines"]["engines"]) == 1, "that it is gone")


def test_flipped_byte_in_one_ranks_shard(engines: list[Engine]) -> None:
    """The page is not offered to the other rank either."""
    ranks = engines[0]
    ids, want = stored(engines, 53)
    shard = leased_pages(sidecar_of(ranks), ranks, ids, 1)
    assert len(shard) == PAGES
    sidecar_of(ranks).flip(shard[7][0] + 1234)
    got = ranks.complete(ids)
    same(got, want)
    assert got.cached == 7 * PAGE
    assert sidecar_of(ranks).stats()["cache"]["corrupt"] == 1
    quiet(ranks)
    loads_again(ranks, ids, want)


def test_one_rank_stopped_past_its_lease(engines: list[Engine]) -> None:
    ranks = engines[0]
    ids, want = stored(engines, 55)
    quiet(ranks)
    before = counts(ranks, "failed_loads_expired")

    def leases(what: str) -> int:
        return int(sidecar_of(ranks).stats()["cache"]["leases_" + what])

    granted, expired = leases("granted"), leases("expired")
    pid = workers(ranks)[1]["pid"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(pid, signal.SIGSTOP)
        try:
            future = pool.submit(ranks.complete, ids)
            eventually(lambda: leases("granted") > granted, "the lease")
            eventually(lambda: leases("expired") > expired, "the end of the lease")
        finally:
            os.kill(pid, signal.SIGCONT)
        same(future.result(), want)
    eventually(lambda: counts(ranks, "failed_loads_expired")[1] > before[1], "the failed load")
    loads_again(ranks, ids, want)


def test_sidecar_killed_while_both_ranks_load(engines: list[Engine]) -> None:
    ranks = engines[0]
    made = [stored(engines, seed) for seed in (57, 59, 61)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(ranks.complete, ids) for ids, _ in made]
        sidecar_of(ranks).kill()
        for future, (_, want) in zip(futures, made, strict=True):
            same(future.result(), want)
    sidecar_of(ranks).start()

    def attached() -> bool:
        return [len(r) for r in sidecar_of(ranks).ranks()] == [3]

    eventually(attached, "that the engine attaches", 30)
    ids, want = stored(engines, 63)
    loads_again(ranks, ids, want)


def test_nothing_is_left_of_it(engines: list[Engine]) -> None:
    """The last test: ends everything."""
    ranks = engines[0]
    hooks_in_time(ranks)
    eventually(sidecar_of(ranks).level, "that the sidecar is level", 30)
    processes = [*engines, sidecar_of(ranks)]
    pids = [p.pid for p in processes]
    killed = {p.name: p.stop() for p in processes}
    assert not any(killed.values()), f"had to be killed: {killed}"
    assert not memfds(pids), "memory of ours is left"
