"""A real sidecar process for tests that need no engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from membrane_kv.client import Client

_PAUSE = threading.Event()


class RealSidecar:
    """`membrane serve` of the binary that MEMBRANE_BIN names, on sockets of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.socket = str(folder / "s")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.engine_addr = f"127.0.0.1:{s.getsockname()[1]}"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RealSidecar:
        """Start it and wait until it answers. Return self."""
        binary = os.environ.get("MEMBRANE_BIN")
        if not binary:
            pytest.skip("MEMBRANE_BIN names no binary")
        self._process = subprocess.Popen(
            [
                *(binary, "serve", "--port", "0", "--log-level", "warn"),
                *("--engine-socket", self.socket, "--engine-addr", self.engine_addr),
                *("--memory", "64MiB", *self._flags),
            ]
        )
        end = time.monotonic() + 20
        while not self.stats():
            assert self._process.poll() is None, "the sidecar does not start"
            assert time.monotonic() < end, "the sidecar does not answer"
            _PAUSE.wait(0.01)
        return self

    def stats(self) -> dict[str, Any]:
        """Return the counters, or nothing when it does not answer."""
        try:
            client = Client.connect(self.socket, time.monotonic() + 1, name="test")
        except OSError:
            return {}
        try:
            return client.stats(time.monotonic() + 1)
        except OSError:
            return {}
        finally:
            client.close()

    def port(self, name: str) -> Any:
        """Return one of the engine port's counters."""
        return self.stats()["engine_port"][name]

    def halt(self, on: bool) -> None:
        """Stop the process where it is, until every thread stands still, or let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)
        while on and not self._still(self._process.pid):
            _PAUSE.wait(0.001)

    @staticmethod
    def _still(pid: int) -> bool:
        states = [t.joinpath("stat").read_text() for t in Path(f"/proc/{pid}/task").iterdir()]
        return all(s.rpartition(")")[2].split()[0] == "T" for s in states)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None
