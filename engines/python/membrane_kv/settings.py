"""What a user may set for a connector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .client import endpoints


@dataclass(frozen=True)
class Settings:
    """The keys of kv_connector_extra_config. Times in milliseconds.

    sidecar: path of the engine socket or HOST:PORT of the localhost listener
    (default: MEMBRANE_SIDECAR, else /run/membrane/engine.sock, else
    localhost:7600).
    match_deadline_ms: how long a request may wait for the answer to its match,
    which includes fetching pages from peers.
    match_wait_ms: how long the scheduler of vLLM may wait for such answers in
    one step, all together; whose answer is not there by then is asked about
    again in the next one. 0 never waits.
    load_deadline_ms: how long a load may wait for the sidecar. Copying is not
    counted.
    store_deadline_ms: how long one step may wait to hand pages over. Pages
    that are not handed over by then are not stored.
    lease_ms: how long the sidecar keeps matched pages in place.
    verify: "grant" checks pages when they are leased, "all" once more after
    the copy.
    weights_id: names the exact weights, instead of what is found.
    key: an API key with the scope engine (default: MEMBRANE_API_KEY).
    inbox_slots: pages that may be on their way into the sidecar at a time.
    stats_file: where to write counters, hook times and checksums, as JSON.
    inline: use no shared memory.
    pin: register the shared memory with the CUDA driver, where blocks lie on a GPU.
    """

    sidecar: str = ""
    match_deadline_ms: float = 500.0
    match_wait_ms: float = 2.0
    load_deadline_ms: float = 2000.0
    store_deadline_ms: float = 200.0
    lease_ms: int = 10_000
    verify: str = "grant"
    weights_id: str = ""
    key: str = ""
    inbox_slots: int = 32
    stats_file: str = ""
    inline: bool = False
    pin: bool = True

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Check the user's keys. Raises ValueError naming the key and its value."""
        known = cls.__dataclass_fields__
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in known:
                raise ValueError(f"{name} is not a setting; there are {', '.join(known)}")
            default = known[name].default
            numeric = isinstance(default, (int, float)) and not isinstance(default, bool)
            fits = (
                isinstance(value, (int, float)) and not isinstance(value, bool)
                if numeric
                else isinstance(value, type(default))
            )
            if not fits:
                raise ValueError(f"{name} is {value!r}, not a {type(default).__name__}")
            values[name] = int(value) if isinstance(default, int) and numeric else value
        s = cls(**values)
        for name in ("match_deadline_ms", "load_deadline_ms", "store_deadline_ms", "lease_ms"):
            if not 1 <= getattr(s, name) <= 600_000:
                raise ValueError(f"{name} is {getattr(s, name)}, not between 1 and 600000")
        if not 0 <= s.match_wait_ms <= 100:
            raise ValueError(f"match_wait_ms is {s.match_wait_ms}, not between 0 and 100")
        if not 1 <= s.inbox_slots <= 4096:
            raise ValueError(f"inbox_slots is {s.inbox_slots}, not between 1 and 4096")
        if s.verify not in ("grant", "all"):
            raise ValueError(f'verify is {s.verify!r}, not "grant" or "all"')
        return s

    @property
    def places(self) -> tuple[str, ...]:
        """Where to look for the sidecar, in this order."""
        return endpoints(self.sidecar)

    @property
    def api_key(self) -> str:
        """The API key, or ""."""
        return self.key or os.environ.get("MEMBRANE_API_KEY", "")
