"""The scheduler's side of a connector: what is promised, loaded and stored, per request.

No method touches a socket. Only `match` waits for the sidecar, a few milliseconds
a step at most, and `reset`. All run in the engine's scheduler thread; answers from
the sidecar are looked at there too.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import wire
from .call import DEADLINE, UNREACHABLE, Call
from .jobs import LoadJob, Step, StoreJob
from .record import Recorder
from .session import Session
from .settings import Settings

_SERVER_SHARE = 0.9
_EXTEND_S = 1.0
_RESET_S = 1.0
_STALE_S = 1.0
_DROP_SLACK_S = 3.0
_IDLE_WAIT_S = 0.001


@dataclass
class _Grant:
    """A lease on pages [first, first + len(locations)), until at least `until`."""

    epoch: int
    lease: int
    first: int
    locations: wire.Records
    asked: float
    until: float

    @property
    def end(self) -> int:
        return self.first + len(self.locations)


class _Request:
    """What is known of one request of the engine.

    `salt` and `extra` seed its chain. `reads`: pages may answer it. `denied`: a
    load failed, never promise again. `barred`: a reset came since, store
    nothing more. `stored`: pages handed to the workers. `sent`: tokens in the
    sidecar's chain, `chain`: full pages that it has acknowledged.
    """

    def __init__(
        self,
        request_id: str,
        salt: str | None,
        tokens: Callable[[int, int], bytes],
        extra: str | None,
        reads: bool,
    ):
        self.id = request_id
        self.salt = salt
        self.extra = extra
        self.reads = reads
        self.tokens = tokens
        self.barred = False
        self.denied = False
        self.gone = False
        self.epoch = 0
        self.handle = 0
        self.granted = 0.0
        self.sent = 0
        self.chain = 0
        self.page_tokens = 0
        self.asking: Call[wire.Leased] | None = None
        self.asked_at = 0.0
        self.asking_epoch = 0
        self.asking_handle = 0  # of the lease that was asked for, 0 with a match
        self.asked_tokens = 0
        self.was_asked = False
        self.asked_first = 0
        self.grant: _Grant | None = None
        self.local = 0
        self.loading: LoadJob | None = None
        self.loading_epoch = 0
        self.stored = 0
        self.preemptions = 0


class Scheduler:
    """Decides per request. Token counts are the engine's, `block` is its block in tokens."""

    def __init__(
        self,
        session: Session,
        block: int,
        settings: Settings,
        recorder: Recorder,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        self._session = session
        self._block = block
        self._settings = settings
        self._recorder = recorder
        self._loads = loads
        self._stores = stores
        self._requests: dict[str, _Request] = {}
        self._asking: dict[str, _Request] = {}
        self._jobs: list[LoadJob] = []
        self._patience = settings.match_wait_ms / 1e3  # in seconds, left of this step
        self._late: collections.deque[tuple[_Request, int, int, int, wire.Leased]]
        self._late = collections.deque()

    def add(
        self,
        request_id: str,
        salt: str | None,
        tokens: Callable[[int, int], bytes],
        extra: str | None = None,
        reads: bool = True,
    ) -> None:
        """Take a request whose KV depends on its tokens, `salt` and `extra` only.

        `tokens(a, b)` returns its tokens [a, b), prompt and output, in wire
        form. Without `reads` its pages are stored, and none are promised to it.
        """
        self._requests[request_id] = _Request(
            request_id, salt, tokens, extra, reads and self._loads
        )

    def knows(self, request_id: str) -> bool:
        """Return whether the request was added and has not been removed."""
        return request_id in self._requests

    def deny(self, request_id: str) -> None:
        """Promise nothing to this request any more."""
        r = self._requests.get(request_id)
        if r is not None:
            r.denied = True

    def match(
        self, request_id: str, computed: int, num_tokens: int, preemptions: int
    ) -> int | None:
        """Return how many tokens beyond `computed` are leased, or None to be asked again.

        `computed` is the engine's own hit, whole blocks; `num_tokens` is how
        long the request is. The answer is whole blocks and leaves a token to
        compute.
        """
        r = self._requests.get(request_id)
        if r is None or r.denied or (not r.reads and r.was_asked):
            return 0
        r.local = computed
        if preemptions != r.preemptions:
            r.preemptions, r.was_asked = preemptions, False
        fresh = False
        if r.asking is not None:
            if not r.asking.done():
                return None
            self._absorb(r)
            fresh = True
        offer = self._offer(r, computed, num_tokens, fresh)
        if offer is not None:
            if self._stores and not r.was_asked:
                self._ask(r, computed, num_tokens)  # for the chain alone, nobody waits for it
            return offer
        self._ask(r, computed, num_tokens)
        if r.asking is None or not r.reads:
            return 0
        # To be asked again costs the request a step, which may take much longer.
        if not self._answered_soon(r.asking):
            return None
        self._absorb(r)
        return self._offer(r, computed, num_tokens, True)

    def _answered_soon(self, call: Call[wire.Leased]) -> bool:
        """Wait for an answer while this step has patience left; return whether it is there."""
        began = time.monotonic()
        if self._patience > 0:
            call.pause(self._patience)
            self._patience -= time.monotonic() - began
        return call.done()

    def _offer(self, r: _Request, computed: int, num_tokens: int, fresh: bool) -> int | None:
        """Return what can be promised now, or None when the sidecar should be asked."""
        most = (num_tokens - 1) // self._block * self._block
        if computed >= most:
            return 0
        g = r.grant
        if g is None and r.was_asked:
            # Asked again where the engine's own hit has shrunk below what was asked for.
            shrunk = r.page_tokens and computed // r.page_tokens < r.asked_first
            return None if shrunk and r.handle and self._alive(r.epoch) else 0
        if g is None:
            return None
        if not self._alive(g.epoch) or (not fresh and time.monotonic() > g.until - self._margin):
            self._give_back(r)
            return None
        size = r.page_tokens
        if computed // size < g.first:
            # The engine's own hit has shrunk since the sidecar was asked.
            self._give_back(r)
            return None
        return max(min(g.end * size, most) - computed, 0)

    @property
    def _margin(self) -> float:
        return min(self._settings.lease_ms / 4e3, _STALE_S)

    def _alive(self, epoch: int) -> bool:
        up = self._session.up
        return up is not None and up.epoch == epoch

    def _ask(self, r: _Request, computed: int, num_tokens: int) -> None:
        """Send the match, or for a known chain the lease. Without a connection do nothing."""
        r.was_asked = True
        up = self._session.up
        if up is None or self._session.lagging:
            self._miss(UNREACHABLE)
            return
        now = time.monotonic()
        wait = self._settings.match_deadline_ms / 1e3
        deadline, server = now + wait, now + wait * _SERVER_SHARE
        r.asked_at, r.asking_epoch = now, up.epoch
        size = up.registered.page_tokens
        r.asked_first = computed // size
        if r.handle and r.epoch == up.epoch:
            self._extend(r, num_tokens)
            first = computed // size
            r.asked_tokens, r.asking_handle = r.sent, r.handle
            pages = max(num_tokens // size - first, 0)
            r.asking = self._session.lease(
                up.epoch, r.handle, first, pages, deadline, server, self._settings.lease_ms
            )
        else:
            if num_tokens > wire.MAX_TOKENS:
                self._miss("too_large")
                return
            r.handle = r.asking_handle = 0
            epoch = up.epoch

            def late(leased: wire.Leased) -> None:
                self._session.give_back(epoch, leased.lease)
                if r.gone or r.barred:
                    self._session.drop(epoch, leased.handle)
                else:
                    self._late.append((r, epoch, size, num_tokens, leased))

            r.asked_tokens = num_tokens
            r.asking = self._session.match(
                epoch,
                r.tokens(0, num_tokens),
                deadline,
                server,
                computed,
                self._settings.lease_ms,
                r.salt,
                0 if r.reads else wire.MATCH_PRESENCE,
                late,
                r.extra,
            )
        self._asking[r.id] = r

    def _absorb(self, r: _Request) -> None:
        """Take the answer to a match or lease that has ended."""
        call, r.asking = r.asking, None
        self._asking.pop(r.id, None)
        assert call is not None
        if not call.ok or call.result is None:
            self._miss(call.reason)
            if call.reason not in (UNREACHABLE, DEADLINE):
                self._drop_chain(r)
            return
        up = self._session.up
        if up is None or up.epoch != r.asking_epoch:
            self._miss(UNREACHABLE)
            return
        leased = call.result
        if not r.asking_handle:
            self._adopt(r, r.asking_epoch, up.registered.page_tokens, r.asked_tokens, leased)
        elif r.handle == leased.handle:  # else an extend has failed: the chain lacks tokens
            r.chain = max(r.chain, leased.chain_pages)
        self._recorder.add("matches")
        self._recorder.add("matched_pages", leased.pages)
        self._recorder.add("matched_pages_from_peers", leased.from_peers)
        if leased.reason:
            self._recorder.add("misses_" + wire.reason_name(leased.reason))
        if leased.lease:
            until = r.asked_at + leased.lease_ms / 1e3
            r.grant = _Grant(
                r.asking_epoch, leased.lease, leased.first, leased.locations, r.asked_at, until
            )

    def _adopt(
        self, r: _Request, epoch: int, page_tokens: int, sent: int, leased: wire.Leased
    ) -> None:
        r.handle, r.epoch, r.granted = leased.handle, epoch, r.asked_at
        r.page_tokens, r.sent, r.chain = page_tokens, sent, leased.chain_pages
        r.stored = 0

    def _miss(self, reason: str) -> None:
        self._recorder.add("matches")
        self._recorder.add("misses_" + reason)

    def _cancel(self, r: _Request, reason: str) -> None:
        """End what is being asked, or take its answer where that has come already."""
        if r.asking is None:
            return
        if not r.asking.done():
            r.asking.fail(reason)
        if r.asking.reason == reason:
            r.asking = None
            self._asking.pop(r.id, None)
        else:
            self._absorb(r)

    def _drop_chain(self, r: _Request) -> None:
        """Forget the chain. Commits that other connections have under way still need it."""
        if r.handle:
            wait = self._settings.store_deadline_ms / 1e3 + _DROP_SLACK_S
            self._session.drop(r.epoch, r.handle, wait)
            r.handle = 0

    def _give_back(self, r: _Request) -> None:
        if r.grant is not None:
            self._session.give_back(r.grant.epoch, r.grant.lease)
            r.grant = None

    def allocated(self, request_id: str, external: int, block_ids: list[int]) -> None:
        """Turn the promise into a load, or give it back when `external` is 0.

        `block_ids` are all the request's blocks, first tokens first; `external`
        tokens after the engine's own hit are to be loaded.
        """
        r = self._requests.get(request_id)
        if external <= 0:
            if r is not None and r.loading is None:
                self._give_back(r)
            return
        job = self._load_job(r, request_id, external, block_ids)
        self._jobs.append(job)
        if r is not None and r.grant is not None:
            r.loading, r.loading_epoch, r.grant = job, r.grant.epoch, None

    def fail(self, request_id: str, reason: str) -> None:
        """Let the workers report a load that could not even begin."""
        self.deny(request_id)
        job = LoadJob(request_id, 0, 0, 0, 0, 0, 1, [], None, 0.0, 0.0, reason)
        self._jobs.append(job)
        r = self._requests.get(request_id)
        if r is not None:
            self._give_back(r)
            r.loading = job

    def _load_job(
        self, r: _Request | None, request_id: str, external: int, block_ids: list[int]
    ) -> LoadJob:
        if r is None or r.grant is None:
            raise ValueError(f"{external} tokens are to be loaded that were not promised")
        g, size, block = r.grant, r.page_tokens, self._block
        begin, end = r.local, r.local + external
        first, last = begin // size, -(-end // size)
        ids = block_ids[begin // block : end // block]
        if first < g.first or last > g.end or len(ids) != external // block or end % block:
            raise ValueError(f"tokens [{begin}, {end}) are to be loaded, not what was promised")
        deadline = time.monotonic() + self._settings.load_deadline_ms / 1e3
        return LoadJob(
            request=request_id,
            handle=r.handle,
            lease=g.lease,
            page=first,
            offset=first - g.first,
            skip=(begin - first * size) // block,
            blocks=size // block,
            block_ids=ids,
            locations=g.locations[first - g.first : last - g.first],
            granted=g.asked,
            deadline=deadline,
        )

    def step(
        self,
        scheduled: Iterable[tuple[str, int, int]],
        blocks: Callable[[str], list[int]],
        idle: bool,
    ) -> Step:
        """Return the jobs of one step.

        `scheduled` lists (request id, tokens computed when the step ends,
        tokens known); `blocks(id)` returns a request's block ids. Raises what
        they raise, after the loads were taken into `Step`: see `loads`.
        """
        self._patience = self._settings.match_wait_ms / 1e3
        self._take_late()
        stores: list[StoreJob] = []
        for request_id, computed, known in scheduled:
            r = self._requests.get(request_id)
            if r is None:
                continue
            if r.asking is not None and r.asking.done():
                self._absorb(r)
                self._give_back(r)
            if not self._stores or not r.handle or not self._alive(r.epoch):
                continue
            job = self._store_job(r, computed, blocks)
            if job is not None:
                stores.append(job)
            if known // r.page_tokens > r.sent // r.page_tokens:
                self._extend(r, known)
        return Step([], stores, idle)

    def loads(self) -> list[LoadJob]:
        """Return the loads to begin, once each."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def wait_for_answer(self) -> None:
        """Give the sidecar a millisecond when the engine has nothing else to do."""
        for r in self._asking.values():
            if r.asking is not None and not r.asking.done():
                r.asking.pause(_IDLE_WAIT_S)
                return

    def _store_job(
        self, r: _Request, computed: int, blocks: Callable[[str], list[int]]
    ) -> StoreJob | None:
        size = r.page_tokens
        full = min(computed // size, r.chain)
        if full <= r.stored or r.loading is not None:
            return None
        per = size // self._block
        ids = blocks(r.id)[r.stored * per : full * per]
        if len(ids) != (full - r.stored) * per or 0 in ids:
            return None  # a table that is not whole, or the null block
        job = StoreJob(r.id, r.handle, r.stored, per, ids, r.granted)
        r.stored = full
        return job

    def _extend(self, r: _Request, known: int) -> None:
        """Send the tokens that the chain lacks; its pages count once acknowledged."""
        if known <= r.sent or known > wire.MAX_TOKENS:
            return
        ids = r.tokens(r.sent, known)
        r.sent = known
        handle, epoch = r.handle, r.epoch

        def then(call: Call[int]) -> None:
            if r.handle != handle:
                return
            if call.ok and call.result is not None:
                r.chain = call.result
            else:
                # Nobody knows what the chain holds now: it names no pages any more.
                r.handle = 0
                self._session.drop(epoch, handle, _DROP_SLACK_S)

        self._session.extend(epoch, handle, ids, time.monotonic() + _EXTEND_S, then)

    def _take_late(self) -> None:
        """Keep the chains of matches that were answered after their deadline."""
        while self._late:
            r, epoch, page_tokens, sent, leased = self._late.popleft()
            if r.gone or r.barred or r.handle or r.asking is not None:
                self._session.drop(epoch, leased.handle)
            elif self._alive(epoch):
                self._adopt(r, epoch, page_tokens, sent, leased)

    def loaded(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Take what the workers reported. A request whose load failed is denied for good."""
        for request_id in failed:
            r = self._requests.get(request_id)
            if r is not None:
                r.denied = True
                if r.loading is not None and r.loading.lease:
                    # Ranks that failed early have not released it.
                    self._session.give_back(r.loading_epoch, r.loading.lease)
        for request_id in finished:
            r = self._requests.get(request_id)
            if r is not None:
                r.loading = None

    def lost_blocks(self, block_ids: set[int]) -> None:
        """Take a failed load that is reported by blocks instead of by request."""
        for r in self._requests.values():
            if r.loading is not None and not block_ids.isdisjoint(r.loading.block_ids):
                r.denied = True

    def remove(self, request_id: str) -> None:
        """Forget a request; its lease and chain are given back."""
        r = self._requests.pop(request_id, None)
        if r is None:
            return
        r.gone = True
        self._cancel(r, "cancelled")
        self._give_back(r)
        self._take_late()
        self._drop_chain(r)

    def reset(self) -> bool:
        """Drop the namespace's pages in the sidecar; return that nothing of before is used.

        A barrier: nothing that was computed, leased or promised before is
        stored or loaded after. Loads under way fail, since their leases are
        gone, and chains of requests that run or have ended name no pages any
        more. Waits for the sidecar, a second at most; without an answer it is
        told again before anything else once it is back.
        """
        for r in self._requests.values():
            self._cancel(r, "reset")
            self._give_back(r)
            if r.loading is not None and r.loading.lease:
                self._session.give_back(r.loading_epoch, r.loading.lease)
            if r.handle:
                self._session.drop(r.epoch, r.handle)
            r.denied, r.barred, r.handle = True, True, 0
        self._asking.clear()
        self._take_late()
        self._session.drop_now()
        self._session.reset(time.monotonic() + _RESET_S).wait()
        return True
