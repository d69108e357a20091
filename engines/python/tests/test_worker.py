"""Copies between blocks and the sidecar, against the fake sidecar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from fake_sidecar import Chain, FakeSidecar
from helpers import BLOCK_BYTES, LAYER_BYTES, LAYERS, eventually
from membrane_kv import wire
from membrane_kv.jobs import LoadJob, StoreJob
from membrane_kv.pool import Pool
from membrane_kv.record import Recorder
from membrane_kv.session import Session
from membrane_kv.settings import Settings
from membrane_kv.wire import Outcome, Reason, Type
from membrane_kv.worker import Loader, Storer

Start = Callable[..., Session]
Memory = npt.NDArray[np.uint8]
BLOCKS = 64
PER = 2  # blocks in a page
TOKENS = wire.tokens(range(64 * 20))


def memory(fill: int = 0) -> Memory:
    """Return KV memory, shape [layers, blocks, bytes], every byte of it different or zero."""
    if not fill:
        return np.zeros((LAYERS, BLOCKS, LAYER_BYTES), np.uint8)
    rng = np.random.default_rng(fill)
    return rng.integers(0, 256, (LAYERS, BLOCKS, LAYER_BYTES), np.uint8)


def pool(of: Memory) -> Pool:
    return Pool(list(of))


class Rig:
    """A worker with memory of its own, and a scheduler's session to match with."""

    def __init__(self, sidecar: FakeSidecar, start: Start, settings: Settings, **kw: object):
        self.sidecar = sidecar
        self.settings = settings
        self.recorder = Recorder("", "worker")
        self.session = start("worker", **kw)
        self.scheduler = start("scheduler")
        self.memory = memory(1)
        self.storer = Storer(self.session, pool(self.memory), settings, self.recorder)
        self.target = memory()
        self.loader = Loader(self.session, pool(self.target), 0, settings, self.recorder)

    def match(self) -> wire.Leased:
        up, now = self.scheduler.up, time.monotonic()
        assert up is not None
        call = self.scheduler.match(up.epoch, TOKENS, now + 5, now + 5, 0, 10_000)
        assert call.wait() and call.result is not None, call.reason
        return call.result

    def store(self, pages: int, begin: int = 0) -> None:
        job = StoreJob(
            "r",
            self.match().handle,
            begin,
            PER,
            list(range(begin * PER + 1, (begin + pages) * PER + 1)),
            time.monotonic(),
        )
        self.storer.begin([job])
        self.storer.finish()

    def stored(self, pages: int) -> None:
        self.store(pages)
        eventually(lambda: len(self.sidecar.pages) == pages)

    def job(self, skip: int = 0, blocks: int | None = None, wait: float = 5.0) -> LoadJob:
        """Return a job that loads what is held, into blocks from 30 on."""
        leased = self.match()
        n = leased.pages * PER - skip if blocks is None else blocks
        now = time.monotonic()
        return LoadJob(
            "r",
            leased.handle,
            leased.lease,
            0,
            0,
            skip,
            PER,
            list(range(30, 30 + n)),
            leased.locations,
            now,
            now + wait,
        )

    def load(self, job: LoadJob) -> str:
        self.loader.submit(job)
        ended: list[tuple[LoadJob, str]] = []

        def take() -> bool:
            ended.extend(self.loader.take(0.01))
            return bool(ended)

        eventually(take)
        assert [e[0] for e in ended] == [job]
        return ended[0][1]


@pytest.fixture
def rig(sidecar: FakeSidecar, sessions: Start) -> Iterator[Rig]:
    r = Rig(sidecar, sessions, Settings())
    yield r
    r.loader.stop()


@pytest.fixture(params=["shared", "inline", "no inbox"])
def any_rig(sidecar: FakeSidecar, sessions: Start, request: pytest.FixtureRequest) -> Iterator[Rig]:
    kw: dict[str, object] = {}
    if request.param == "inline":
        kw["inline"] = True
    if request.param == "no inbox":
        kw["slots"] = 0
    r = Rig(sidecar, sessions, Settings(), **kw)
    yield r
    r.loader.stop()


def test_blocks_cross_unchanged(any_rig: Rig) -> None:
    any_rig.stored(5)
    assert any_rig.load(any_rig.job()) == ""
    assert (any_rig.target[:, 30:40] == any_rig.memory[:, 1:11]).all()
    assert not any_rig.target[:, :30].any() and not any_rig.target[:, 40:].any()
    assert not any_rig.sidecar.leases
    assert any_rig.recorder.count("loaded_bytes") == 5 * PER * BLOCK_BYTES
    assert any_rig.recorder.count("stored_pages") == 5


@pytest.mark.parametrize(("skip", "blocks"), [(1, 9), (0, 9), (1, 8), (1, 1), (0, 1)])
def test_load_may_begin_and_end_inside_a_page(rig: Rig, skip: int, blocks: int) -> None:
    rig.stored(5)
    job = rig.job(skip, blocks)
    assert job.locations is not None
    job.locations = job.locations[: -(-(skip + blocks) // PER)]
    assert rig.load(job) == ""
    assert (rig.target[:, 30 : 30 + blocks] == rig.memory[:, 1 + skip :][:, :blocks]).all()
    assert not rig.target[:, 30 + blocks :].any() and not rig.target[:, :30].any()


@pytest.mark.parametrize("outcome", [Outcome.EXPIRED, Outcome.CORRUPT])
def test_bad_outcome_is_a_failed_load(rig: Rig, outcome: Outcome) -> None:
    rig.stored(2)
    rig.sidecar.outcome = outcome
    assert rig.load(rig.job()) == outcome.name.lower()
    assert rig.recorder.count("failed_loads_" + outcome.name.lower()) == 1


def test_release_without_answer_fails_at_the_deadline(rig: Rig) -> None:
    rig.stored(2)
    job = rig.job(wait=0.1)
    rig.sidecar.silent.add(Type.RELEASE)
    assert rig.load(job) == "deadline"
    assert time.monotonic() - job.deadline < 1.0


def test_lost_connection_fails_the_load(rig: Rig) -> None:
    rig.stored(2)
    rig.sidecar.hangup.add(Type.RELEASE)
    assert rig.load(rig.job()) == "unreachable"


def test_lease_from_before_the_connection_is_not_trusted(rig: Rig) -> None:
    """A restarted sidecar may use a lease's number again, for other pages."""
    rig.stored(2)
    job, before = rig.job(), rig.session.up
    rig.sidecar.disconnect()
    eventually(lambda: rig.session.up is not None and rig.session.up is not before)
    rig.sidecar.leases[job.lease] = {0}
    assert rig.load(job) == "unreachable"
    assert not rig.target.any()


def test_expired_deadline_copies_nothing_and_gives_back(rig: Rig) -> None:
    rig.stored(2)
    assert rig.load(rig.job(wait=-0.1)) == "deadline"
    assert not rig.target.any()
    eventually(lambda: not rig.sidecar.leases)


def test_read_without_answer_gives_the_lease_back(sidecar: FakeSidecar, sessions: Start) -> None:
    rig = Rig(sidecar, sessions, Settings(), inline=True)
    rig.stored(3)
    sidecar.silent.add(Type.READ)
    assert rig.load(rig.job(wait=0.05)) == "deadline"
    eventually(lambda: not sidecar.leases)
    rig.loader.stop()


def test_wrong_length_is_a_failed_load(rig: Rig) -> None:
    rig.stored(2)
    job = rig.job()
    assert job.locations is not None
    job.locations["length"][1] -= 1
    assert rig.load(job) == "internal"
    eventually(lambda: not rig.sidecar.leases)


def test_location_outside_of_the_arena_is_a_failed_load(rig: Rig) -> None:
    rig.stored(2)
    job = rig.job()
    assert job.locations is not None
    job.locations["offset"][1] = 1 << 50
    assert rig.load(job) == "internal"
    eventually(lambda: not rig.sidecar.leases)


def test_load_that_could_not_begin_is_reported(rig: Rig) -> None:
    job = LoadJob("r", 0, 0, 0, 0, 0, 1, [], None, 0.0, 0.0, "internal")
    assert rig.load(job) == "internal"


def test_more_pages_than_slots_and_pages_that_exist(rig: Rig) -> None:
    rig.stored(3)
    rig.store(15)
    eventually(lambda: len(rig.sidecar.pages) == 15)
    assert rig.recorder.count("stores_existing") == 3
    assert rig.recorder.count("dropped_stores") == 0
    assert rig.load(rig.job()) == ""
    assert (rig.target[:, 30:60] == rig.memory[:, 1:31]).all()


def test_refused_stores_are_counted(rig: Rig) -> None:
    rig.sidecar.refuse = Reason.QUARANTINED
    rig.store(2)
    assert rig.recorder.count("dropped_stores_quarantined") == 2


def test_abandoned_pages_are_not_stored(rig: Rig) -> None:
    job = StoreJob("r", rig.match().handle, 0, PER, [1, 2, 3, 4], time.monotonic())
    rig.storer.begin([job])
    rig.storer.abandon("failed_step")
    rig.storer.finish()
    assert rig.recorder.count("dropped_stores_failed_step") == 2
    eventually(lambda: rig.storer._orphans == 2)
    assert not rig.sidecar.pages and Type.COMMIT not in rig.sidecar.seen
    rig.stored(3)


@pytest.mark.parametrize("slots", [0, 4])
def test_chain_from_before_the_connection_is_not_stored_to(
    sidecar: FakeSidecar, sessions: Start, slots: int
) -> None:
    """A sidecar that is restarted while a step computes may use a chain's number for another."""
    rig = Rig(sidecar, sessions, Settings(), slots=slots)
    handle, before = rig.match().handle, rig.session.up
    blocks = list(range(1, 1 + 10 * PER))
    rig.storer.begin([StoreJob("r", handle, 0, PER, blocks, time.monotonic())])
    sidecar.disconnect()
    eventually(lambda: rig.session.up is not None and rig.session.up is not before)
    other = Chain(64, b"another prompt")
    other.append(TOKENS)
    sidecar.chains[handle] = other
    rig.storer.finish()
    eventually(lambda: rig.recorder.count("dropped_stores_unreachable") == 10)
    assert not sidecar.pages
    rig.loader.stop()


def test_commit_without_answer_is_counted(rig: Rig) -> None:
    rig.sidecar.hangup.add(Type.COMMIT)
    rig.store(2)
    eventually(lambda: rig.recorder.count("dropped_stores_unreachable") == 2)


def test_silent_sidecar_holds_a_step_for_the_store_deadline_once(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    rig = Rig(sidecar, sessions, Settings(store_deadline_ms=60))
    sidecar.silent.add(Type.RESERVE)
    began = time.monotonic()
    rig.store(2)
    assert 0.05 < time.monotonic() - began < 0.2
    assert rig.recorder.count("dropped_stores_deadline") == 2
    began = time.monotonic()
    rig.store(2)
    assert time.monotonic() - began < 0.05
    assert rig.recorder.count("dropped_stores_deadline") == 4


def test_slots_that_came_too_late_are_given_back(sidecar: FakeSidecar, sessions: Start) -> None:
    rig = Rig(sidecar, sessions, Settings(store_deadline_ms=20))
    old = rig.session.up
    sidecar.delay[Type.RESERVE] = 0.05
    rig.store(4)
    eventually(lambda: rig.storer._orphans == 4)
    sidecar.delay.clear()
    rig.store(1)
    eventually(lambda: rig.session.up is not None and rig.session.up is not old)
    rig.store(4)
    eventually(lambda: len(sidecar.pages) == 4)


def test_absent_sidecar_costs_nothing(sidecar: FakeSidecar, sessions: Start) -> None:
    rig = Rig(sidecar, sessions, Settings())
    handle = rig.match().handle
    sidecar.close()
    eventually(lambda: rig.session.up is None)
    began = time.monotonic()
    rig.storer.begin([StoreJob("r", handle, 0, PER, [1, 2], time.monotonic())])
    rig.storer.finish()
    assert time.monotonic() - began < 0.05
    assert rig.recorder.count("dropped_stores_unreachable") == 1


@pytest.mark.parametrize("uniform", [True, False])
def test_pool(uniform: bool) -> None:
    whole = memory(2)
    layers = list(whole) if uniform else [whole[0].copy(), memory(3)[0], whole[1].copy()]
    p = Pool(layers)
    assert (p._all is not None) == uniform
    out = np.empty((len(layers), LAYER_BYTES), np.uint8)
    p.read(5, out)
    assert (out == [layer[5] for layer in layers]).all()
    p.write(6, out)
    assert all((layer[6] == layer[5]).all() for layer in layers)


def test_pool_refuses_layers_that_differ() -> None:
    with pytest.raises(ValueError, match="differ"):
        Pool([memory()[0], memory()[0][:10]])
    with pytest.raises(ValueError, match="one piece"):
        Pool([memory()[0][:, ::2]])


@pytest.mark.parametrize("inline", [False, True])
def test_storer_tells_which_pages_the_sidecar_holds(
    sidecar: FakeSidecar, sessions: Start, inline: bool
) -> None:
    r = Rig(sidecar, sessions, Settings(), **({"slots": 0} if inline else {}))
    r.storer = Storer(r.session, pool(r.memory), r.settings, r.recorder, tell=True)
    r.stored(2)
    told: list[tuple[str, int]] = []

    def all_told(n: int) -> bool:
        told.extend(r.storer.take_held())
        return len(told) == n

    eventually(lambda: all_told(2))
    assert sorted(told) == [("r", 0), ("r", 1)]
    r.store(3)  # two exist, one is new
    told.clear()
    eventually(lambda: all_told(3))
    assert sorted(told) == [("r", 0), ("r", 1), ("r", 2)]
    assert r.storer.take_held() == []
    assert r.recorder.count("store_us") > 0
    r.loader.stop()


def test_storer_tells_nothing_of_refused_pages_or_unasked(rig: Rig) -> None:
    rig.stored(2)
    assert rig.storer.take_held() == []
    rig.storer = Storer(rig.session, pool(rig.memory), rig.settings, rig.recorder, tell=True)
    rig.sidecar.refuse = Reason.TOO_LARGE
    rig.store(4, begin=2)
    eventually(lambda: rig.recorder.count("dropped_stores") == 4)
    assert rig.storer.take_held() == []
