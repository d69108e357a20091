"""An SGLang server of two ranks: each stores and loads its own shard of a page."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import matrix
import pytest
from checks import crossing, memfds, port, same
from harness import PAGE, Sidecar, eventually, make_model, prompt
from sglang_harness import SGLang

N = 1000
PAGES = N // PAGE
RANKS = (0, 1)


@pytest.fixture(scope="module")
def server(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    """Start a server of two ranks before its sidecar is there."""
    sidecar = Sidecar("sidecar-ranks", logs, tmp_path_factory.mktemp("sockets"))
    s = SGLang("sglang-ranks", logs, make_model("tiny"), sidecar)
    try:
        s.launch_server(
            "page_first_direct", "direct", "--tp-size", "2", "--disable-custom-all-reduce"
        )
        s.wait()
        yield s
    finally:
        s.stop()
        sidecar.stop()


def sidecar_of(server: SGLang) -> Sidecar:
    assert server.sidecar is not None
    return server.sidecar


def counts(server: SGLang, name: str) -> list[int]:
    return [server.counted(name, rank) for rank in RANKS]


def test_it_serves_without_a_sidecar_and_finds_it_later(server: SGLang) -> None:
    ids = prompt(N, 41)
    want = server.generate(ids)
    server.forget()
    got = server.generate(ids)
    same(got, want)
    assert got.cached == 0
    assert not any(counts(server, "stored_pages"))
    sidecar_of(server).start()

    def attached() -> bool:
        # A name of its own for each rank, so that the sidecar has two engines.
        found = sorted(r for ranks in sidecar_of(server).ranks() for r in ranks)
        return found == ["worker 0/2 on socket", "worker 1/2 on socket"]

    eventually(attached, "that both ranks attach", 30)


def test_both_shards_are_stored_and_loaded(server: SGLang) -> None:
    first = port(sidecar_of(server))
    ids = prompt(N, 43)
    want = server.generate(ids)
    eventually(lambda: counts(server, "stored_pages") == [PAGES] * 2, "the store of both shards")
    server.forget()
    start = port(sidecar_of(server))
    got = server.generate(ids)
    loaded = port(sidecar_of(server))
    matrix.record(crossing("SGLang TP 2", "SGLang TP 2", start, loaded, got, want, asks=2))
    same(got, want)
    assert (got.cached, got.storage) == (PAGES * PAGE, PAGES * PAGE)
    eventually(lambda: counts(server, "loaded_pages") == [PAGES] * 2, "the load of both shards")
    for rank in RANKS:
        r = server.rank(rank)
        assert r["sums"]["loaded"] == r["sums"]["stored"]
        assert r["registration"]["descriptor"]["heads"] == [rank, rank + 1]
        assert "off" not in r and r["counts"].get("hook_errors", 0) == 0
    shards = [server.rank(rank)["sums"]["stored"] for rank in RANKS]
    assert set(shards[0]).isdisjoint(shards[1])
    now = port(sidecar_of(server))
    both = PAGES * sum(server.page_bytes(rank) for rank in RANKS)
    assert now["stored_bytes"] - first["stored_bytes"] == both
    eventually(sidecar_of(server).level, "that the sidecar is level")


def test_sidecar_stopped_and_killed(server: SGLang) -> None:
    """Ranks agree on a hit whatever one of them sees, and go on."""
    ids = prompt(N, 45)
    want = server.generate(ids)
    eventually(lambda: min(counts(server, "stored_pages")) >= 2 * PAGES, "the store")
    server.forget()
    sidecar_of(server).signal(signal.SIGSTOP)
    try:
        same(server.generate(ids), want)
    finally:
        sidecar_of(server).signal(signal.SIGCONT)
    server.forget()
    sidecar_of(server).kill()
    same(server.generate(ids), want)
    sidecar_of(server).start()

    def hits() -> bool:
        fresh = server.generate(ids, 1)
        same_tokens = fresh.tokens == want.tokens[:1]
        server.forget()
        return bool(same_tokens and server.generate(ids, 1).storage == PAGES * PAGE)

    server.forget()
    eventually(hits, "that pages are stored and loaded again", 60)


def test_nothing_is_left_of_it(server: SGLang) -> None:
    """The last test: ends everything."""
    pids = [server.pid, sidecar_of(server).pid]
    for rank in RANKS:
        assert server.rank(rank)["counts"].get("hook_errors", 0) == 0
    eventually(sidecar_of(server).level, "that the sidecar is level", 30)
    server.stop()
    sidecar_of(server).stop()
    assert not memfds(pids), "memory of ours is left"
