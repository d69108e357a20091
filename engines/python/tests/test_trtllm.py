"""The TensorRT-LLM connector in a stand-in runtime, with a real sidecar and with a fake one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trtllm_standin
from fake_sidecar import FakeSidecar
from helpers import eventually
from membrane_kv.facts import Unsupported
from membrane_kv.wire import Outcome
from trtllm_standin import Request, Runtime, Shape

trtllm_standin.install()

from membrane_kv import trtllm, trtllm_facts  # noqa: E402
from membrane_kv.trtllm_pool import DevicePool  # noqa: E402

_BIN = os.environ.get("MEMBRANE_BIN", "")
PROMPT = list(range(1000, 1200))  # 3 pages of 64 tokens, 6 blocks of 32, 8 tokens more
Start = Callable[..., Runtime]

SHAPES = {
    "hnd": Shape(),
    "nhd": Shape(backend="FLASHINFER"),
    "mla": Shape(mla=True, dim=18),
    "two ranks": Shape(tp=2),
    "more ranks than heads": Shape(heads=1, tp=2),
    "two ranks, mla": Shape(mla=True, dim=18, tp=2),
    "half": Shape(dtype=np.float16),
    "block of 64": Shape(block=64),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    if not _BIN:
        pytest.skip("MEMBRANE_BIN names no binary")
    path = str(tmp_path_factory.mktemp("sidecar") / "s")
    args = [_BIN, "serve", "--port", "0", "--engine-addr", "off", "--log-level", "warn"]
    process = subprocess.Popen([*args, "--engine-socket", path, "--memory", "64MiB"])
    vars(process)["path"] = path
    try:
        eventually(lambda: os.path.exists(path), 20)
        yield process
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture
def model(tmp_path: Path) -> Callable[[Shape], str]:
    """Return a function that makes a model's folder, the same weights for a shape each time."""

    def make(shape: Shape, weights: str = "w") -> str:
        folder = tmp_path / f"{weights}-{shape.tp}-{shape.backend}-{shape.mla}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape.config()))
        return str(folder)

    return make


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, model: Callable[..., str]) -> Iterator[Start]:
    """Return a function that starts an engine and, unless told, waits for its connections."""
    made: list[Runtime] = []

    def run(
        at: Any, shape: Shape, up: bool = True, weights: str = "w", settings: Any = (), **args: Any
    ) -> Runtime:
        path = at.path if hasattr(at, "path") else at
        env = {"sidecar": path, "weights_id": f"{weights}-{shape}", "match_deadline_ms": 2000}
        monkeypatch.setenv("TLLM_MEMBRANE", json.dumps(env | {"stage_mib": 8} | dict(settings)))
        made.append(Runtime(trtllm, model(shape, weights), shape, **args).register())
        if up:
            wait_up(made[-1])
        return made[-1]

    yield run
    for runtime in made:
        runtime.close()


def wait_up(engine: Runtime) -> None:
    """Wait until scheduler and rank 0 are registered; the others follow an iteration."""
    for side in (engine.scheduler, engine.workers[0]):
        eventually(lambda side=side: side._session is not None and side._session.up)


def ready(engine: Runtime) -> Runtime:
    """Run a short prompt, with which ranks above 0 learn whose they are."""
    engine.generate(Request(9999, [1, 2, 3], 1))
    for worker in engine.workers:
        eventually(lambda worker=worker: worker._session is not None and worker._session.up)
    engine.computed_tokens = 0
    return engine


def stored(engine: Runtime, pages: int) -> None:
    """Wait until every rank's commits of so many pages were answered."""
    for worker in engine.workers:
        eventually(lambda worker=worker: worker.recorder.count("stored_pages") >= pages)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_second_engine_loads_what_the_first_computed(real: Any, start: Start, name: str) -> None:
    shape = SHAPES[name]
    first = ready(start(real, shape, weights=name))
    a = Request(1, PROMPT)
    want = first.generate(a)
    assert (a.matched, first.computed_tokens) == (0, len(PROMPT) + 2)
    stored(first, 3)
    second = ready(start(real, shape, weights=name))
    b = Request(1, PROMPT)
    assert second.generate(b) == want
    assert (b.matched, second.computed_tokens) == (192, len(PROMPT) + 2 - 192)
    for mine, theirs in zip(second.pools, first.pools, strict=True):
        blocks = 192 // shape.block
        assert (mine[b.blocks[:blocks]] == theirs[a.blocks[:blocks]]).all()
    assert all(w.recorder.count("loaded_blocks") == blocks for w in second.workers)
    for part in (second.scheduler, *second.workers):
        assert part.recorder.count("hook_errors") == 0


def test_the_stand_in_notices_one_wrong_number(real: Any, start: Start) -> None:
    engine = start(real, Shape())
    want = engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    engine.flush()
    r = Request(2, PROMPT)
    engine.waiting.append(r)
    write = engine.workers[0]._pool.write
    engine.workers[0]._pool.write = lambda block, data: write(block, data ^ np.uint8(1))
    while not r.done:
        engine.iterate()
    assert r.matched and r.generated != want


@pytest.mark.parametrize("chunk", [16, 48, 64, 100])
def test_prompts_in_chunks(real: Any, start: Start, chunk: int) -> None:
    """Pages are stored when their last token is computed, whatever the chunks."""
    name = f"chunk {chunk}"
    first = start(real, Shape(), weights=name, chunk=chunk)
    want = first.generate(Request(1, PROMPT[:130]))
    stored(first, 2)
    second = start(real, Shape(), weights=name, chunk=chunk)
    longer = Request(1, PROMPT)
    second.generate(longer)
    assert longer.matched == 128
    stored(second, 1)
    third = start(real, Shape(), weights=name)
    again = Request(1, PROMPT)
    assert third.generate(again) == longer.generated and again.matched == 192
    same = Request(2, PROMPT[:130])
    assert third.generate(same) == want and same.local == 128 and not same.matched


def test_one_iteration_stores_the_whole_prompt(real: Any, start: Start) -> None:
    """An engine that only prefills ends its requests with their first token."""
    first = start(real, Shape(), weights="one")
    first.generate(Request(1, PROMPT[:70], 1))
    stored(first, 1)
    second = start(real, Shape(), weights="one")
    r = Request(1, PROMPT, 1)
    second.generate(r)
    assert r.matched == 64
    stored(second, 2)


def test_generated_tokens_are_stored_when_a_page_is_full(real: Any, start: Start) -> None:
    first = start(real, Shape(), weights="generated")
    a = Request(1, PROMPT[:120], 500)
    first.waiting.append(a)

    def iterate() -> bool:
        first.iterate()
        return bool(first.workers[0].recorder.count("stored_pages") >= 2)

    eventually(iterate)
    second = start(real, Shape(), weights="generated")
    b = Request(1, a.tokens[:140])
    second.generate(b)
    assert b.matched == 128


# Where torch is installed, `make test-engines` runs these too.
KINDS = ["numpy"] + (["torch", "device"] if find_spec("torch") else [])


@pytest.mark.parametrize("kind", KINDS)
def test_pools_of_every_kind(real: Any, start: Start, kind: str) -> None:
    """A "device" is a torch tensor that is only touched by torch's copies."""

    def hand_over(engine: Runtime) -> None:
        pool = engine.pools[0]
        if kind != "numpy":
            import torch

            engine.workers[0].shutdown()
            engine.workers[0].__init__(engine.args)
            engine.scheduler._stage._counters[:] = 0
            engine.register([torch.from_numpy(pool)])
            wait_up(engine)
        if kind == "device":
            import torch

            raw = torch.from_numpy(pool).view(torch.uint8)
            engine.workers[0]._pool = DevicePool(raw)
            engine.workers[0]._storer._pool = engine.workers[0]._pool

    first = start(real, Shape(), weights=kind)
    hand_over(first)
    want = first.generate(Request(1, PROMPT))
    stored(first, 3)
    second = start(real, Shape(), weights=kind)
    hand_over(second)
    r = Request(1, PROMPT)
    assert second.generate(r) == want and r.matched == 192


def test_own_blocks_come_first(real: Any, start: Start) -> None:
    first = start(real, Shape(), weights="own")
    want = first.generate(Request(1, PROMPT))
    stored(first, 3)
    second = start(real, Shape(), weights="own")
    second.generate(Request(1, PROMPT[:100]))
    r = Request(2, PROMPT)
    assert second.generate(r) == want
    assert (r.local, r.matched) == (96, 96)


def test_own_part_of_a_block_is_left_alone(real: Any, start: Start) -> None:
    engine = start(real, Shape(), weights="partial")
    engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    assert engine.scheduler.get_num_new_matched_tokens(Request(2, PROMPT), 33) == (0, False)


def test_the_stage_bounds_a_promise(real: Any, start: Start) -> None:
    shape = Shape(layers=8, heads=8, dim=32)  # a block of 512 KiB
    first = start(real, shape, weights="stage")
    want = first.generate(Request(1, PROMPT, 1))
    stored(first, 3)
    second = start(real, shape, weights="stage", settings={"stage_mib": 2})
    r = Request(1, PROMPT, 1)
    assert second.generate(r) == want
    assert r.matched == 4 * 32
    second.flush()
    again = Request(2, PROMPT, 1)
    assert second.generate(again) == want and again.matched == 4 * 32


def test_abort_before_the_load_writes_nothing(real: Any, start: Start) -> None:
    """The blocks of a request that ends right after its allocation are somebody else's."""
    first = start(real, Shape(), weights="abort")
    first.generate(Request(1, PROMPT))
    stored(first, 3)
    second = start(real, Shape(), weights="abort", settings={"stage_mib": 1})
    slots = len(second.scheduler._free)
    for i in range(20):
        r = Request(i, PROMPT)
        second.admit(r)
        assert r.matched == 192
        second.finish(r, keep=False)
        second.iterate()
        assert not second.pools[0].any()
    assert len(second.scheduler._free) == slots
    assert not second.scheduler._requests


def test_abort_while_it_computes(real: Any, start: Start) -> None:
    first = start(real, Shape(), weights="abort late", chunk=64)
    r = Request(1, PROMPT)
    first.waiting.append(r)
    first.iterate()
    first.finish(r, keep=False)
    first.iterate()
    stored(first, 1)
    second = start(real, Shape(), weights="abort late")
    again = Request(1, PROMPT)
    assert second.generate(again) == first.generate(Request(2, PROMPT))
    assert again.matched == 64


def test_request_that_is_allocated_again(real: Any, start: Start) -> None:
    """A runtime that takes the blocks away asks again, under the same id."""
    first = start(real, Shape(), weights="again")
    want = first.generate(Request(1, PROMPT))
    stored(first, 3)
    second = start(real, Shape(), weights="again")
    slots = len(second.scheduler._free)
    second.admit(Request(1, PROMPT))
    lost = second.running.pop()
    second.free += lost.blocks
    r = Request(1, PROMPT)
    assert second.generate(r) == want and r.matched == 192
    second.scheduler._reclaim(second.scheduler._stage)
    assert len(second.scheduler._free) == slots


@pytest.mark.parametrize(
    "more",
    [
        {"lora_task_id": 3},
        {"multimodal_hashes": [[1]]},
        {"py_multimodal_data": {}},
        {"is_generation_only_request": True},
    ],
)
def test_requests_that_pass_by(real: Any, start: Start, more: dict[str, Any]) -> None:
    engine = start(real, Shape(), weights=f"pass by {more}")
    engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    engine.flush()
    r = Request(2, PROMPT, **more)
    engine.generate(r)
    assert not r.matched


@pytest.mark.parametrize("more", [{"cache_salt": "s"}, {"cache_salt_id": 7}])
def test_salt_keeps_requests_apart(real: Any, start: Start, more: dict[str, Any]) -> None:
    engine = start(real, Shape(), weights=f"salt {more}")
    engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    matched = []
    for i in range(2):
        engine.flush()
        r = Request(2 + i, PROMPT, **more)
        engine.generate(r)
        stored(engine, 6)
        matched.append(r.matched)
    assert matched == [0, 192]


def test_other_weights_and_other_layouts_do_not_hit(real: Any, start: Start) -> None:
    first = start(real, Shape(), weights="mine")
    first.generate(Request(1, PROMPT))
    stored(first, 3)
    for shape, weights in ((Shape(), "others"), (Shape(backend="FLASHINFER"), "mine")):
        settings = {"weights_id": f"{weights}-{Shape()}"}
        r = Request(1, PROMPT)
        start(real, shape, weights=weights, settings=settings).generate(r)
        assert not r.matched


def test_absent_sidecar_costs_nothing_and_is_found_later(tmp_path: Path, start: Start) -> None:
    path = str(tmp_path / "later")
    began = time.monotonic()
    engine = start(path, Shape(), up=False)
    want = engine.generate(Request(1, PROMPT))
    assert time.monotonic() - began < 2.0
    sidecar = FakeSidecar(path, arena_bytes=4 << 20)
    try:
        wait_up(engine)
        engine.flush()
        assert engine.generate(Request(2, PROMPT)) == want
        stored(engine, 3)
        engine.flush()
        r = Request(3, PROMPT)
        assert engine.generate(r) == want and r.matched == 192
    finally:
        sidecar.close()


def test_stopped_sidecar_is_waited_for_until_the_deadline_once(real: Any, start: Start) -> None:
    settings = {"match_deadline_ms": 100, "store_deadline_ms": 50}
    engine = start(real, Shape(), weights="stopped", settings=settings)
    want = engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    engine.flush()
    real.send_signal(signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{real.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        took = []
        for i in range(3):
            r = Request(2 + i, PROMPT)
            began = time.monotonic()
            engine.admit(r)
            took.append(time.monotonic() - began)
            assert not r.matched
            while not r.done:
                engine.iterate()
            assert r.generated == want
            engine.flush()
        assert took[0] < 0.4 and max(took[1:]) < 0.05, took
    finally:
        real.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("outcome", [Outcome.EXPIRED, Outcome.CORRUPT])
def test_lease_that_did_not_hold_is_no_promise(
    sidecar: FakeSidecar, start: Start, outcome: Outcome
) -> None:
    engine = start(sidecar, Shape())
    want = engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    engine.flush()
    sidecar.outcome = outcome
    r = Request(2, PROMPT)
    assert engine.generate(r) == want and not r.matched
    name = "failed_loads_" + outcome.name.lower()
    assert engine.workers[0].recorder.count(name) == 1
    assert len(engine.scheduler._free) == engine.scheduler._stage.place.slots


def test_sidecar_that_goes_away_before_the_load(sidecar: FakeSidecar, start: Start) -> None:
    """What was promised lies in the engine's own memory."""
    engine = start(sidecar, Shape())
    want = engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    engine.flush()
    r = Request(2, PROMPT)
    engine.admit(r)
    assert r.matched == 192
    sidecar.close()
    eventually(lambda: engine.workers[0]._session.up is None)
    while not r.done:
        engine.iterate()
    assert r.generated == want


def test_without_shared_memory_nothing_is_promised(sidecar: FakeSidecar, start: Start) -> None:
    engine = start(sidecar, Shape(), settings={"inline": True})
    want = engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    engine.flush()
    r = Request(2, PROMPT)
    assert engine.generate(r) == want and not r.matched


def test_wrong_pool_is_refused_by_name(
    real: Any, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(real, Shape(), weights="wrong pool")
    want = engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    for other in (replace(engine.shape, layers=2), replace(engine.shape, dtype=np.float16)):
        wrong = start(real, Shape(), up=False, weights="wrong pool")
        for worker in wrong.workers:
            worker.shutdown()
        caplog.clear()
        wrong.workers[0].__init__(wrong.args)
        wrong.scheduler._stage._counters[:] = 0
        wrong.register([other.pool(64)])
        assert "the KV pool has the shape [64, " in caplog.text
        r = Request(1, PROMPT)
        assert wrong.generate(r) == want and not r.matched


def test_nothing_is_promised_while_a_rank_cannot_load(real: Any, start: Start) -> None:
    shape = Shape(tp=2)
    engine = ready(start(real, shape, weights="rank"))
    want = engine.generate(Request(1, PROMPT))
    stored(engine, 3)
    other = start(real, shape, weights="rank")
    other.workers[1].shutdown()
    other.workers[1]._stage = other.workers[1]._pool = None
    other.scheduler._stage._counters[1] = 0
    other.workers[1].register_kv_caches(Shape(tp=2, layers=2).pool(64))
    for i in range(2):
        r = Request(1 + i, PROMPT)
        assert other.generate(r) == want and not r.matched
        other.flush()
    assert other.scheduler.recorder.count("misses_not_joined") == 2


@pytest.mark.parametrize(
    ("shape", "args", "config", "sentence"),
    [
        (Shape(), {"attn_backend": "VANILLA"}, {}, "attn_backend is VANILLA"),
        (Shape(mla=True, backend="FLASHINFER"), {}, {}, "how its MLA blocks lie"),
        (Shape(), {"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size is 2"),
        (Shape(), {"max_beam_width": 4}, {}, "max_beam_width is 4"),
        (Shape(), {"enable_attention_dp": True}, {}, "enable_attention_dp is set"),
        (Shape(), {"speculative_config": {"x": 1}}, {}, "speculative_config is set"),
        (Shape(), {"kv_cache_config": {"host_cache_size": 1}}, {}, "host_cache_size is set"),
        (Shape(), {"kv_cache_config": {"max_attention_window": [64]}}, {}, "max_attention_window"),
        (Shape(), {"kv_cache_config": {"dtype": "nvfp4"}}, {}, "is nvfp4 of a float32 model"),
        (Shape(), {}, {"sliding_window": 128}, "sliding window"),
        (Shape(), {}, {"layer_types": ["full_attention", "mamba"]}, "layers of the kind mamba"),
        (Shape(), {}, {"num_hidden_layers": "3"}, "num_hidden_layers of the model's"),
        (Shape(heads=3, tp=2), {}, {}, "3 KV heads are not shared evenly by 2 ranks"),
    ],
)
def test_unsupported_engines_run_without_it(
    start: Start,
    model: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
    shape: Shape,
    args: dict[str, Any],
    config: dict[str, Any],
    sentence: str,
) -> None:
    made = model(shape)
    (Path(made) / "config.json").write_text(json.dumps(shape.config() | config))
    engine = Runtime.__new__(Runtime)
    with pytest.raises(Unsupported, match=sentence):
        engine.__init__(_Refuser, made, shape, **args)  # type: ignore[misc]


class _Refuser:
    """Reads the arguments in place of a connector."""

    @staticmethod
    def MembraneScheduler(args: Any) -> None:
        trtllm_facts.read(args, "w")


def test_off_is_an_empty_cache(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start("/nowhere", Shape(), up=False, attn_backend="VANILLA")
    assert "KV caching is off: attn_backend is VANILLA" in caplog.text
    r = Request(1, PROMPT)
    assert len(engine.generate(r)) == 3 and not r.matched


@pytest.mark.parametrize("text", ["{", "[]", '{"stage_mib": 0}', '{"stage_mib": "1"}', '{"x": 1}'])
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"TLLM_MEMBRANE|stage_mib|x is not a setting"):
        trtllm._settings({"TLLM_MEMBRANE": text})
