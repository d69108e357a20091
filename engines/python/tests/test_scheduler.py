"""Promises, loads and stores of one engine's requests, against the fake sidecar."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fake_sidecar import FakeSidecar
from helpers import BLOCK, BLOCK_BYTES, PAGE, eventually, soon
from membrane_kv import wire
from membrane_kv.call import Call
from membrane_kv.jobs import Step
from membrane_kv.record import Recorder
from membrane_kv.scheduler import Scheduler
from membrane_kv.session import Session
from membrane_kv.settings import Settings
from membrane_kv.wire import Type

Start = Callable[..., Session]
PER = PAGE // BLOCK


class Rig:
    """A scheduler with one session, a worker's session that stores pages, and a request."""

    def __init__(
        self,
        sidecar: FakeSidecar,
        start: Start,
        settings: Settings | None = None,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        self.sidecar = sidecar
        self.session = start("scheduler")
        self.worker = start("worker")
        self.recorder = Recorder("", "scheduler")
        self.s = Scheduler(
            self.session, BLOCK, settings or Settings(), self.recorder, loads, stores
        )
        self.ids: dict[str, list[int]] = {}

    def add(self, name: str, n: int, salt: str | None = None) -> None:
        self.ids[name] = list(range(n))
        self.s.add(name, salt, lambda a, b: wire.tokens(self.ids[name][a:b]))

    def fill(self, pages: int) -> None:
        """Put the first pages of range(...) into the sidecar."""
        up, now = self.session.up, time.monotonic()
        assert up is not None and self.worker.up is not None
        ids = wire.tokens(range(pages * PAGE))
        call = self.session.match(up.epoch, ids, now + 5, now + 5, 0, 100)
        assert call.wait() and call.result is not None
        for page in range(pages):
            data = bytes([page + 1]) * (PER * BLOCK_BYTES)
            handle, epoch = call.result.handle, self.worker.up.epoch
            assert self.worker.write(epoch, handle, page, data, soon()).wait()
        if call.result.lease:
            self.session.give_back(up.epoch, call.result.lease)
        mine = call.result.handle
        self.session.drop(up.epoch, mine)
        eventually(lambda: mine not in self.sidecar.chains and not self.sidecar.leases)
        self.sidecar.seen.clear()

    def match(self, name: str, computed: int = 0, preemptions: int = 0) -> int:
        """Ask as the engine does, until the answer is not None."""
        answer: list[int] = []

        def ask() -> bool:
            n = self.s.match(name, computed, len(self.ids[name]), preemptions)
            answer[:] = [] if n is None else [n]
            return bool(answer)

        eventually(ask)
        return answer[0]

    def step(self, name: str, computed: int) -> Step:
        """Run a step after which `computed` tokens are computed, in blocks 1, 2, 3, ..."""
        table = list(range(1, len(self.ids[name]) // BLOCK + 2))
        step = self.s.step([(name, computed, len(self.ids[name]))], lambda _: table, False)
        step.loads = self.s.loads()
        return step

    def answered(self, *kinds: Type) -> None:
        """Wait until everything sent so far was answered."""
        assert self.session.submit(Type.PING, b"", bytes, soon()).wait()


@pytest.fixture
def rig(sidecar: FakeSidecar, sessions: Start) -> Rig:
    return Rig(sidecar, sessions)


def test_answer_that_comes_soon_is_the_first(sidecar: FakeSidecar, sessions: Start) -> None:
    rig = Rig(sidecar, sessions, Settings(match_wait_ms=100))
    rig.fill(3)
    for name, held in (("a", 192), ("b", 192), ("c", 0)):
        rig.add(name, 200, "other" if name == "c" else None)
        assert rig.s.match(name, 0, 200, 0) == held
    assert rig.s.match("a", 0, 200, 0) == 192
    assert sidecar.seen.count(Type.MATCH) == 3
    assert rig.recorder.count("matches") == 3


def test_a_step_waits_for_answers_only_so_long(sidecar: FakeSidecar, sessions: Start) -> None:
    rig = Rig(sidecar, sessions, Settings(match_wait_ms=50))
    sidecar.delay[Type.MATCH] = 0.2
    for n, step in enumerate((("a", "b", "c"), ("d",))):
        began = time.monotonic()
        for name in step:
            rig.add(name, 200)
            assert rig.s.match(name, 0, 200, 0) is None
        assert 0.05 <= time.monotonic() - began < 0.15, "one wait a step"
        rig.s.step([], lambda _: [], n == 0)


def test_without_patience_nobody_waits(
    sidecar: FakeSidecar, sessions: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(sidecar, sessions, Settings(match_wait_ms=0))
    monkeypatch.setattr("membrane_kv.call.Call.pause", lambda *_: pytest.fail("waits"))
    sidecar.delay[Type.MATCH] = 0.02
    rig.add("a", 200)
    assert rig.s.match("a", 0, 200, 0) is None
    assert rig.match("a") == 0


def test_answer_that_takes_its_time_is_none_first(rig: Rig) -> None:
    rig.add("a", 200)
    rig.sidecar.delay[Type.MATCH] = 0.1
    began = time.monotonic()
    assert rig.s.match("a", 0, 200, 0) is None
    assert rig.s.match("a", 0, 200, 0) is None
    assert time.monotonic() - began < 0.05
    assert rig.match("a") == 0
    assert rig.sidecar.seen.count(Type.MATCH) == 1


@pytest.mark.parametrize(
    ("held", "tokens", "computed", "promised"),
    [
        (0, 200, 0, 0),
        (1, 200, 0, 64),
        (3, 200, 0, 192),
        (3, 193, 0, 192),
        (3, 192, 0, 160),  # a token is left to compute, in whole blocks
        (3, 192, 96, 64),
        (3, 192, 160, 0),
        (3, 200, 32, 160),  # beginning inside a page
        (3, 200, 64, 128),
        (3, 200, 192, 0),
        (9, 200, 0, 192),
        (1, 200, 128, 0),
    ],
)
def test_promise(rig: Rig, held: int, tokens: int, computed: int, promised: int) -> None:
    rig.fill(held)
    rig.add("a", tokens)
    assert rig.match("a", computed) == promised


def test_promise_becomes_a_load(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a", 32) == 160
    rig.s.allocated("a", 160, [9, 11, 12, 13, 14, 15, 16])
    (job,) = rig.step("a", 0).loads
    assert (job.request, job.page, job.offset, job.skip, job.blocks) == ("a", 0, 0, 1, PER)
    assert job.block_ids == [11, 12, 13, 14, 15]
    assert job.lease in rig.sidecar.leases
    assert job.locations is not None and job.locations.shape == (3, 1)
    assert 1.5 < job.deadline - time.monotonic() <= 2.0
    assert not rig.s.loads()


def test_local_hit_shrinks_while_the_request_waits(rig: Rig) -> None:
    """The number is computed anew from what is leased, and leased anew where that begins later."""
    rig.fill(5)
    rig.add("a", 400)
    assert rig.match("a", 256) == 64
    assert rig.match("a", 288) == 32
    assert rig.sidecar.seen.count(Type.MATCH) == 1
    assert rig.match("a", 64) == 256
    assert rig.sidecar.seen.count(Type.LEASE) == 1
    rig.s.allocated("a", 256, list(range(1, 12)))
    (job,) = rig.s.loads()
    assert (job.page, job.offset, job.skip) == (1, 0, 0)
    rig.answered()
    assert set(rig.sidecar.leases) == {job.lease}


def test_local_hit_that_shrinks_below_a_miss_is_asked_for_anew(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 400)
    assert rig.match("a", 256) == 0
    assert rig.match("a", 256) == 0
    assert rig.match("a", 96) == 96
    assert rig.sidecar.seen.count(Type.LEASE) == 1


def test_lease_that_grows_old_is_renewed(sidecar: FakeSidecar, sessions: Start) -> None:
    rig = Rig(sidecar, sessions, Settings(lease_ms=100))
    sidecar.lease_ms = 100
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192

    def renewed() -> bool:
        assert rig.match("a") == 192
        return bool(sidecar.seen.count(Type.LEASE) == 1)

    eventually(renewed)
    rig.answered()
    assert len(sidecar.leases) == 1


def test_local_hit_that_covers_everything_gives_the_lease_back(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    assert rig.match("a", 192) == 0
    rig.s.allocated("a", 0, [])
    rig.answered()
    assert not rig.sidecar.leases


def test_failed_load_is_never_promised_again(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    rig.s.allocated("a", 192, list(range(1, 8)))
    rig.s.loaded({"a"}, {"a"})
    assert rig.match("a") == 0
    assert rig.match("a", preemptions=1) == 0
    rig.answered()
    assert not rig.sidecar.leases


def test_failed_load_by_blocks(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    rig.s.allocated("a", 192, list(range(1, 8)))
    rig.s.lost_blocks({3})
    rig.s.loaded({"a"}, ())
    assert rig.match("a") == 0


def test_preempted_request_loads_what_it_has_stored(rig: Rig) -> None:
    rig.add("a", 200)
    assert rig.match("a") == 0
    assert rig.step("a", 200).stores
    rig.fill(4)  # as if the workers had; the fourth page is of generated tokens
    rig.ids["a"] = list(range(270))
    assert rig.match("a", 32, preemptions=1) == 224
    assert rig.sidecar.seen.count(Type.EXTEND) == 1
    assert Type.MATCH not in rig.sidecar.seen


def test_match_deadline_ends_in_no_and_late_lease_goes_back(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    rig = Rig(sidecar, sessions, Settings(match_deadline_ms=40))
    rig.fill(3)
    sidecar.delay[Type.MATCH] = 0.1
    rig.add("a", 200)
    began = time.monotonic()
    assert rig.match("a") == 0
    assert 0.03 < time.monotonic() - began < 0.09
    assert rig.recorder.count("misses_deadline") == 1
    rig.answered()
    eventually(lambda: not sidecar.leases)
    # The chain is kept: the request can store.
    rig.step("a", 64)
    assert rig.step("a", 200).stores[0].page == 1


def test_absent_and_lagging_sidecar_is_a_miss_at_once(
    sidecar: FakeSidecar, sessions: Start
) -> None:
    rig = Rig(sidecar, sessions, Settings(match_deadline_ms=30))
    sidecar.silent.add(Type.MATCH)
    for name in "abc":
        rig.add(name, 200)
    assert rig.match("a") == 0
    assert rig.s.match("b", 0, 200, 0) == 0
    sidecar.close()
    eventually(lambda: rig.session.up is None)
    assert rig.s.match("c", 0, 200, 0) == 0
    assert rig.recorder.count("misses_unreachable") == 2


def test_pages_are_stored_when_they_are_computed(rig: Rig) -> None:
    rig.add("a", 200)
    assert rig.match("a") == 0
    assert not rig.step("a", 63).stores
    (first,) = rig.step("a", 64).stores
    assert (first.page, first.block_ids) == (0, [1, 2])
    (second,) = rig.step("a", 200).stores
    assert (second.page, second.block_ids) == (1, [3, 4, 5, 6])
    assert not rig.step("a", 200).stores


def test_generated_page_is_stored_once_the_chain_has_it(rig: Rig) -> None:
    rig.add("a", 200)
    assert rig.match("a") == 0
    rig.step("a", 200)
    rig.ids["a"] = list(range(256))
    assert not rig.step("a", 256).stores
    rig.answered()
    (job,) = rig.step("a", 256).stores
    assert (job.page, job.block_ids) == (3, [7, 8])


def test_no_store_while_a_load_is_pending_or_without_whole_table(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    rig.s.allocated("a", 192, list(range(1, 8)))
    assert not rig.step("a", 192).stores
    rig.s.loaded({"a"}, ())
    assert not rig.s.step([("a", 192, 200)], lambda _: [1, 2], False).stores
    assert not rig.s.step([("a", 192, 200)], lambda _: [0] * 6, False).stores
    assert rig.step("a", 192).stores


def test_unknown_request_is_left_alone(rig: Rig) -> None:
    rig.ids["x"] = [1]
    assert rig.s.match("x", 0, 1, 0) == 0
    rig.s.allocated("x", 0, [])
    assert rig.step("x", 1) == Step()
    rig.s.loaded({"x"}, {"x"})
    rig.s.remove("x")
    with pytest.raises(ValueError, match="not promised"):
        rig.s.allocated("x", 32, [1])


def test_load_that_was_not_promised_fails(rig: Rig) -> None:
    rig.fill(1)
    rig.add("a", 200)
    assert rig.match("a") == 64
    with pytest.raises(ValueError, match="not what was promised"):
        rig.s.allocated("a", 128, list(range(1, 8)))
    rig.s.fail("a", "internal")
    (job,) = rig.s.loads()
    assert (job.request, job.locations, job.reason) == ("a", None, "internal")
    assert rig.match("a") == 0


@pytest.mark.parametrize("stage", ["asking", "promised", "loading", "running"])
def test_end_of_a_request_leaves_nothing(
    sidecar: FakeSidecar, sessions: Start, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("membrane_kv.scheduler._DROP_SLACK_S", 0.0)
    rig = Rig(sidecar, sessions, Settings(store_deadline_ms=1))
    rig.fill(3)
    rig.add("a", 200)
    if stage == "asking":
        sidecar.delay[Type.MATCH] = 0.05
        assert rig.s.match("a", 0, 200, 0) is None
    else:
        assert rig.match("a") == 192
    if stage in ("loading", "running"):
        rig.s.allocated("a", 192, list(range(1, 8)))
        (job,) = rig.s.loads()
        assert rig.worker.release(job.lease, soon()).wait()
    if stage == "running":
        rig.s.loaded({"a"}, ())
        rig.step("a", 200)
    rig.s.remove("a")
    rig.s.loaded({"a"}, {"a"})
    rig.answered()
    eventually(lambda: not sidecar.leases and not sidecar.chains)
    assert not rig.s.knows("a")


def test_lost_connection_voids_promise_and_chain(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    old = rig.session.up
    rig.sidecar.disconnect()
    eventually(lambda: rig.session.up is not None and rig.session.up is not old)
    assert not rig.step("a", 200).stores
    assert rig.match("a") == 192
    assert rig.sidecar.seen.count(Type.MATCH) == 2


def test_producer_asks_for_the_chain_alone(sidecar: FakeSidecar, sessions: Start) -> None:
    rig = Rig(sidecar, sessions, loads=False)
    rig.fill(3)
    rig.add("a", 200)
    assert rig.s.match("a", 0, 200, 0) == 0
    assert rig.s.match("a", 0, 200, 0) == 0
    rig.answered()
    assert rig.step("a", 200).stores
    assert not sidecar.leases


def test_request_that_is_held_locally_still_gets_a_chain(rig: Rig) -> None:
    rig.add("a", 200)
    assert rig.s.match("a", 192, 200, 0) == 0
    rig.answered()
    rig.ids["a"] = list(range(300))
    rig.step("a", 200)
    rig.answered()
    assert rig.step("a", 300).stores


def test_salts_do_not_share(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200, salt="tenant")
    assert rig.match("a") == 0


def test_reset_drops_pages_and_promises(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    assert rig.s.reset()
    assert not rig.sidecar.pages and not rig.sidecar.leases and not rig.sidecar.chains
    assert rig.match("a") == 0


def test_nothing_computed_before_a_reset_is_stored_after(rig: Rig) -> None:
    for name in ("runs", "ended"):
        rig.add(name, 200)
        assert rig.match(name) == 0
    (job,) = rig.step("runs", 64).stores
    rig.s.remove("ended")  # its chain stays for a while, for commits under way
    rig.answered()
    assert len(rig.sidecar.chains) == 2
    assert rig.s.reset()
    assert not rig.sidecar.chains
    assert not rig.step("runs", 200).stores
    up = rig.worker.up
    assert up is not None
    late = rig.worker.write(up.epoch, job.handle, 0, bytes(PER * BLOCK_BYTES), soon())
    assert not late.wait()
    assert not rig.sidecar.pages


def test_match_that_a_reset_overtakes_brings_no_chain(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    rig.sidecar.delay[Type.MATCH] = 0.05
    assert rig.s.match("a", 0, 200, 0) is None
    assert rig.s.reset()
    assert rig.match("a") == 0
    rig.answered()
    assert not rig.step("a", 200).stores
    rig.answered()
    assert not rig.sidecar.leases and not rig.sidecar.chains


@pytest.mark.parametrize("how", ["reset", "remove"])
def test_answer_that_nobody_has_looked_at_is_given_back(rig: Rig, how: str) -> None:
    rig.fill(3)
    rig.add("a", 200)
    rig.sidecar.delay[Type.MATCH] = 0.05
    assert rig.s.match("a", 0, 200, 0) is None
    rig.answered()
    assert rig.sidecar.leases and rig.sidecar.chains
    if how == "reset":
        assert rig.s.reset()
    rig.s.remove("a")
    rig.session.drop_now()
    rig.answered()
    assert not rig.sidecar.leases and not rig.sidecar.chains


def test_answer_that_comes_while_its_request_is_removed_is_given_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.fill(3)
    rig.add("a", 200)
    rig.sidecar.delay[Type.MATCH] = 0.05
    assert rig.s.match("a", 0, 200, 0) is None
    fail = Call.fail

    def just_too_late(call: Call[object], reason: str) -> None:
        rig.answered()
        fail(call, reason)

    monkeypatch.setattr(Call, "fail", just_too_late)
    rig.s.remove("a")
    monkeypatch.undo()
    rig.session.drop_now()
    rig.answered()
    assert not rig.sidecar.leases and not rig.sidecar.chains


def test_chain_whose_lease_is_refused_is_forgotten(rig: Rig) -> None:
    """Such as by a sidecar that is busy; else it keeps the chain as long as the engine runs."""
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    rig.s.allocated("a", 0, [])
    rig.sidecar.refuse_type[Type.LEASE] = wire.Code.BUSY
    assert rig.match("a", preemptions=1) == 0
    rig.session.drop_now()
    rig.answered()
    assert not rig.sidecar.chains


def test_chain_that_lacks_tokens_is_not_taken_up_again(rig: Rig) -> None:
    """Where an extend fails the chain has a gap: what would be added to it has another name."""
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    rig.s.allocated("a", 0, [])
    rig.ids["a"] = list(range(300))
    rig.sidecar.refuse_type[Type.EXTEND] = wire.Code.BUSY
    rig.match("a", preemptions=1)
    rig.sidecar.refuse_type.clear()
    rig.ids["a"] = list(range(400))
    rig.step("a", 300)
    rig.answered()
    whole = wire.tokens(range(400))
    for chain in rig.sidecar.chains.values():
        assert whole.startswith(chain.whole)


def test_load_that_a_reset_overtakes_fails(rig: Rig) -> None:
    rig.fill(3)
    rig.add("a", 200)
    assert rig.match("a") == 192
    rig.s.allocated("a", 192, list(range(1, 8)))
    (job,) = rig.s.loads()
    assert rig.s.reset()
    call = rig.worker.release(job.lease, soon())
    assert not call.wait() and call.reason == "unknown_lease"
    rig.s.loaded({"a"}, {"a"})
    rig.s.remove("a")


def test_requests_after_a_reset_store_and_load(rig: Rig) -> None:
    rig.fill(3)
    assert rig.s.reset()
    rig.add("b", 200)
    assert rig.match("b") == 0
    assert rig.step("b", 200).stores
    rig.fill(3)
    rig.add("c", 200)
    assert rig.match("c") == 192


@pytest.mark.parametrize("how", ["silent", "away"])
def test_reset_without_an_answer_comes_first_when_the_sidecar_is_back(
    sidecar: FakeSidecar, sessions: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An engine that is put to sleep must not fail because its sidecar is away."""
    monkeypatch.setattr("membrane_kv.scheduler._RESET_S", 0.05)
    rig = Rig(sidecar, sessions)
    rig.fill(3)
    old = rig.session.up
    if how == "silent":
        sidecar.silent.add(Type.RESET)
        assert rig.s.reset()
        assert sidecar.pages
        sidecar.silent.clear()
        sidecar.disconnect()
    else:
        sidecar.disconnect()
        eventually(lambda: rig.session.up is not old)
        assert rig.s.reset()
    eventually(lambda: rig.session.up is not None and rig.session.up is not old)
    rig.add("a", 200)
    assert rig.match("a") == 0
    assert not sidecar.pages


def test_extra_keys_do_not_share(rig: Rig) -> None:
    rig.fill(3)
    rig.ids["a"] = list(range(200))
    rig.s.add("a", None, lambda a, b: wire.tokens(rig.ids["a"][a:b]), "lora=1")
    assert rig.match("a") == 0


def test_request_that_may_not_read_stores(rig: Rig) -> None:
    """Such as one that wants the log-probabilities of its prompt."""
    rig.fill(3)
    rig.ids["a"] = list(range(200))
    rig.s.add("a", None, lambda a, b: wire.tokens(rig.ids["a"][a:b]), reads=False)
    assert rig.s.match("a", 0, 200, 0) == 0
    assert rig.s.match("a", 0, 200, 0) == 0
    rig.answered()
    assert rig.step("a", 200).stores
    assert rig.s.match("a", 0, 200, 1) == 0
    rig.answered()
    assert not rig.sidecar.leases
