"""The engine's KV blocks in this process's memory, as bytes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from .shared import Bytes


class Pool:
    """A view of every layer's blocks; nothing is copied to make it.

    Each of `layers`, in layer order, has shape [blocks, bytes of one block of
    one layer]. A block of this shard is one block of every layer, one after
    the other: shape [layers, bytes of one block of one layer].
    """

    def __init__(self, layers: list[Bytes]) -> None:
        first = layers[0]
        for layer in layers:
            if layer.shape != first.shape or layer.strides != first.strides or layer.ndim != 2:
                raise ValueError(f"the layers' blocks differ: {layer.shape} and {first.shape}")
            if layer.strides[1] != 1:
                raise ValueError("a block does not lie in one piece")
        self.blocks, self.layer_bytes = first.shape
        self.layers = len(layers)
        self.block_bytes = self.layers * self.layer_bytes
        self._layers = layers
        steps = {b.ctypes.data - a.ctypes.data for a, b in itertools.pairwise(layers)}
        self._all: npt.NDArray[np.uint8] | None = None
        if len(steps) <= 1:
            # Layers at equal distances: one view [blocks, layers, bytes] over all of them.
            step = steps.pop() if steps else first.strides[0]
            shape = (self.blocks, self.layers, self.layer_bytes)
            strides = (first.strides[0], step, 1)
            self._all = np.lib.stride_tricks.as_strided(first, shape, strides)

    def write(self, block: int, data: Bytes) -> None:
        """Copy `data`, shape [layers, layer bytes], into a block."""
        if self._all is not None:
            self._all[block] = data
            return
        for layer, part in zip(self._layers, data, strict=True):
            layer[block] = part

    def read(self, block: int, out: Bytes) -> None:
        """Copy a block into `out`, shape [layers, layer bytes]."""
        if self._all is not None:
            out[...] = self._all[block]
            return
        for layer, part in zip(self._layers, out, strict=True):
            part[...] = layer[block]

    def mark(self) -> Any:
        """Return what `after` needs to order copies after the engine's work so far: nothing here.

        What the CPU has computed is in memory when a hook runs.
        """
        return None

    def after(self, event: Any) -> None:
        """Order the copies that follow after `mark`."""

    def drain(self) -> None:
        """Return once every copy has ended; `read` and `write` end before they return."""

    def cut(self, data: Bytes) -> Bytes:
        """Return an object as blocks: shape [blocks in it, layers, layer bytes]."""
        return data.reshape(-1, self.layers, self.layer_bytes)
