"""SGLang's real HiCacheController, its threads, pools and hashes, over a real sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import PAGE, Sidecar, make_model
from sglang_harness import run_controller

CASES = (
    "page_first_direct:direct:v1",
    "layer_first:direct:v1",
    "layer_first:kernel:v1",
    "page_first:kernel:v1",
    "page_head:kernel:v1",
    "page_first_direct:direct:pages",
    "layer_first:direct:pages",
    "page_first:kernel:pages",
    "page_head:kernel:pages",
)
PAGES = 12


@pytest.fixture(scope="module")
def ran(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    sidecar = Sidecar("sidecar-controller", logs, tmp_path_factory.mktemp("sockets"))
    try:
        sidecar.start()
        results = run_controller(sidecar.socket, make_model("tiny"), *CASES)
        assert sidecar.level(), "leases, chains or slots are left"
    finally:
        sidecar.stop()
    return {r["case"]: r for r in results}


@pytest.mark.parametrize("case", CASES)
def test_stored_found_and_loaded(ran: dict[str, dict[str, Any]], case: str) -> None:
    r = ran[case]
    zero_copy = case.endswith(":v1")
    assert r["connected"]
    assert r["interface"] == ("_page_get_zero_copy" if zero_copy else "_generic_page_get")
    assert r["stored"] == PAGES * PAGE
    assert (r["hit"], r["acks"]) == (PAGES * PAGE, [PAGES * PAGE])
    assert r["moved"], "pages came back to the places that they had"
    assert r["equal"], "the device pool has other numbers than before"
    assert r["after_clear"] == 0
    assert r["threads"], "a storage thread has ended"
    assert r["counts"]["stored_bytes"] == r["counts"]["loaded_bytes"] == PAGES * r["page_bytes"]
    assert r["counts"].get("hook_errors", 0) == 0
