"""The sidecar's memory registered with the CUDA driver, so that a GPU copies it at full speed.

Unproven: no GPU was at hand. `python -m membrane_bench.pinned` measures it where
there is one.

Copies from memory that the driver does not know go through its own pinned buffer,
piece by piece, and hold up the thread that asks. The arena is mapped read only, and so
it is registered. Reference: the CUDA driver API, memory management, cuMemHostRegister.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Protocol

_PORTABLE = 0x01  # pinned for every context of the process
_READ_ONLY = 0x08  # the device only reads it: needed where the processor may only read it


class PinError(Exception):
    """The driver is not there, or will not register the memory."""


class Driver(Protocol):
    """What registers memory with a device. `address` is that of a page. Any thread may call it.

    `pin` takes seconds for many gigabytes, and raises PinError. `unpin` must
    come before the memory is unmapped and once no copy runs.
    """

    def pin(self, address: int, size: int, read_only: bool) -> None: ...  # noqa: D102

    def unpin(self, address: int) -> None: ...  # noqa: D102


class CudaDriver:
    """libcuda, in the primary context of a device, which is torch's too."""

    def __init__(self, device: int, library: Any = None) -> None:
        """Raise PinError where there is no driver or no such device."""
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as e:
                raise PinError(str(e)) from e
        self._library = library
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, types in (
            ("cuInit", (ctypes.c_uint,)),
            ("cuDeviceGet", (pointer, number)),
            ("cuDevicePrimaryCtxRetain", (pointer, number)),
            ("cuCtxPushCurrent_v2", (pointer,)),
            ("cuCtxPopCurrent_v2", (pointer,)),
            ("cuMemHostRegister_v2", (pointer, size, ctypes.c_uint)),
            ("cuMemHostUnregister", (pointer,)),
            ("cuGetErrorName", (number, pointer)),
        ):
            getattr(library, name).argtypes = types
        self._call("cuInit", 0)
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        # For the life of the process: torch holds it as long.
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle.value)

    def pin(self, address: int, size: int, read_only: bool) -> None:
        """See Driver."""
        flags = _PORTABLE | _READ_ONLY if read_only else _PORTABLE
        with self._current():
            self._call("cuMemHostRegister_v2", address, size, flags)

    def unpin(self, address: int) -> None:
        """See Driver."""
        with self._current():
            self._call("cuMemHostUnregister", address)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._library, name)(*args):
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(said))
            raise PinError(f"{name}: {(said.value or b'an unknown error').decode()} ({code})")
