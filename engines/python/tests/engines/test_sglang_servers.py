"""Real SGLang servers, each with the sidecar, booted once for all cases.

`one` and `two` have a sidecar each, which are peers, and host pools of two layouts
whose pages are the same; `other` shares the sidecar of `one` and has another layout.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matrix
import pytest
from checks import crossing, memfds, port, same
from harness import (
    MATCH_MS,
    PAGE,
    Answer,
    Process,
    Sidecar,
    engine_environment,
    eventually,
    make_model,
    prompt,
)
from membrane_kv import wire
from membrane_kv.client import Client
from sglang_harness import STORE_MS, SGLang

N = 1000
PAGES = N // PAGE
LAYOUTS = {"one": "page_first_direct", "other": "page_first"}


@dataclass
class Servers:
    """What runs, and which prompts were used."""

    a: Sidecar
    b: Sidecar
    one: SGLang
    two: SGLang
    other: SGLang
    seed: int = 200

    def fresh(self) -> list[int]:
        """Return a prompt that nobody has seen."""
        self.seed += 2
        return list(prompt(N, self.seed))

    @property
    def processes(self) -> list[Process]:
        """Servers first."""
        return [self.one, self.two, self.other, self.a, self.b]


@pytest.fixture(scope="module")
def servers(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, model = tmp_path_factory.mktemp("sockets"), make_model("tiny")
    a, b = Sidecar("sidecar-a", logs, folder), Sidecar("sidecar-b", logs, folder)
    b.peers = [f"127.0.0.1:{a.port}"]
    s = Servers(
        a,
        b,
        SGLang("sglang-one", logs, model, a),
        SGLang("sglang-two", logs, model, b),
        SGLang("sglang-other", logs, model, a),
    )
    try:
        s.one.launch_server("page_first_direct", "direct")
        s.two.launch_server("layer_first", "kernel")
        s.other.launch_server("page_first", "kernel")
        a.start()
        b.start()
        eventually(lambda: b.knows(a), "that the sidecars meet")
        for server in (s.one, s.two, s.other):
            server.wait()
        yield s
    finally:
        for process in s.processes:
            process.stop()


def stored(server: SGLang, ids: list[int]) -> Answer:
    """Let a server compute a prompt; return its answer when the sidecar has every page."""
    assert server.sidecar is not None
    before = server.sidecar.stats()["engine_port"]["stored_pages"]
    want = server.generate(ids)
    assert want.cached == 0
    sidecar = server.sidecar
    eventually(
        lambda: sidecar.stats()["engine_port"]["stored_pages"] >= before + len(ids) // PAGE,
        "the store",
    )
    return want


def leased(sidecar: Sidecar, source: str) -> dict[str, int]:
    return dict(sidecar.stats()["engine_port"]["leased_" + source])


def test_flushed_and_loaded_from_the_sidecar(servers: Servers) -> None:
    one, a = servers.one, servers.a
    ids = servers.fresh()
    before = a.stats()["engine_port"]
    want = stored(one, ids)
    after = a.stats()["engine_port"]
    assert after["stored_bytes"] - before["stored_bytes"] == PAGES * one.page_bytes()
    here = one.generate(ids)
    same(here, want)
    assert (here.cached, here.storage) == (PAGES * PAGE, 0), "its own cache comes first"
    one.forget()
    got = one.generate(ids)
    same(got, want)
    assert (got.cached, got.storage) == (PAGES * PAGE, PAGES * PAGE)
    served = leased(a, "local")
    assert served["pages"] - before["leased_local"]["pages"] == PAGES
    assert served["bytes"] - before["leased_local"]["bytes"] == PAGES * one.page_bytes()
    eventually(lambda: one.counted("loaded_bytes") >= PAGES * one.page_bytes(), "the count")
    sums = one.rank()["sums"]
    assert sums["loaded"][-PAGES:] == sums["stored"][-PAGES:], "what was loaded was stored"


def test_next_turn_loads_what_was_generated(servers: Servers) -> None:
    one = servers.one
    ids = servers.fresh()
    before = one.held()
    first = one.generate(ids, 100)
    turn = [*ids, *first.tokens, *prompt(70, 9)]
    full = (N + 99) // PAGE
    eventually(lambda: one.held() >= before + full, "the store of the turn")
    want = one.generate(turn, extra_key="computed")
    assert want.cached == 0
    one.forget()
    got = one.generate(turn)
    same(got, want)
    assert got.storage == full * PAGE


def test_another_server_loads_through_its_own_sidecar(servers: Servers) -> None:
    """`two` has another sidecar, and another layout whose pages are the same."""
    ids = servers.fresh()
    want = stored(servers.one, ids)
    before = leased(servers.b, "peer")
    got = servers.two.generate(ids)
    same(got, want)
    assert (got.cached, got.storage) == (PAGES * PAGE, PAGES * PAGE)
    after = leased(servers.b, "peer")
    assert after["pages"] - before["pages"] == PAGES
    assert after["bytes"] - before["bytes"] == PAGES * servers.two.page_bytes()


@pytest.mark.parametrize(("writer", "reader"), [("one", "other"), ("other", "one")])
def test_same_keys_and_sizes_in_another_layout(servers: Servers, writer: str, reader: str) -> None:
    """Pages of page_first_direct and page_first have one key and one size, and other orders."""
    first, second = getattr(servers, writer), getattr(servers, reader)
    assert first.page_bytes() == second.page_bytes()
    ids = servers.fresh()
    want = stored(first, ids)
    before = port(servers.a)
    got = second.generate(ids)
    row = crossing(
        f"SGLang {LAYOUTS[writer]}", f"SGLang {LAYOUTS[reader]}", before, port(servers.a), got, want
    )
    matrix.record(row)
    same(got, want)
    assert got.storage == PAGES * PAGE
    assert row.translated == PAGES


def test_extra_keys_share_nothing(servers: Servers) -> None:
    one = servers.one
    ids = servers.fresh()
    want = stored(one, ids)
    before = one.held()
    got = one.generate(ids, extra_key="tenant")
    same(got, want)
    assert got.cached == 0
    eventually(lambda: one.held() >= before + PAGES, "the store under the key")
    one.forget()
    again = one.generate(ids, extra_key="tenant")
    same(again, want)
    assert again.storage == PAGES * PAGE


def test_eight_at_a_time(servers: Servers) -> None:
    one = servers.one
    shared = servers.fresh()[: 8 * PAGE]
    prompts = [shared + prompt(200, 31 + i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        before = one.held()
        wants = list(pool.map(one.generate, prompts))
        eventually(lambda: one.held() >= before + 8 + 8 * 3, "the stores")
        one.forget()
        gots = list(pool.map(one.generate, prompts))
    for got, want in zip(gots, wants, strict=True):
        assert got.tokens == want.tokens
    assert sum(g.storage for g in gots) >= 8 * PAGE
    eventually(servers.a.level, "that the sidecar is level")


def test_flipped_byte_is_computed_again(servers: Servers) -> None:
    """A page that is not what was stored is not loaded, nor anything behind it."""
    one, a = servers.one, servers.a
    ids = servers.fresh()
    want = stored(one, ids)
    eventually(lambda: len(one.rank()["sums"].get("stored", [])) >= PAGES, "the checksums")
    before = a.stats()["cache"]["corrupt"]
    a.flip(location(servers, ids, 7) + 1234)
    one.forget()
    got = one.generate(ids)
    same(got, want)
    assert got.storage == 7 * PAGE
    assert a.stats()["cache"]["corrupt"] == before + 1


def location(servers: Servers, ids: list[int], page: int) -> int:
    """Return where in the arena a page of a prompt lies."""
    soon = time.monotonic() + 5
    client = Client.connect(servers.a.socket, soon, name="test")
    try:
        r = servers.one.rank()["registration"] | {"engine": "probe", "inbox_slots": 0}
        client.call(wire.Type.REGISTER, wire.pack_json(r | {"inline": True}), soon)
        found = client.match(wire.tokens(ids), soon, flags=wire.MATCH_LOCAL)
        return int(found.locations[page, 0]["offset"])
    finally:
        client.close()


def test_stopped_sidecar(servers: Servers) -> None:
    one = servers.one
    ids = servers.fresh()
    want = stored(one, ids)
    one.forget()
    servers.a.signal(signal.SIGSTOP)
    try:
        got = one.generate(ids)
    finally:
        servers.a.signal(signal.SIGCONT)
    same(got, want)
    assert got.storage == 0
    # Half a second late has been seen where three schedulers that spin and another
    # process share two processors; who waits twice is caught.
    hooks = one.rank()["hooks"]
    for name, limit in (("batch_exists", MATCH_MS), ("batch_set_v1", STORE_MS)):
        assert hooks[name]["max_s"] < 2 * limit / 1e3, name

    def hits() -> bool:
        one.forget()
        return bool(one.generate(ids, 1).storage == PAGES * PAGE)

    eventually(hits, "that pages are loaded again", 30)


def test_killed_sidecar_and_its_successor(servers: Servers) -> None:
    one = servers.one
    ids = servers.fresh()
    want = stored(one, ids)
    one.forget()
    servers.a.kill()
    got = one.generate(ids)
    same(got, want)
    assert got.storage == 0
    servers.a.start()
    eventually(
        lambda: len(servers.a.status()["engines"]["engines"]) == 2, "that both engines attach", 30
    )
    fresh = servers.fresh()
    want = stored(one, fresh)
    one.forget()
    got = one.generate(fresh)
    same(got, want)
    assert got.storage == PAGES * PAGE


def test_namespace_is_that_of_vllm(servers: Servers) -> None:
    """VLLM's connector, given the same folder, says the same of the model."""
    script = Path(__file__).with_name("vllm_facts.py")
    done = subprocess.run(
        [os.environ["MEMBRANE_VLLM_PYTHON"], str(script), str(servers.one.model)],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    for server in (servers.one, servers.other):
        assert server.rank()["registration"]["model"] == theirs


def test_nothing_is_left_of_it(servers: Servers) -> None:
    """The last test: ends everything."""
    for server in (servers.one, servers.two, servers.other):
        stats = server.rank()
        assert stats["counts"].get("hook_errors", 0) == 0
        assert "off" not in stats
    for sidecar in (servers.a, servers.b):
        eventually(sidecar.level, "that the sidecar is level", 30)
    pids = [p.pid for p in servers.processes]
    for process in servers.processes:
        process.stop()
    assert not memfds(pids), "memory of ours is left"
