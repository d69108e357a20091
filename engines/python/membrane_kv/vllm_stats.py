"""What vLLM's own logs and metrics say of the connector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

_SECONDS = "_us"

# Counter of the recorder -> metric and what it counts.
_PLAIN = {
    "matches": ("matches", "Requests that asked the sidecar"),
    "matched_pages": ("matched_pages", "Pages leased for requests"),
    "matched_pages_from_peers": ("matched_pages_from_peers", "Of these, fetched from peers"),
    "none_us": ("match_wait_seconds", "Time that requests were put off for an answer"),
    "loads": ("loads", "Loads that ended well"),
    "loaded_pages": ("loaded_pages", "Pages copied into the engine's blocks"),
    "loaded_bytes": ("loaded_bytes", "Bytes copied into the engine's blocks"),
    "load_us": ("load_seconds", "Time of the loads that ended well"),
    "stored_pages": ("stored_pages", "Pages handed over"),
    "stores_existing": ("stores_existing", "Pages that the sidecar had already"),
    "store_us": ("store_seconds", "Time that steps waited for their stores"),
    "hook_errors": ("hook_errors", "Hooks that failed and did nothing"),
}
# Prefix of counters whose names end in a reason -> metric and what it counts.
_BY_REASON = {
    "misses_": ("misses", "Requests whose pages end early, by reason"),
    "failed_loads_": ("failed_loads", "Loads that failed and are computed, by reason"),
    "dropped_stores_": ("dropped_stores", "Pages not stored, by reason"),
    "passed_by_": ("passed_by", "Requests that never ask, by reason"),
}


@dataclass
class MembraneStats(KVConnectorStats):
    """Counters since the last time, of one process or of several summed up.

    `data`: name -> count; names that end in _us are microseconds. At TP > 1
    what workers count is the sum over the ranks.
    """

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> MembraneStats:
        """Add another's counters."""
        for name, n in other.data.items():
            self.data[name] = self.data.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counters for a log line: times in seconds, and how fast loads were."""
        found: dict[str, int | float] = {}
        for name, n in sorted(self.data.items()):
            if name.endswith(_SECONDS):
                found[name.removesuffix(_SECONDS) + "_s"] = round(n / 1e6, 6)
            else:
                found[name] = n
        if self.data.get("load_us"):
            found["load_GB_per_s"] = round(
                self.data.get("loaded_bytes", 0) / self.data["load_us"] / 1e3, 3
            )
        return found

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class MembraneMetrics(KVConnectorPromMetrics):
    """Counters vllm:membrane_…, of each engine, with the reason where there is one."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            name: self._counter(metric, text, labelnames) for name, (metric, text) in _PLAIN.items()
        }
        self._by_reason = {
            prefix: self._counter(metric, text, [*labelnames, "reason"])
            for prefix, (metric, text) in _BY_REASON.items()
        }

    def _counter(self, metric: str, text: str, labelnames: list[str]) -> Any:
        return self._counter_cls(
            name="vllm:membrane_" + metric, documentation=text + ".", labelnames=labelnames
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last time."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, n in transfer_stats_data.items():
            if name in self._plain:
                value = n / 1e6 if name.endswith(_SECONDS) else n
                self._plain[name].labels(*labels).inc(value)
                continue
            for prefix, counter in self._by_reason.items():
                if name.startswith(prefix):
                    counter.labels(*labels, name.removeprefix(prefix)).inc(n)
