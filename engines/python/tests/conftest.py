"""A fake sidecar and sessions to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sidecar import FakeSidecar
from helpers import registration, soon
from membrane_kv.session import Session


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    fake = FakeSidecar(str(tmp_path / "s"), arena_bytes=4 << 20)
    yield fake
    fake.close()


@pytest.fixture
def sessions(sidecar: FakeSidecar) -> Iterator[Callable[..., Session]]:
    """Return a function that starts a session of a role and waits until it is up."""
    made: list[Session] = []

    def start(role: str = "worker", **changes: Any) -> Session:
        s = Session((sidecar.path,), registration(role, **changes), name=role).start()
        made.append(s)
        assert s.wait_up(soon()) is not None
        return s

    yield start
    for s in made:
        s.stop()
