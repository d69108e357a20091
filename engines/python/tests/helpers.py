"""What the tests share: sizes, a registration, and waiting for a condition."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from membrane_kv import wire

BLOCK = 32
LAYERS = 2
LAYER_BYTES = 512
BLOCK_BYTES = LAYERS * LAYER_BYTES
PAGE = 64


def eventually(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Return as soon as the condition holds; fail after `timeout` seconds."""
    pause = threading.Event()
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.002)


def soon(seconds: float = 5.0) -> float:
    """Return a deadline."""
    return time.monotonic() + seconds


MODEL = wire.Model("w1", "float32", "base=10000", LAYERS, 2, 32)
DESCRIPTOR = wire.Descriptor(
    "vllm-lbhnc", "float32", BLOCK, BLOCK_BYTES, (0, LAYERS), (0, 2), "vec"
)


def registration(role: str = "worker", slots: int = 4, **changes: Any) -> wire.Register:
    """Return what a process of the engine "e" says of itself."""
    r = wire.Register("e", role, MODEL, DESCRIPTOR, slots if role == "worker" else 0)
    return dataclasses.replace(r, **changes)
