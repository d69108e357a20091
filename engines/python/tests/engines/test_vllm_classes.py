"""The connector under vLLM's own scheduler, MultiConnector, metrics and events; no server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Sidecar, engine_environment, make_model

CASES = (
    "alone",
    "multi_child",
    "multi_child_not_chosen",
    "failed_step",
    "stats",
    "events",
    "reset",
    "scope",
    "multimodal",
    "groups",
)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run all cases in one process, which imports vLLM once; return what it printed."""
    folder = tmp_path_factory.mktemp("cases")
    sidecar = Sidecar("cases", folder, folder)
    try:
        sidecar.start()
        script = Path(__file__).with_name("vllm_cases.py")
        done = subprocess.run(
            [
                *(os.environ["MEMBRANE_VLLM_PYTHON"], str(script), "all"),
                *(str(make_model("tiny")), sidecar.socket, str(folder)),
            ],
            env=engine_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        yield done.stdout
    finally:
        sidecar.stop()


@pytest.mark.parametrize("case", CASES)
def test_case(output: str, case: str) -> None:
    assert f"passed {case}\n" in output, output[-4000:]
