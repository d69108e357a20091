"""KV of one checkpoint goes from each engine to each other, at two tensor parallel sizes.

The embedded engine keeps canonical pages, vLLM those of its CPU kernels, SGLang those
of its host pool: every crossing is translated by the reader's sidecar. The same between
two layouts of SGLang stands in test_sglang_servers.py, between tensor parallel sizes of
vLLM in test_two_ranks.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import matrix
import pytest
from checks import PAGES, TOLERANCE, memfds
from cross_engine import NAMES, PAGE_BYTES, Mesh, boot, describe, read_across
from harness import eventually, make_model


@pytest.fixture(scope="module")
def mesh(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    m = describe(logs, tmp_path_factory.mktemp("sockets"), make_model("tiny"))
    try:
        boot(m)
        yield m
    finally:
        m.stop()


def test_one_folder_is_one_namespace(mesh: Mesh) -> None:
    found = [e for p in mesh.parties.values() for e in p.attached()]
    assert len({e["namespace"] for e in found}) == 1, found
    assert len({e["form"] for e in found}) == len(NAMES), found
    assert not any(e.get("problem") for e in found)


@pytest.mark.parametrize(("writer", "reader"), list(itertools.product(NAMES, NAMES)))
def test_reader_goes_on_as_if_it_had_computed(mesh: Mesh, writer: str, reader: str) -> None:
    row, got, want = read_across(mesh, mesh.parties[writer], mesh.parties[reader])
    matrix.record(row)
    assert got.tokens == want.tokens
    assert (row.pages, row.size) == (PAGES, PAGES * PAGE_BYTES)
    if writer == reader:
        assert row.translated == 0
    else:  # two ranks that ask at the same moment may both translate a page
        assert PAGES <= row.translated <= PAGES * mesh.parties[reader].tp
    assert row.logprobs < TOLERANCE
    assert row.engines is None or row.engines < TOLERANCE


def test_nothing_is_left_of_it(mesh: Mesh) -> None:
    """The last test: ends everything."""
    for party in mesh.parties.values():
        eventually(party.sidecar.level, f"that the sidecar of {party.label} is level", 30)
        assert not any(e.get("untranslated") for e in party.attached())
    pids = [p.pid for p in mesh.processes]
    mesh.stop()
    assert not memfds(pids), "memory of ours is left"
