"""What the scheduler's side asks of the workers' side in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from .wire import Records


@dataclass
class LoadJob:
    """Copy leased pages into the engine's blocks, then release the lease.

    `locations` has shape [pages, shards] of wire.LOCATION. `block_ids` are the
    blocks to write, in order; the first one is block `skip` of the first page.
    `blocks` is the number of blocks in a page. `page` is the first page's
    place in the chain of `handle`, `offset` its place in the lease. `granted`
    and `deadline` are on time.monotonic(), which the processes of one machine
    share; what was granted came after `granted`. Without `locations` it is a
    load that failed before it began, `reason` says why.
    """

    request: str
    handle: int
    lease: int
    page: int
    offset: int
    skip: int
    blocks: int
    block_ids: list[int]
    locations: Records | None
    granted: float
    deadline: float
    reason: str = ""


@dataclass
class StoreJob:
    """Store pages [page, page + len(block_ids) / blocks) of the chain of `handle`."""

    request: str
    handle: int
    page: int
    blocks: int
    block_ids: list[int]
    granted: float


@dataclass
class Step:
    """Everything for one step. `idle`: the engine computes nothing in it."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    idle: bool = False
