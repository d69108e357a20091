"""TensorRT-LLM's KV pool as blocks of bytes, on the CPU or on an accelerator."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from .pool import Pool
from .shared import Bytes


def pool_of(tensor: Any) -> Pool:
    """Return the blocks of a pool tensor, shape [blocks, layers, 2 or 1, numbers].

    Takes a torch tensor, or a numpy array, which is what tests have. Nothing
    is copied. Raises ValueError when the pool does not lie in one piece.
    """
    if isinstance(tensor, np.ndarray):
        return _host_pool(tensor)
    if not tensor.is_contiguous():
        raise ValueError("the KV pool does not lie in one piece")
    import torch

    raw = tensor.view(torch.uint8)
    return _host_pool(raw.numpy()) if raw.device.type == "cpu" else DevicePool(raw)


def _host_pool(array: Any) -> Pool:
    if not array.flags.c_contiguous:
        raise ValueError("the KV pool does not lie in one piece")
    raw: Bytes = array.view(np.uint8).reshape(*array.shape[:2], -1)
    return Pool([raw[:, layer] for layer in range(raw.shape[1])])


class DevicePool(Pool):
    """Blocks in an accelerator's memory: bytes of shape [blocks, layers, 2 or 1, bytes].

    Copies are ordered on torch's current stream and have ended when they
    return, so a block is read after what computed it and written before what
    uses it, and the host's memory may be used again.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw.view(raw.shape[0], raw.shape[1], -1)
        self.blocks, self.layers, self.layer_bytes = (int(n) for n in self._raw.shape)
        self.block_bytes = self.layers * self.layer_bytes

    def write(self, block: int, data: Bytes) -> None:
        """Copy `data`, shape [layers, layer bytes], into a block."""
        import torch

        self._raw[block].copy_(torch.from_numpy(data))

    def read(self, block: int, out: Bytes) -> None:
        """Copy a block into `out`, shape [layers, layer bytes]."""
        import torch

        torch.from_numpy(out).copy_(self._raw[block])


def on_stream(pool: Pool, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Make `stream` torch's current one for copies of a pool on an accelerator."""
    if stream is None or not isinstance(pool, DevicePool):
        return contextlib.nullcontext()
    import torch

    # A view of a CUDA stream by its number, where the runtime gives one.
    if isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream)
    ordered: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
    return ordered
