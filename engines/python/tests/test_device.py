"""Copies to and from an accelerator: what waits for what. Streams are stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sidecar import FakeSidecar
from helpers import BLOCK_BYTES, eventually
from membrane_kv.device import DevicePool
from membrane_kv.facts import Unsupported, check_shape
from membrane_kv.session import Session
from membrane_kv.settings import Settings
from membrane_kv.wire import Type
from membrane_kv.worker import Loader, Storer
from test_worker import PER, Memory, Rig, memory

Start = Callable[..., Session]


class FakeQueue:
    """Copies nothing before `drain`, and notes the order of calls and of frames sent."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.pending: list[tuple[Any, Any]] = []
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        self.log.append(f"mark {self.marks} {threading.current_thread().name}")
        return self.marks

    def after(self, event: int) -> None:
        self.log.append(f"after {event}")

    def upload(self, block: Any, data: Any) -> None:
        self.log.append("upload")
        self.pending.append((block, data))

    def download(self, block: Any, out: Any) -> None:
        self.log.append("download")
        self.pending.append((out, block))

    def drain(self) -> None:
        for to, source in self.pending:
            to[...] = source
        self.pending.clear()
        self.log.append("drain")


class DeviceRig(Rig):
    """A worker whose memory is a device's."""

    loader: Loader

    def __init__(self, sidecar: FakeSidecar, start: Start, **kw: object) -> None:
        super().__init__(sidecar, start, Settings(), **kw)
        self.loader.stop()
        self.log: list[str] = []
        submit = self.session.submit

        def noted(kind: Type, *args: Any, **kwargs: Any) -> Any:
            self.log.append(kind.name)
            return submit(kind, *args, **kwargs)

        self.session.submit = noted  # type: ignore[method-assign]

        def pool(of: Memory) -> DevicePool:
            return DevicePool(list(of), FakeQueue(self.log))

        self.storer = Storer(self.session, pool(self.memory), self.settings, self.recorder)
        self.loader = Loader(self.session, pool(self.target), 0, self.settings, self.recorder)


@pytest.mark.parametrize("kw", [{}, {"inline": True}, {"slots": 0}])
def test_device_blocks_are_stored_and_loaded(
    sidecar: FakeSidecar, sessions: Start, kw: dict[str, object]
) -> None:
    r = DeviceRig(sidecar, sessions, **kw)
    r.stored(3)
    assert r.load(r.job()) == ""
    assert (r.target[:, 30 : 30 + 3 * PER] == r.memory[:, 1 : 1 + 3 * PER]).all()
    r.loader.stop()


def test_store_waits_for_compute_and_commits_what_has_been_copied(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    r = DeviceRig(sidecar, sessions)
    r.stored(1)
    me = threading.current_thread().name
    copies = ["download"] * (PER * len(r.memory))
    assert r.log == ["RESERVE", f"mark 1 {me}", "after 1", *copies, "drain", "COMMIT"]
    r.loader.stop()


def test_load_waits_for_compute_and_is_released_when_it_has_been_copied(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    r = DeviceRig(sidecar, sessions)
    r.stored(1)
    r.log.clear()
    assert r.load(r.job()) == ""
    me = threading.current_thread().name  # the event is the engine's, not the loader's
    copies = ["upload"] * (PER * len(r.memory))
    assert r.log == [f"mark 1 {me}", "after 1", *copies, "drain", "RELEASE"]
    r.loader.stop()


def test_copies_of_a_load_that_fails_have_ended_when_it_is_reported(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    r = DeviceRig(sidecar, sessions)
    r.stored(2)
    job = r.job()
    assert job.locations is not None
    job.locations["offset"][1] = 1 << 40  # outside of the arena
    r.log.clear()
    assert r.load(job) == "internal"
    eventually(lambda: "RELEASE" in r.log)
    assert r.log.index("drain") < r.log.index("RELEASE")
    assert r.log.count("upload") == PER * len(r.memory)
    r.loader.stop()


def test_layers_must_be_alike() -> None:
    a = memory(1)
    with pytest.raises(ValueError, match="differ"):
        DevicePool([a[0], a[1][:5]], FakeQueue([]))
    assert DevicePool(list(a), FakeQueue([])).block_bytes == BLOCK_BYTES


@pytest.mark.parametrize(
    ("layout", "shape", "fine"),
    [
        ("vllm-lbhnc", (9, 2, 16, 128), True),
        ("vllm-lbnhc", (9, 16, 2, 128), True),
        ("vllm-lbhnc", (9, 16, 2, 128), False),
        ("vllm-lbhnc", (2, 9, 16, 2, 64), False),
        ("vllm-lbhnc", (9, 2, 16, 64), False),
        ("vllm-blhnc", (9, 2, 16, 128), False),
    ],
)
def test_device_tensor_of_another_shape_is_refused(
    layout: str, shape: tuple[int, ...], fine: bool
) -> None:
    model = SimpleNamespace(mla=False, head_size=64)
    facts: Any = SimpleNamespace(model=model, layout=layout, rank_heads=2, block=16)
    if fine:
        check_shape(facts, "cuda", shape)
    else:
        with pytest.raises(Unsupported, match="was expected"):
            check_shape(facts, "cuda", shape)
    check_shape(facts, "cpu", shape)
