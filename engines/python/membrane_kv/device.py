"""The engine's KV blocks on an accelerator, copied through torch on a stream of their own.

Unproven: no accelerator was at hand. The order of streams and events is what
its test watches, with stand-ins.
"""

from __future__ import annotations

from typing import Any, Protocol

from .pool import Pool
from .shared import Bytes


class Queue(Protocol):
    """What is needed of a device: its compute stream, a side stream, and copies on the latter.

    `mark` returns an event on the compute stream, `after` has the side stream
    wait for such an event. `upload` and `download` copy between a block, uint8
    in one piece on the device, and host bytes, and may return before they are
    done; `drain` waits until all are.
    """

    def mark(self) -> Any: ...  # noqa: D102

    def after(self, event: Any) -> None: ...  # noqa: D102

    def upload(self, block: Any, data: Bytes) -> None: ...  # noqa: D102

    def download(self, block: Any, out: Bytes) -> None: ...  # noqa: D102

    def drain(self) -> None: ...  # noqa: D102


class DevicePool(Pool):
    """As Pool, over device tensors: each of `layers` has shape [blocks, bytes] of uint8.

    Copies only begin in `read` and `write`. They are ordered after what the
    compute stream had been given by `mark`, and have ended when `drain` returns:
    a lease is released, a slot committed and a load reported only then. One
    pool, so one side stream, for each thread.
    """

    def __init__(self, layers: list[Any], queue: Queue) -> None:
        first = layers[0]
        for layer in layers:
            if tuple(layer.shape) != tuple(first.shape) or len(layer.shape) != 2:
                raise ValueError(f"the layers' blocks differ: {layer.shape} and {first.shape}")
        self.blocks, self.layer_bytes = (int(n) for n in first.shape)
        self.layers = len(layers)
        self.block_bytes = self.layers * self.layer_bytes
        self._tensors = layers
        self._queue = queue

    def mark(self) -> Any:
        """Return an event after all that compute was given so far. In the engine's thread."""
        return self._queue.mark()

    def after(self, event: Any) -> None:
        """Have the copies that follow wait for an event of `mark`."""
        self._queue.after(event)

    def write(self, block: int, data: Bytes) -> None:
        """Begin to copy `data`, shape [layers, layer bytes], into a block."""
        for tensor, part in zip(self._tensors, data, strict=True):
            self._queue.upload(tensor[block], part)

    def read(self, block: int, out: Bytes) -> None:
        """Begin to copy a block into `out`, shape [layers, layer bytes]."""
        for tensor, part in zip(self._tensors, out, strict=True):
            self._queue.download(tensor[block], part)

    def drain(self) -> None:
        """Wait until every copy that was begun has ended."""
        self._queue.drain()


class TorchQueue:
    """A Queue of torch's: a side stream of the device that a tensor lies on."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._side = torch.Stream(device)

    def mark(self) -> Any:
        """See Queue."""
        return self._torch.accelerator.current_stream(self._device).record_event()

    def after(self, event: Any) -> None:
        """See Queue."""
        self._side.wait_event(event)

    def upload(self, block: Any, data: Bytes) -> None:
        """See Queue. The arena is read only; torch only reads it here."""
        with self._side:
            block.copy_(self._host(data), non_blocking=True)

    def download(self, block: Any, out: Bytes) -> None:
        """See Queue."""
        with self._side:
            self._host(out).copy_(block, non_blocking=True)

    def _host(self, data: Bytes) -> Any:
        # Over the address, since torch warns of arrays that it must not write.
        import ctypes

        address = data.ctypes.data
        view = (ctypes.c_uint8 * data.nbytes).from_address(address)
        return self._torch.frombuffer(view, dtype=self._torch.uint8)

    def drain(self) -> None:
        """See Queue."""
        self._side.record_event().synchronize()
