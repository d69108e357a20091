"""Two vLLM servers, each with its sidecar, and a third without, booted once for all cases."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import matrix
import pytest
from harness import Cluster

NEEDED = ("MEMBRANE_BIN", "MEMBRANE_VLLM_PYTHON", "MEMBRANE_SGLANG_PYTHON")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in NEEDED:
        assert os.environ.get(name), f"{name} is not set: start the engine tests with run.sh"
    folder = Path(os.environ.get("MEMBRANE_TEST_LOGS") or tmp_path_factory.mktemp("logs"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="session")
def cluster(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    c = Cluster(logs, tmp_path_factory.mktemp("sockets"))
    try:
        c.start()
        yield c
    finally:
        c.link.close()
        for p in c.processes:
            p.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print who has read whose pages."""
    rows = matrix.collected()
    if rows:
        terminalreporter.section("pages across engines")
        for line in matrix.table(rows):
            terminalreporter.write_line(line)
