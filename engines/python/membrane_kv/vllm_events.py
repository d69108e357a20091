"""KV events of the sidecar's memory, for those who route by vLLM's event stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from .announce import Stored


class StoredPages(KVConnectorWorkerMetadata):
    """(request, page) -> how many ranks have stored that page since the last step."""

    def __init__(self, pages: dict[tuple[str, int], int]) -> None:
        self.pages = pages

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoredPages:
        """Add another rank's."""
        assert isinstance(other, StoredPages)
        for key, n in other.pages.items():
            self.pages[key] = self.pages.get(key, 0) + n
        return self


def as_events(
    announced: Iterable[Stored | tuple[Any, ...]], block_tokens: int
) -> list[BlockStored | BlockRemoved]:
    """Return vLLM's events for what is held and what was taken back."""
    events: list[BlockStored | BlockRemoved] = []
    for a in announced:
        if not isinstance(a, Stored):
            removed = [maybe_convert_block_hash(h) for h in a]
            events.append(BlockRemoved(block_hashes=removed, medium=MEDIUM_CPU, group_idx=0))
            continue
        lora = a.about.lora_request
        events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(h) for h in a.hashes],
                parent_block_hash=None if a.parent is None else maybe_convert_block_hash(a.parent),
                token_ids=list(a.tokens),
                block_size=block_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
                group_idx=0,
                session_id=getattr(a.about, "session_id", None),
            )
        )
    return events
