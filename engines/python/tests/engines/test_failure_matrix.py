"""What goes wrong around an engine: every answer is right, nothing is kept, pages stay good.

`small` computes 256 tokens at a time, has few KV blocks, and a sidecar that
comes late and is restarted. `other` has other weights of the same shape, and
reaches that sidecar over TCP, through a proxy that can hold an answer back.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import (
    PAGES,
    N,
    counted,
    hooks_in_time,
    memfds,
    page_bytes,
    prefill,
    quiet,
    registration,
    same,
)
from harness import (
    BLOCK,
    PAGE,
    Answer,
    Cluster,
    Engine,
    Proxy,
    Sidecar,
    eventually,
    free_port,
    make_model,
    prompt,
)
from membrane_kv.client import Client
from membrane_kv.wire import WireError

MODEL_LEN = 1280
BLOCKS = MODEL_LEN // BLOCK + 2
BLOCK_BYTES = 64 << 10
MATCH_PATIENCE_MS, LOAD_PATIENCE_MS, LEASE_MS = 10_000, 5000, 2000


class Matrix:
    """The two engines, their sidecar, and the cluster beside them."""

    def __init__(self, cluster: Cluster, logs: Path, folder: Path) -> None:
        self.cluster = cluster
        self.sidecar = Sidecar("sidecar-c", logs, folder)
        self.sidecar.peers = [f"127.0.0.1:{cluster.b.port}"]
        port = free_port()
        self.link = Proxy("127.0.0.1", port, ("127.0.0.1", self.sidecar.engine_port))
        self.small = Engine("vllm-small", logs, make_model("tiny"), self.sidecar)
        self.other = Engine("vllm-other", logs, make_model("tiny", 8), self.sidecar)
        self.alone: list[tuple[list[int], Answer]] = []

    def start(self) -> None:
        """Boot the engines and let `small` serve; then start the sidecar."""
        self.small.start(
            *("--max-num-batched-tokens", "256", "--max-model-len", str(MODEL_LEN)),
            *("--kv-cache-memory-bytes", str(BLOCKS * BLOCK_BYTES)),
            extra={
                "match_deadline_ms": MATCH_PATIENCE_MS,
                "load_deadline_ms": LOAD_PATIENCE_MS,
                "lease_ms": LEASE_MS,
            },
        )
        self.other.start(
            extra={
                "sidecar": self.link.address,
                "inline": True,
                "load_deadline_ms": LOAD_PATIENCE_MS,
                "lease_ms": LEASE_MS,
            },
        )
        for engine in (self.small, self.other):
            engine.wait()
        ids = self.fresh()
        self.alone.append((ids, self.small.complete(ids)))
        self.sidecar.start()
        self.attached()

    def fresh(self, n: int = N) -> list[int]:
        """Return a prompt that nobody has seen."""
        ids: list[int] = prompt(n, self.cluster.fresh())
        return ids

    def want(self, ids: list[int], n: int = 16) -> Answer:
        """Return what an engine without connector answers."""
        return self.cluster.plain.complete(ids, n)

    def attached(self) -> None:
        """Wait until both processes of both engines have found the sidecar, `small` by socket."""
        local = ["scheduler 0/1 on socket", "worker 0/1 on socket"]

        def attached() -> bool:
            ranks = self.sidecar.ranks()
            return local in ranks and [len(r) for r in ranks] == [2, 2]

        eventually(attached, "that the engines attach", 30)

    def restart(self, *flags: str) -> None:
        """Let an empty sidecar with other flags follow the present one."""
        self.sidecar.kill()
        self.sidecar.flags = list(flags)
        self.sidecar.start()
        self.attached()

    def cache(self, name: str) -> int:
        """Return a counter of the sidecar's cache, over all reasons."""
        value = counter(self.sidecar, name)
        return sum(value.values()) if isinstance(value, dict) else int(value)


@pytest.fixture(scope="module")
def matrix(
    cluster: Cluster, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    m = Matrix(cluster, logs, tmp_path_factory.mktemp("sockets"))
    try:
        m.start()
        yield m
    finally:
        m.link.close()
        for p in (m.small, m.other, m.sidecar):
            p.stop()


def nothing_kept(engine: Engine, *sidecars: Sidecar) -> None:
    """Wait until the engine's blocks are free and the sidecars have no lease, chain or slot."""

    def blocks_free() -> bool:
        engine.complete(prompt(40, 1), 1)  # its figures are those of its last step
        return bool(engine.metric("vllm:kv_cache_usage_perc") == 0)

    eventually(blocks_free, f"that the blocks of {engine.name} are free", 30)
    for s in sidecars:
        eventually(s.level, f"that {s.name} is level", 30)


def good_in_store(engine: Engine, ids: list[int], want: Answer, at_least: int) -> None:
    """Let the engine forget what it has itself, and answer from the sidecar's pages."""
    engine.forget()
    got = engine.complete(ids)
    same(got, want)
    assert got.cached >= at_least


def counter(sidecar: Sidecar, name: str) -> Any:
    """Return a counter of a sidecar's cache, as soon as it answers."""
    found: dict[str, Any] = {}
    eventually(lambda: found.update(sidecar.stats().get("cache", {})) or found, "an answer")
    return found[name]


def store(engine: Engine, ids: list[int]) -> None:
    """Let an engine compute a new prompt, and wait until its sidecar has every page of it."""
    sidecar = engine.sidecar
    assert sidecar is not None
    before = counter(sidecar, "puts")
    engine.complete(ids, 1)
    eventually(lambda: counter(sidecar, "puts") >= before + len(ids) // PAGE, "the store")


def unchanged(value: Callable[[], Any], seconds: float) -> None:
    """Wait until a value has been the same for this long."""
    seen: list[tuple[Any, float]] = [(value(), time.monotonic())]

    def settled() -> bool:
        now = value()
        if now != seen[-1][0]:
            seen.append((now, time.monotonic()))
        return time.monotonic() - seen[-1][1] > seconds

    eventually(settled, "that nothing changes", 30)


def all_at_once(engine: Engine, prompts: list[list[int]], n: int = 16) -> list[Answer]:
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: engine.complete(p, n), prompts))


def test_engine_that_found_no_sidecar_at_its_start(matrix: Matrix) -> None:
    for ids, got in matrix.alone:
        same(got, matrix.want(ids))
        assert got.cached == 0
    ids = matrix.fresh()
    want = matrix.want(ids)
    store(matrix.small, ids)
    good_in_store(matrix.small, ids, want, PAGES * PAGE)
    nothing_kept(matrix.small, matrix.sidecar)


def test_eight_prompts_at_a_time_with_shared_prefixes(matrix: Matrix) -> None:
    c = matrix.cluster
    prefixes = [matrix.fresh(512), matrix.fresh(512)]
    prompts = [p + matrix.fresh(200) for p in prefixes for _ in range(3)]
    prompts += [prompts[0], matrix.fresh(600)]
    want = [matrix.want(p) for p in prompts]
    for p in (prompts[0], prompts[3][:512]):
        store(c.engine_a, p)
    quiet(c.engine_b)
    loads = c.engine_b.count("worker", "loads")
    for g, w in zip(all_at_once(c.engine_b, prompts), want, strict=True):
        same(g, w)
    counted(c.engine_b, "worker", "loads", loads)
    nothing_kept(c.engine_b, c.a, c.b)
    for p, w in zip(prompts, want, strict=True):
        good_in_store(c.engine_b, p, w, 512)


def test_chunked_prefill_is_loaded_by_another_and_the_other_way(matrix: Matrix) -> None:
    c = matrix.cluster
    eventually(lambda: c.b.knows(matrix.sidecar), "that the sidecars meet", 60)
    eventually(lambda: matrix.sidecar.knows(c.a), "that the sidecars meet", 60)
    for writer, reader in ((matrix.small, c.engine_b), (c.engine_a, matrix.small)):
        ids = matrix.fresh()
        want = matrix.want(ids)
        quiet(writer)
        prefill(writer, ids)
        written = writer.sums("worker", "stored")[-PAGES:]
        quiet(reader)
        loads = reader.count("worker", "loads")
        got = reader.complete(ids)
        same(got, want)
        assert got.cached == PAGES * PAGE
        counted(reader, "worker", "loads", loads)
        assert reader.sums("worker", "loaded")[-PAGES:] == written
    nothing_kept(matrix.small, matrix.sidecar, c.a, c.b)


def test_sidecar_restarted_empty(matrix: Matrix) -> None:
    ids = matrix.fresh()
    want = matrix.want(ids)
    store(matrix.small, ids)
    matrix.small.forget()
    matrix.sidecar.kill()
    same(matrix.small.complete(ids), want)
    matrix.small.forget()
    matrix.restart()
    got = matrix.small.complete(ids)
    same(got, want)
    assert got.cached == 0
    again = matrix.fresh()
    want = matrix.want(again)
    store(matrix.small, again)
    good_in_store(matrix.small, again, want, PAGES * PAGE)
    nothing_kept(matrix.small, matrix.sidecar)


def test_arena_smaller_than_a_prompt(matrix: Matrix) -> None:
    small = matrix.small
    matrix.restart("--memory=1MiB")
    prompts = [matrix.fresh() for _ in range(3)]
    want = [matrix.want(p) for p in prompts]
    for _ in range(2):
        for g, w in zip(all_at_once(small, prompts), want, strict=True):
            same(g, w)
        small.forget()
    assert matrix.cache("evictions") > 2 * PAGES
    nothing_kept(small, matrix.sidecar)


def test_arena_smaller_than_a_page(matrix: Matrix) -> None:
    small = matrix.small
    matrix.restart("--memory=1MiB", f"--page-tokens={N // BLOCK * BLOCK}")
    refused = small.count("worker", "dropped_stores_too_large")
    ids = matrix.fresh()
    want = matrix.want(ids)
    for _ in range(2):
        got = small.complete(ids)
        same(got, want)
        assert got.cached == 0
        small.forget()
    counted(small, "worker", "dropped_stores_too_large", refused + 1)
    nothing_kept(small, matrix.sidecar)


@pytest.mark.parametrize("pages", [0, 2])
def test_inbox_smaller_than_a_prompt(matrix: Matrix, pages: int) -> None:
    matrix.restart(f"--inbox={pages * page_bytes(matrix.small)}")
    assert matrix.sidecar.status()["engines"]["inbox_free_bytes"] <= 1
    prompts = [matrix.fresh() for _ in range(2)]
    want = [matrix.want(p) for p in prompts]
    for p, w in zip(prompts, want, strict=True):
        store(matrix.small, p)
        good_in_store(matrix.small, p, w, PAGES * PAGE)
    nothing_kept(matrix.small, matrix.sidecar)


def test_other_weights_of_equal_shape(matrix: Matrix) -> None:
    small, other = matrix.small, matrix.other
    matrix.restart()
    ids = matrix.fresh()
    mine = matrix.want(ids)
    store(small, ids)
    theirs = other.complete(ids, salt="another")
    assert theirs.tokens != mine.tokens
    quiet(other)
    # The same tokens are here, of a model that this one is not.
    elsewhere = other.count("scheduler", "misses_namespace")
    got = other.complete(ids)
    same(got, theirs)
    assert got.cached == 0
    counted(other, "scheduler", "misses_namespace", elsewhere)
    good_in_store(small, ids, mine, PAGES * PAGE)
    good_in_store(other, ids, theirs, PAGES * PAGE)
    nothing_kept(other, matrix.sidecar)


def test_client_gone_while_the_match_is_pending(matrix: Matrix) -> None:
    small = matrix.small
    ids = matrix.fresh()
    want = matrix.want(ids)
    store(small, ids)
    small.forget()
    quiet(small)
    granted = matrix.cache("leases_granted")

    def asked() -> int:
        return int(small.count("scheduler", "none_answers"))

    before = asked()
    matrix.sidecar.signal(signal.SIGSTOP)
    try:
        with small.disconnectable(ids, 500):
            eventually(lambda: asked() > before, "that the match is pending")
        unchanged(asked, 2.0)
    finally:
        matrix.sidecar.signal(signal.SIGCONT)
    eventually(lambda: matrix.cache("leases_granted") > granted, "the late answer")
    nothing_kept(small, matrix.sidecar)
    good_in_store(small, ids, want, PAGES * PAGE)


@pytest.mark.parametrize("late", [False, True])
def test_client_gone_while_pages_are_loaded(matrix: Matrix, late: bool) -> None:
    """`late`: the load, too, comes to nothing."""
    other, link = matrix.other, matrix.link
    ids = matrix.fresh()
    want = other.complete(ids, salt="another")
    store(other, ids)
    other.forget()
    quiet(other)
    size, ended = page_bytes(other), "failed_loads" if late else "loads"
    before, moved = other.count("worker", ended), link.moved
    link.hold_at = moved + 5 * size
    try:
        with other.disconnectable(ids, 500):
            eventually(lambda: link.moved > moved + 4 * size, "the load")
        if late:
            counted(other, "worker", ended, before)
        else:
            unchanged(lambda: link.moved, 0.5)
    finally:
        link.behave()
    counted(other, "worker", ended, before)
    nothing_kept(other, matrix.sidecar)
    good_in_store(other, ids, want, PAGES * PAGE)


def test_client_gone_while_tokens_are_generated(matrix: Matrix) -> None:
    small = matrix.small
    ids = matrix.fresh(300)
    want = matrix.want(ids)
    made = small.metric("vllm:generation_tokens_total")
    with small.disconnectable(ids, 900):
        eventually(lambda: small.metric("vllm:generation_tokens_total") > made + 70, "some tokens")
    nothing_kept(small, matrix.sidecar)
    assert small.metric("vllm:generation_tokens_total") < made + 900
    good_in_store(small, ids, want, 256)
    longer = ids + want.tokens + matrix.want(ids + want.tokens, 50).tokens
    good_in_store(small, longer, matrix.want(longer), 256)


def test_worker_stopped_past_its_lease_while_the_arena_refills(matrix: Matrix) -> None:
    small, other = matrix.small, matrix.other
    matrix.restart("--memory=4MiB")
    ids = matrix.fresh()
    want = matrix.want(ids)
    store(small, ids)
    small.forget()
    quiet(small)
    failed = small.count("worker", "failed_loads_expired")
    granted, expired = matrix.cache("leases_granted"), matrix.cache("leases_expired")
    worker = small.stats("worker")["pid"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(worker, signal.SIGSTOP)
        try:
            future = pool.submit(small.complete, ids)
            eventually(lambda: matrix.cache("leases_granted") > granted, "the lease")
            eventually(lambda: matrix.cache("leases_expired") > expired, "the end of the lease")
            evicted = matrix.cache("evictions")

            def refilled() -> bool:
                other.complete(matrix.fresh(), 1)
                return bool(matrix.cache("evictions") > evicted + 2 * PAGES)

            eventually(refilled, "that the arena refills", 60)
        finally:
            os.kill(worker, signal.SIGCONT)
        same(future.result(), want)
    counted(small, "worker", "failed_loads_expired", failed)
    nothing_kept(small, matrix.sidecar)
    good_in_store(small, ids, want, 0)


def test_lease_ends_in_the_middle_of_a_copy(matrix: Matrix) -> None:
    small, other, link = matrix.small, matrix.other, matrix.link
    matrix.restart("--memory=4MiB")
    ids = matrix.fresh()
    want = other.complete(ids, salt="another")
    store(other, ids)
    other.forget()
    quiet(other)
    failed, loads = (other.count("worker", name) for name in ("failed_loads", "loads"))
    expired, moved, size = matrix.cache("leases_expired"), link.moved, page_bytes(other)
    link.hold_at = moved + 5 * size
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            future = pool.submit(other.complete, ids)
            eventually(lambda: link.moved > moved + 4 * size, "the load")
            eventually(lambda: matrix.cache("leases_expired") > expired, "the end of the lease")
            evicted = matrix.cache("evictions")

            def refilled() -> bool:
                small.complete(matrix.fresh(), 1)
                return bool(matrix.cache("evictions") > evicted + 2 * PAGES)

            eventually(refilled, "that the arena refills", 60)
        finally:
            link.behave()
        same(future.result(), want)
    # As expired, or by its deadline where the arena has taken long to refill.
    counted(other, "worker", "failed_loads", failed)
    assert other.count("worker", "loads") == loads
    nothing_kept(other, matrix.sidecar)
    good_in_store(other, ids, want, 0)


def test_rank_claimed_by_another_while_the_engine_has_it(matrix: Matrix) -> None:
    small = matrix.small
    matrix.restart()
    ids = matrix.fresh()
    want = matrix.want(ids)
    store(small, ids)
    deadline = time.monotonic() + 5
    claimant = Client.connect(matrix.sidecar.socket, deadline, name="test")
    try:
        mine = registration(small.stats("worker"), small.name, "worker")
        with pytest.raises(WireError) as refused:
            claimant.register(mine, deadline)
        assert "live connection" in str(refused.value)
    finally:
        claimant.close()
    good_in_store(small, ids, want, PAGES * PAGE)
    nothing_kept(small, matrix.sidecar)


def test_rank_claimed_by_another_before_the_engine_comes(matrix: Matrix) -> None:
    small = matrix.small
    ids = matrix.fresh()
    want = matrix.want(ids)
    worker = small.stats("worker")
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        matrix.sidecar.kill()
        matrix.sidecar.start()
        deadline = time.monotonic() + 5
        # Not by the socket: `attached` must not take it for the engine's worker.
        place = f"127.0.0.1:{matrix.sidecar.engine_port}"
        claimant = Client.connect(place, deadline, name="test", inline=True)
        claimant.register(registration(worker, small.name, "worker"), deadline)
    finally:
        os.kill(worker["pid"], signal.SIGCONT)
    try:
        for _ in range(2):
            got = small.complete(ids)
            same(got, want)
            assert got.cached == 0
            small.forget()
    finally:
        claimant.close()
    matrix.attached()
    again = matrix.fresh()
    want = matrix.want(again)
    store(small, again)
    good_in_store(small, again, want, PAGES * PAGE)
    nothing_kept(small, matrix.sidecar)


def test_preempted_requests(matrix: Matrix) -> None:
    small, n = matrix.small, 300
    matrix.restart()
    prompts = [matrix.fresh(300) for _ in range(3)]
    want = all_at_once(matrix.cluster.plain, prompts, n)
    before = small.metric("vllm:num_preemptions_total")
    got = all_at_once(small, prompts, n)
    assert small.metric("vllm:num_preemptions_total") > before
    for g, w in zip(got, want, strict=True):
        same(g, w)
    nothing_kept(small, matrix.sidecar)
    for p, w in zip(prompts, want, strict=True):
        longer = p + w.tokens
        good_in_store(small, longer, matrix.want(longer), 512)


def test_nothing_is_left_of_either(matrix: Matrix) -> None:
    """The last test: ends both engines and their sidecar."""
    processes = [matrix.small, matrix.other, matrix.sidecar]
    for engine in (matrix.small, matrix.other):
        hooks_in_time(engine)
    for process in processes:
        assert process.alive(), f"{process.name} has died: {process.tail()}"
    pids = [p.pid for p in processes]
    killed = {p.name: p.stop() for p in processes}
    assert not any(killed.values()), f"had to be killed: {killed}"
    assert not memfds(pids), "memory of ours is left"
