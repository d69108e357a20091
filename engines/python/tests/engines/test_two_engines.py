"""KV that vLLM A has computed is served to vLLM B by their sidecars; and what happens when not.

`cached_tokens` is what the connector promised. Proof of a load is that the
pages' checksums on B are those that A's sidecar gave when it stored them.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
from typing import Any

import pytest
from checks import (
    PAGES,
    N,
    counted,
    held,
    hooks_in_time,
    leased_pages,
    memfds,
    page_bytes,
    prefill,
    quiet,
    same,
)
from harness import BLOCK, MATCH_MS, PAGE, Answer, Cluster, Engine, eventually, prompt


def misses(engine: Engine) -> dict[str, int]:
    counts = engine.stats("scheduler")["counts"]
    return {k: v for k, v in counts.items() if k.startswith("misses_")}


def test_pages_cross_from_a_to_b(cluster: Cluster) -> None:
    a, b = cluster.engine_a, cluster.engine_b
    ids = prompt(N, cluster.fresh())
    want = cluster.plain.complete(ids)
    prefill(a, ids)
    written = a.sums("worker", "stored")[-PAGES:]
    loads, size = b.count("worker", "loads"), b.count("worker", "loaded_bytes")
    quiet(b)
    peers, before = b.count("scheduler", "matched_pages_from_peers"), misses(b)
    got = b.complete(ids)
    same(got, want)
    if got.cached != PAGES * PAGE:
        quiet(b)
        pytest.fail(f"{got.cached} cached; misses: {before}, then {misses(b)}")
    counted(b, "worker", "loads", loads)
    assert b.count("worker", "loaded_bytes") - size == PAGES * page_bytes(b)
    assert b.sums("worker", "loaded")[-PAGES:] == written
    counted(b, "scheduler", "matched_pages_from_peers", peers + PAGES - 1)
    assert cluster.link.moved > PAGES * page_bytes(b)
    assert [f"{s:016x}" for _, s in leased_pages(cluster.b, b, ids)] == written


def test_pages_are_served_again_from_the_own_sidecar(cluster: Cluster) -> None:
    a = cluster.engine_a
    ids = prompt(N, cluster.fresh())
    want = cluster.plain.complete(ids)
    prefill(a, ids)
    a.forget()
    moved = cluster.link.moved
    got = a.complete(ids)
    same(got, want)
    assert got.cached == PAGES * PAGE
    assert cluster.link.moved - moved < page_bytes(a)


def test_generated_pages_are_kept(cluster: Cluster) -> None:
    a, b = cluster.engine_a, cluster.engine_b
    ids = prompt(300, cluster.fresh())
    first = a.complete(ids, 100)
    quiet(a)
    longer = ids + first.tokens
    want = cluster.plain.complete(longer)
    got = b.complete(longer)
    same(got, want)
    assert got.cached >= 384 - PAGE


def test_hit_may_begin_inside_a_page_after_a_local_hit(cluster: Cluster) -> None:
    a, b = cluster.engine_a, cluster.engine_b
    ids = prompt(N, cluster.fresh())
    want = cluster.plain.complete(ids)
    prefill(a, ids)
    b.complete(ids[: 3 * BLOCK + 1], 1)
    got = b.complete(ids)
    same(got, want)
    assert got.cached == PAGES * PAGE


def test_salts_do_not_share(cluster: Cluster) -> None:
    ids = prompt(N, cluster.fresh())
    prefill(cluster.engine_a, ids)
    got = cluster.engine_b.complete(ids, salt="another")
    assert got.cached == 0
    same(got, cluster.plain.complete(ids))


def test_eight_prompts_at_a_time(cluster: Cluster) -> None:
    prompts = [prompt(600, cluster.fresh()) for _ in range(8)]
    want = [cluster.plain.complete(p) for p in prompts]
    for p in prompts:
        prefill(cluster.engine_a, p)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(cluster.engine_b.complete, prompts))
    for g, w in zip(got, want, strict=True):
        same(g, w)
    assert sum(g.cached for g in got) >= 4 * 576


def test_flipped_byte_in_the_holders_arena_is_a_counted_miss(cluster: Cluster) -> None:
    a, b = cluster.engine_a, cluster.engine_b
    ids = prompt(N, cluster.fresh())
    want = cluster.plain.complete(ids)
    prefill(a, ids)
    pages = leased_pages(cluster.a, a, ids)
    assert len(pages) == PAGES
    cluster.a.flip(pages[7][0] + 12345)
    quiet(b)
    before = misses(b)
    got = b.complete(ids)
    same(got, want)
    assert got.cached == 7 * PAGE
    quiet(b)
    after = misses(b)
    assert sum(after.values()) == sum(before.values()) + 1, (before, after)
    assert cluster.a.stats()["cache"]["corrupt"] >= 1
    b.forget()
    same(b.complete(ids), want)


def test_flipped_byte_on_the_wire_is_a_counted_miss(cluster: Cluster) -> None:
    a, b = cluster.engine_a, cluster.engine_b
    ids = prompt(N, cluster.fresh())
    want = cluster.plain.complete(ids)
    prefill(a, ids)
    quiet(b)
    before, flipped = misses(b), cluster.link.flipped
    cluster.link.flip_at = 8000
    try:
        got = b.complete(ids)
    finally:
        cluster.link.flip_at = -1
    same(got, want)
    assert cluster.link.flipped > flipped
    assert got.cached == 0
    quiet(b)
    assert sum(misses(b).values()) == sum(before.values()) + 1


def during(cluster: Cluster, ids: list[list[int]], act: Any) -> list[Answer]:
    """Send prompts to B at the same time, do something meanwhile, return all answers."""
    with concurrent.futures.ThreadPoolExecutor(len(ids)) as pool:
        futures = [pool.submit(cluster.engine_b.complete, p, 40) for p in ids]
        act()
        return [f.result() for f in futures]


def recovered(cluster: Cluster) -> None:
    """Pages cross from A to B again."""

    def crosses() -> bool:
        ids = prompt(300, cluster.fresh())
        want = cluster.plain.complete(ids)
        before = held(cluster.engine_a)
        cluster.engine_a.complete(ids, 1)
        try:
            eventually(lambda: held(cluster.engine_a) >= before + len(ids) // PAGE, "the store", 5)
        except AssertionError:
            return False  # its match came too late on a busy machine: nothing was to be stored
        got = cluster.engine_b.complete(ids)
        same(got, want)
        return bool(got.cached)

    eventually(crosses, "that B loads from A again", 60)


def some(cluster: Cluster, n: int = 4) -> tuple[list[list[int]], list[Answer]]:
    """Return prompts that A has prefilled and what a right engine answers."""
    ids = [prompt(N, cluster.fresh()) for _ in range(n)]
    want = [cluster.plain.complete(p, 40) for p in ids]
    for p in ids:
        prefill(cluster.engine_a, p)
    return ids, want


def test_own_sidecar_stopped_and_continued(cluster: Cluster) -> None:
    ids, want = some(cluster)
    cluster.b.signal(signal.SIGSTOP)
    try:
        got = during(cluster, ids, lambda: None)
    finally:
        cluster.b.signal(signal.SIGCONT)
    for g, w in zip(got, want, strict=True):
        same(g, w)
    recovered(cluster)


def test_own_sidecar_stopped_while_requests_run(cluster: Cluster) -> None:
    ids, want = some(cluster)
    try:
        got = during(cluster, ids, lambda: cluster.b.signal(signal.SIGSTOP))
    finally:
        cluster.b.signal(signal.SIGCONT)
    for g, w in zip(got, want, strict=True):
        same(g, w)
    recovered(cluster)


def test_own_sidecar_killed_while_requests_run(cluster: Cluster) -> None:
    ids, want = some(cluster)
    try:
        got = during(cluster, ids, cluster.b.kill)
        for g, w in zip(got, want, strict=True):
            same(g, w)
        worker = cluster.engine_b.stats("worker")["pid"]
        with open(f"/proc/{worker}/maps") as maps:
            assert "memfd:membrane" not in maps.read(), "a dead sidecar's memory is still mapped"
        again = [cluster.engine_b.complete(p, 40) for p in ids]
        for g, w in zip(again, want, strict=True):
            same(g, w)
    finally:
        cluster.b.start()
    eventually(lambda: cluster.b.knows(cluster.a), "that the sidecars meet again", 60)
    recovered(cluster)


def test_holder_killed_in_the_middle_of_a_fill(cluster: Cluster) -> None:
    ids, want = some(cluster, 1)
    size = page_bytes(cluster.engine_b)
    quiet(cluster.engine_b)
    before = misses(cluster.engine_b)
    moved = cluster.link.moved
    cluster.link.hold_at = moved + 4 * size

    def kill_in_the_middle() -> None:
        eventually(lambda: cluster.link.moved > moved + 3 * size, "the fill")
        cluster.a.kill()
        # What the kernel has buffered for a dead process would still arrive.
        cluster.link.disconnect()

    try:
        got = during(cluster, ids, kill_in_the_middle)
    finally:
        cluster.link.hold_at = -1
        cluster.a.kill()
        cluster.a.start()
    for g, w in zip(got, want, strict=True):
        same(g, w)
    assert got[0].cached < 4 * PAGE
    quiet(cluster.engine_b)
    assert sum(misses(cluster.engine_b).values()) == sum(before.values()) + 1
    eventually(lambda: cluster.b.knows(cluster.a), "that the sidecars meet again", 60)
    recovered(cluster)


@pytest.mark.parametrize("how", ["stopped", "slow", "garbled"])
def test_holder_fails_in_the_middle_of_a_fill(cluster: Cluster, how: str) -> None:
    b, link = cluster.engine_b, cluster.link
    ids, want = some(cluster, 1)
    size = page_bytes(b)
    quiet(b)
    before, moved = misses(b), link.moved
    match how:
        case "stopped":
            link.hold_at = moved + 4 * size
        case "slow":
            link.rate = 6e3 / MATCH_MS * size  # not half of the pages by the deadline
        case "garbled":
            link.garble_at = moved + 4 * size

    def in_the_middle() -> None:
        eventually(lambda: link.moved > moved + size, "the fill")
        if how == "stopped":
            cluster.a.signal(signal.SIGSTOP)

    try:
        got = during(cluster, ids, in_the_middle)
        same(got[0], want[0])
        assert got[0].cached < PAGES * PAGE
        if how == "slow":
            assert got[0].cached >= PAGE
        quiet(b)
        assert sum(misses(b).values()) == sum(before.values()) + 1
    finally:
        cluster.a.signal(signal.SIGCONT)
        link.behave()
    b.forget()
    again = b.complete(ids[0], 40)
    same(again, want[0])
    assert again.cached == PAGES * PAGE
    recovered(cluster)


@pytest.mark.parametrize("name", ["engine_a", "engine_b"])
def test_no_hook_ran_past_its_deadline(cluster: Cluster, name: str) -> None:
    """Runs after all the others, over everything that they did."""
    hooks_in_time(getattr(cluster, name))


def test_nothing_is_left(cluster: Cluster) -> None:
    """The last test: ends everything."""
    for engine in (cluster.engine_a, cluster.engine_b):
        engine.complete(prompt(40, 1), 1)
    for sidecar in (cluster.a, cluster.b):
        eventually(lambda s=sidecar: s.stats()["cache"]["leases"] == 0, "the end of all leases", 30)
    for process in cluster.processes:
        assert process.alive(), f"{process.name} has died: {process.tail()}"
    pids = [p.pid for p in cluster.processes]
    killed = {p.name: p.stop() for p in cluster.processes}
    assert not any(killed.values()), f"had to be killed: {killed}"
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}/fd") or not os.listdir(f"/proc/{pid}/fd")
    assert not memfds(pids), "memory of ours is left"
