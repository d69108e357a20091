from __future__ import annotations

import os
from pathlib import Path

import pytest
from membrane_bench.files import BlockFiles


def block(fill: int, layers: int = 3, size: int = 100) -> list[memoryview]:
    return [memoryview(bytearray([fill + i] * size)) for i in range(layers)]


def test_a_block_comes_back_to_where_it_belongs(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path / "new"), 0)
    files.write(b"k", block(1))
    got = block(0)
    files.read(b"k", got)
    assert [bytes(p) for p in got] == [bytes(p) for p in block(1)]


def test_the_first_writer_wins_and_leaves_one_file(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), 0)
    files.write(b"k", block(1))
    files.write(b"k", block(9))
    got = block(0)
    files.read(b"k", got)
    assert bytes(got[0]) == bytes([1] * 100)
    assert len(os.listdir(tmp_path)) == 1


def test_a_block_is_there_when_every_rank_has_it(tmp_path: Path) -> None:
    first, second = BlockFiles(str(tmp_path), 0), BlockFiles(str(tmp_path), 1)
    first.write(b"k", block(1))
    assert first.has(b"k", 1)
    assert not first.has(b"k", 2)
    second.write(b"k", block(2))
    assert first.has(b"k", 2)


def test_another_length_is_an_error(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), 0)
    files.write(b"k", block(1))
    with pytest.raises(OSError, match="does not have 200 bytes"):
        files.read(b"k", block(0, layers=2))
    with pytest.raises(FileNotFoundError):
        files.read(b"absent", block(0))


def test_more_layers_than_one_system_call_takes(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), 0)
    want = [memoryview(bytearray([i % 251])) for i in range(2500)]
    files.write(b"k", want)
    got = [memoryview(bytearray(1)) for _ in want]
    files.read(b"k", got)
    assert [bytes(p) for p in got] == [bytes(p) for p in want]
