"""What the engine tests compare, and what they look at in an engine's counters."""

from __future__ import annotations

import os
import time
from typing import Any

from harness import (
    BLOCK,
    LOAD_MS,
    MATCH_MS,
    PAGE,
    SLACK_S,
    STORE_MS,
    Answer,
    Engine,
    Sidecar,
    eventually,
)
from matrix import Row
from membrane_kv import wire
from membrane_kv.client import Client
from membrane_kv.wire import Descriptor, Model, Register

N = 1000
PAGES = N // PAGE
TOLERANCE = 1e-4
DEADLINES = {"wait_for_save": STORE_MS, "get_transfer_results": LOAD_MS, "start_load_kv": LOAD_MS}


def difference(got: Answer, want: Answer) -> float:
    """Return the largest difference between log-probabilities."""
    return float(max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)))


def same(got: Answer, want: Answer) -> None:
    """Tokens are equal, log-probabilities within TOLERANCE."""
    assert got.tokens == want.tokens
    worst = difference(got, want)
    assert worst < TOLERANCE, f"log-probabilities differ by {worst}"


def port(sidecar: Sidecar) -> dict[str, Any]:
    """Return the counters of a sidecar's engine port."""
    return dict(sidecar.stats()["engine_port"])


def crossing(
    writer: str,
    reader: str,
    before: dict[str, Any],
    after: dict[str, Any],
    got: Answer,
    want: Answer,
    written: Answer | None = None,
    asks: int = 1,
) -> Row:
    """Return what the reader's sidecar counted, and how `got` compares.

    `want` is the reader's own full recompute, `written` that of the writer. The reader
    asks `asks` times for each page: every rank of SGLang does for itself.
    """

    def moved(what: str) -> int:
        sources = ("leased_local", "leased_peer")
        total, rest = divmod(sum(int(after[s][what] - before[s][what]) for s in sources), asks)
        assert rest == 0, (before, after)
        return total

    return Row(
        writer=writer,
        reader=reader,
        pages=moved("pages"),
        size=moved("bytes"),
        translated=int(after["translated"]["pages"] - before["translated"]["pages"]),
        tokens_equal=got.tokens == want.tokens,
        logprobs=difference(got, want),
        engines=None if written is None else difference(written, want),
    )


def prefill(engine: Engine, ids: list[int]) -> None:
    """Let an engine compute a prompt, and wait until its sidecar has every page of it."""
    before = held(engine)
    engine.complete(ids, 1)
    eventually(lambda: held(engine) >= before + len(ids) // PAGE, "the store")


def held(engine: Engine) -> int:
    """Return how many pages the engine has handed over so far, those already there too."""
    counts = engine.stats("worker")["counts"]
    return int(counts.get("stored_pages", 0) + counts.get("stores_existing", 0))


def counted(engine: Engine, role: str, name: str, more_than: int, what: str = "") -> None:
    eventually(lambda: engine.count(role, name) > more_than, what or f"{name} on {engine.name}")


def quiet(engine: Engine) -> None:
    """Wait until the engine's counters of what came before are in its file."""
    seen: list[Any] = []

    def settled() -> bool:
        now = [engine.stats(role) for role in ("worker", "scheduler")]
        same = seen[-1:] == [now]
        seen.append(now)
        return same and len(seen) > 30  # polled every 50 ms; files are written every second

    eventually(settled, f"that {engine.name} is quiet")


def page_bytes(engine: Engine) -> int:
    d = engine.stats("worker")["registration"]["descriptor"]
    return int(PAGE // BLOCK * d["block_bytes"])


def registration(worker: dict[str, Any], engine: str, role: str) -> Register:
    """Return how a worker has registered, under another name or role."""
    r = worker["registration"]
    d = dict(r["descriptor"])
    layers, heads = d.pop("layers"), d.pop("heads")
    axes, strides = tuple(d.pop("axes")), tuple(d.pop("strides"))
    descriptor = Descriptor(
        **d, axes=axes, strides=strides, layer_window=tuple(layers), head_window=tuple(heads)
    )
    return Register(engine, role, Model(**r["model"]), descriptor)


def leased_pages(
    sidecar: Sidecar, engine: Engine, ids: list[int], shard: int = 0
) -> list[tuple[int, int]]:
    """Return offset and checksum of each page's shard that a sidecar holds of a prompt."""
    deadline = time.monotonic() + 5
    client = Client.connect(sidecar.socket, deadline, name="test")
    try:
        client.register(registration(engine.stats("worker"), "probe", "scheduler"), deadline)
        found = client.match(wire.tokens(ids), deadline, flags=wire.MATCH_LOCAL)
        at = found.locations[:, shard]
        return list(zip(at["offset"].tolist(), at["sum"].tolist(), strict=True))
    finally:
        client.close()


def hooks_in_time(engine: Engine) -> None:
    """No hook has failed, or run longer than its deadline."""
    quiet(engine)
    for role in ("scheduler", "worker"):
        stats = engine.stats(role)
        assert stats["counts"].get("hook_errors", 0) == 0
        assert "off" not in stats
        hooks = {k: v for k, v in stats["hooks"].items() if k != "register_kv_caches"}
        assert hooks
        for hook, took in hooks.items():
            limit = DEADLINES.get(hook, MATCH_MS) / 1e3 + SLACK_S
            assert took["max_s"] <= limit, f"{hook} took {took['max_s']:.3f} s"
            assert took["sum_s"] / took["n"] < 0.01, f"{hook} takes {took}"


def memfds(sessions: list[int]) -> list[str]:
    """Return memfds of ours that a process of one of the sessions still has open."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) not in sessions:
                continue
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        found += [f"{pid} {link}" for link in links if "memfd:membrane" in link]
    return found
