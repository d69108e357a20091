"""The table of who has read whose pages: tests record rows, the end of a run prints them.

MEMBRANE_TEST_MATRIX names a file in which several runs collect their rows.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

_rows: list[Row] = []


@dataclass(frozen=True)
class Row:
    """A prompt that one engine computed and another loaded.

    `pages` and `size` (bytes) are what the reader's sidecar leased to it; `translated`
    how many of the pages it made from another form. `logprobs` is the largest
    difference to the reader's own recompute, `engines` that between the recomputes of
    both engines, None where that is not another figure.
    """

    writer: str
    reader: str
    pages: int
    size: int
    translated: int
    tokens_equal: bool
    logprobs: float
    engines: float | None = None


def record(row: Row) -> None:
    """Keep a row for the end of the run."""
    _rows.append(row)
    if path := os.environ.get("MEMBRANE_TEST_MATRIX"):
        with Path(path).open("a") as f:
            f.write(json.dumps(asdict(row)) + "\n")


def collected() -> list[Row]:
    """Return the rows so far, those of earlier runs first."""
    path = os.environ.get("MEMBRANE_TEST_MATRIX")
    if not path or not Path(path).exists():
        return list(_rows)
    return [Row(**json.loads(line)) for line in Path(path).read_text().splitlines()]


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| writer | reader | pages | bytes | pages translated | next tokens"
        " | log-probabilities | between the engines |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        tokens = "equal" if r.tokens_equal else "DIFFERENT"
        engines = "" if r.engines is None else f"{r.engines:.1e}"
        lines.append(
            f"| {r.writer} | {r.reader} | {r.pages} | {r.size} | {r.translated} | {tokens}"
            f" | {r.logprobs:.1e} | {engines} |"
        )
    return lines
