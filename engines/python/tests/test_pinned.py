"""Memory registered with a device: what is asked of the driver, and what when it refuses.

The driver is a stand-in; `python -m membrane_bench.pinned` has the real one.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from typing import Any

import pytest
from fake_sidecar import FakeSidecar
from helpers import eventually, registration, soon
from membrane_kv.pinned import CudaDriver, PinError
from membrane_kv.session import Session
from membrane_kv.shared import Shared, Unmapped

_CONTEXT = 0xC0FFEE
_NOT_SUPPORTED = 801


class Library:
    """Has libcuda's functions, checks the order of calls, and notes what is registered."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[str] = []
        self.depth = 0
        self.registered: dict[int, tuple[int, int]] = {}
        for name in (n for n in dir(self) if n.startswith("_cu")):
            setattr(self, name[1:], self._function(name[1:], getattr(self, name)))

    def _function(self, name: str, body: Any) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            # As ctypes would: the library sees C's types.
            types = call.argtypes  # type: ignore[attr-defined]
            given = [t.from_param(a) for t, a in zip(types, args, strict=True)]
            assert len(given) == len(args)
            return self.codes.get(name) or body(*args) or 0

        return call

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGet(self, out: Any, device: int) -> int:
        out._obj.value = device + 70
        return 0 if device < 2 else 101

    def _cuDevicePrimaryCtxRetain(self, out: Any, handle: int) -> None:
        assert handle == 71
        out._obj.value = _CONTEXT

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:
        assert context.value == _CONTEXT
        self.depth += 1

    def _cuCtxPopCurrent_v2(self, out: Any) -> None:
        self.depth -= 1

    def _cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:
        assert self.depth == 1
        self.registered[address] = (size, flags)
        return 0

    def _cuMemHostUnregister(self, address: int) -> None:
        assert self.depth == 1
        (ctypes.c_uint8 * self.registered.pop(address)[0]).from_address(address)[0]

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        out._obj.value = {801: b"CUDA_ERROR_NOT_SUPPORTED"}.get(code)


def shared() -> Shared:
    return Shared(mmap.mmap(-1, 16384), mmap.mmap(-1, 4096), 2048)


def test_arena_is_read_only_to_the_device_and_both_go_before_the_memory() -> None:
    library, m = Library(), shared()
    driver = CudaDriver(1, library)
    assert m.pin(driver) == 16384 + 4096
    with m.use():
        assert library.registered == {
            m.arena.ctypes.data: (16384, 0x01 | 0x08),
            m.inbox.ctypes.data: (4096, 0x01),
        }
        m.close()
        assert len(library.registered) == 2, "a copy runs"
    assert library.registered == {}
    assert library.depth == 0
    with pytest.raises(Unmapped):
        m.pin(driver)


def test_what_was_registered_before_a_refusal_is_let_go() -> None:
    class Second(Library):
        def _cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:
            super()._cuMemHostRegister_v2(address, size, flags)
            if flags & 0x08:
                return 0
            del self.registered[address]
            return _NOT_SUPPORTED

    library, m = Second(), shared()
    with pytest.raises(PinError, match=r"cuMemHostRegister_v2: CUDA_ERROR_NOT_SUPPORTED \(801\)"):
        m.pin(CudaDriver(1, library))
    assert len(library.registered) == 1
    assert library.depth == 0
    m.close()
    assert library.registered == {}


def test_driver_that_is_not_there_says_so() -> None:
    with pytest.raises(PinError, match=r"cuDeviceGet: an unknown error \(101\)"):
        CudaDriver(2, Library())
    with pytest.raises(PinError, match=r"cuInit: .* \(100\)"):
        CudaDriver(1, Library(cuInit=100))


def test_session_pins_and_a_refusal_costs_nothing_else(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    library = Library()
    session = Session((sidecar.path,), registration(), driver=CudaDriver(1, library)).start()
    try:
        eventually(lambda: "pinned" in caplog.text)
        assert len(library.registered) == 2
    finally:
        session.stop(1)
    eventually(lambda: not library.registered)

    library = Library(cuMemHostRegister_v2=_NOT_SUPPORTED)
    session = Session((sidecar.path,), registration(), driver=CudaDriver(1, library)).start()
    try:
        eventually(lambda: "does not pin" in caplog.text)
        assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text
        up = session.wait_up(soon())
        assert up is not None
        assert up.shared is not None
        with up.shared.use() as m:
            assert len(m.arena) > 0
    finally:
        session.stop(1)
