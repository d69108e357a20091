"""An engine of two worker ranks: a page is two shards, and is offered only when both are there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import PAGE, Engine, Sidecar, eventually, make_model, prompt

N = 1000
PAGES = N // PAGE


@pytest.fixture(scope="module")
def engines(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    model = make_model("tiny")
    sidecar = Sidecar("sidecar-ranks", logs, tmp_path_factory.mktemp("sockets"))
    made = [Engine("vllm-ranks", logs, model, sidecar), Engine("vllm-one", logs, model, None)]
    try:
        made[0].start("--tensor-parallel-size", "2")
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
    got = ranks.complete(ids)
    assert got.cached == PAGES * PAGE
    assert got.tokens == want.tokens
    eventually(lambda: counts(ranks, "loaded_pages") == [PAGES] * 2, "the load of both shards")
    for worker in workers(ranks):
        assert worker["sums"]["loaded"] == worker["sums"]["stored"]
    shards = [w["sums"]["stored"] for w in workers(ranks)]
    assert set(shards[0]).isdisjoint(shards[1])
