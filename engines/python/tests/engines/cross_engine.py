"""One checkpoint in several engines, each with a sidecar of its own, all in one mesh."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import PAGES, N, crossing, port
from harness import PAGE, Answer, Engine, Process, Sidecar, eventually, prompt
from matrix import Row
from sglang_harness import SGLang

NAMES = ("embedded", "vllm", "sglang", "sglang-ranks")
SGLANG_FLAGS = {1: (), 2: ("--tp-size", "2", "--disable-custom-all-reduce")}
TOKENS = 16
# Deadlines are tested elsewhere: here every page must come, on a busy machine too.
PATIENCE = dict.fromkeys(("match_deadline_ms", "load_deadline_ms", "store_deadline_ms"), 5000)
PAGE_BYTES = 4 * 2 * 2 * PAGE * 32 * 4  # layers, K and V, KV heads, tokens, head size, float32


class Embedded(Engine):
    """The engine in Go, a process of its own. It keeps no KV between requests."""

    def start(self, *flags: str, extra: dict[str, Any] | None = None) -> None:
        """Start it; `wait` waits until it serves."""
        assert self.sidecar is not None
        assert not extra
        argv = [
            os.environ["MEMBRANE_BIN"],
            "engine",
            f"--name={self.name}",
            "--deadline=5s",
        ]
        argv += [f"--model={self.model}", f"--addr=127.0.0.1:{self.port}"]
        self.launch([*argv, f"--sidecar={self.sidecar.socket}", *flags], dict(os.environ))

    def forget(self) -> None:
        """There is nothing to forget."""


class LostError(Exception):
    """A connection was starved on a busy machine, and the engine attached again."""


@dataclass
class Party:
    """An engine of `tp` ranks and its sidecar.

    `launch` starts the engine; `compute` takes tokens and a salt.
    """

    label: str
    engine: Engine
    launch: Callable[[], None]
    compute: Callable[[list[int], str | None], Answer]
    tp: int = 1

    @property
    def sidecar(self) -> Sidecar:
        """Return the sidecar."""
        assert self.engine.sidecar is not None
        return self.engine.sidecar

    def attached(self) -> list[dict[str, Any]]:
        """Return what its sidecar says of the engine; SGLang's ranks come one by one."""
        return list(self.sidecar.status().get("engines", {}).get("engines", []))

    def complete(self) -> bool:
        """Return whether every rank is attached."""
        return bool(sum(e["workers"] for e in self.attached()) == self.tp)

    def fully(self, ids: list[int], salt: str | None = None) -> Answer:
        """Let it compute all of a prompt; return when its sidecar has taken every page."""

        def stored() -> int:
            return int(port(self.sidecar)["stored_bytes"])

        before, registered = stored(), self.registered()
        answer = self.compute(ids, salt)
        assert answer.cached == 0, f"{self.label} had {answer.cached} tokens of a new prompt"
        eventually(
            lambda: stored() >= before + PAGES * PAGE_BYTES or self.registered() != registered,
            "the store",
        )
        if self.registered() != registered:
            raise LostError(self.label)
        assert stored() == before + PAGES * PAGE_BYTES
        return answer

    def registered(self) -> int:
        """Return how often engines have registered at its sidecar."""
        return int(port(self.sidecar)["requests"]["register"])


@dataclass
class Mesh:
    """The parties by name, and which prompts were used."""

    parties: dict[str, Party]
    seed: int = 300

    def fresh(self) -> list[int]:
        """Return a prompt that nobody has seen."""
        self.seed += 1
        return list(prompt(N, self.seed))

    def told(self, reader: Party) -> bool:
        """Return whether a reader's sidecar knows every page of the others'."""
        others = [p.sidecar for p in self.parties.values() if p is not reader]
        own = sum(s.metric("membrane_directory_own_pages") for s in others)
        return bool(reader.sidecar.metric("membrane_directory_pages") == own)

    @property
    def processes(self) -> list[Process]:
        """Engines first."""
        parties = self.parties.values()
        return [*(p.engine for p in parties), *(p.sidecar for p in parties)]

    def stop(self) -> None:
        """End everything, engines at the same time: some take long."""
        parties = list(self.parties.values())
        with concurrent.futures.ThreadPoolExecutor(len(parties)) as pool:
            list(pool.map(lambda p: p.engine.stop(), parties))
        for party in parties:
            party.sidecar.stop()


def describe(logs: Path, folder: Path, model: Path) -> Mesh:
    """Return the engines for a checkpoint; nothing runs yet."""
    sidecars: list[Sidecar] = []
    for name in NAMES:
        made = Sidecar(f"sidecar-{name}", logs, folder)
        made.peers = [f"127.0.0.1:{other.port}" for other in sidecars]
        sidecars.append(made)
    embedded = Embedded("cross-embedded", logs, model, sidecars[0])
    vllm = Engine("cross-vllm", logs, model, sidecars[1])

    def sglang(i: int, tp: int) -> Party:
        made = SGLang(f"cross-{NAMES[i]}", logs, model, sidecars[i])
        return Party(
            f"SGLang TP {tp}",
            made,
            lambda: made.launch_server(
                "page_first_direct", "direct", *SGLANG_FLAGS[tp], extra=PATIENCE
            ),
            lambda ids, salt: made.generate(ids, TOKENS, salt),
            tp,
        )

    parties = (
        Party(
            "embedded", embedded, embedded.start, lambda x, salt: embedded.complete(x, TOKENS, salt)
        ),
        Party(
            "vLLM TP 1",
            vllm,
            lambda: vllm.start(extra=PATIENCE),
            lambda x, salt: vllm.complete(x, TOKENS, salt),
        ),
        sglang(2, 1),
        sglang(3, 2),
    )
    return Mesh(dict(zip(NAMES, parties, strict=True)))


def boot(mesh: Mesh) -> None:
    """Start everything, and wait until sidecars and engines have met."""
    parties = list(mesh.parties.values())
    for p in reversed(parties):
        p.launch()
    for p in parties:
        p.sidecar.start()
    for a, b in itertools.permutations(parties, 2):
        eventually(lambda a=a, b=b: a.sidecar.knows(b.sidecar), "that the sidecars meet")
    for p in parties:
        p.engine.wait()
        eventually(p.complete, f"that {p.label} attaches", 30)


def read_across(mesh: Mesh, writer: Party, reader: Party) -> tuple[Row, Answer, Answer]:
    """Return what `_read_across` does, with another prompt where a connection was lost."""
    for _ in range(3):
        try:
            return _read_across(mesh, writer, reader)
        except LostError as e:
            print(f"{e} had to attach again")
            for p in (writer, reader):
                eventually(p.complete, f"that {p.label} attaches", 30)
    raise AssertionError("connections were lost three times")


def _read_across(mesh: Mesh, writer: Party, reader: Party) -> tuple[Row, Answer, Answer]:
    """Let one compute a prompt and the other load it.

    Returns what the reader's sidecar counted, the reader's answer from what it loaded,
    and its own full recompute, made before under a salt that nobody shares.
    """
    ids = mesh.fresh()
    want = reader.fully(ids, salt="recompute")
    written = writer.fully(ids)
    eventually(lambda: mesh.told(reader), f"that {reader.label} learns of the pages")
    writer.engine.forget()
    registered = reader.registered()
    before, began = port(reader.sidecar), time.monotonic()
    got = reader.compute(ids, None)
    took = time.monotonic() - began
    after = port(reader.sidecar)
    print(f"{writer.label} to {reader.label}: {took:.2f} s, computed in {want.seconds:.2f} s")
    if reader.registered() != registered:
        raise LostError(reader.label)
    other = None if writer is reader else written
    asks = reader.tp if isinstance(reader.engine, SGLang) else 1
    row = crossing(writer.label, reader.label, before, after, got, want, other, asks)
    fetched = after["leased_peer"]["pages"] - before["leased_peer"]["pages"]
    assert fetched == 0 if writer is reader else fetched >= row.pages, (before, after)
    assert written.tokens == want.tokens, "the engines do not agree on the full recompute"
    assert got.cached == row.pages * PAGE
    return row, got, want
