"""The weights id: recipe, order of sources, and that equal shapes differ."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from membrane_kv.weights import weights_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def checkpoint(folder: Path, size: int, change: int = 0) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(b'{"a":1}')
    data = bytearray((2).to_bytes(8, "little") + b"{}")
    data += bytes((i * i >> 3) & 0xFF for i in range(len(data), size))
    data[-1] ^= change
    (folder / "a.safetensors").write_bytes(data)
    (folder / "ignored.bin").write_bytes(b"x")
    return bytes(data)


def u64(n: int) -> bytes:
    return n.to_bytes(8, "little")


@pytest.mark.parametrize("size", [10, 4096, 4097, 4096 + 63, 50001])
def test_recipe(tmp_path: Path, size: int) -> None:
    data = checkpoint(tmp_path, size)
    want = b"membrane-weights-v1\0" + u64(11) + b"config.json" + u64(7) + b'{"a":1}'
    want += u64(13) + b"a.safetensors" + u64(size) + data[:10]
    if size <= 4096:
        want += data
    else:
        for i in range(64):
            at = i * (size - 4096) // 63
            want += data[at : at + 4096]
    assert weights_id(str(tmp_path)) == "sha256:" + hashlib.sha256(want).hexdigest()


def test_equal_shapes_never_share(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one", 9000)
    checkpoint(tmp_path / "two", 9000, change=1)
    one, two = (weights_id(str(tmp_path / n)) for n in ("one", "two"))
    assert one and two and one != two


def test_explicit_wins(tmp_path: Path) -> None:
    checkpoint(tmp_path, 100)
    assert weights_id(str(tmp_path), "mine") == "mine"


def test_snapshot_folder_gives_its_commit(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / COMMIT
    checkpoint(folder, 100)
    (tmp_path / "link").symlink_to(folder)
    assert weights_id(str(folder)) == COMMIT
    assert weights_id(str(tmp_path / "link")) == COMMIT


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--name"
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    assert weights_id("org/name") == COMMIT
    assert weights_id("org/name", revision=COMMIT) == COMMIT
    assert weights_id("org/name", revision="v2") is None
    assert weights_id("org/other") is None


@pytest.mark.parametrize("content", [b"", b"1234567", u64(100) + b"{}", u64(2**63) + b"{}"])
def test_no_name_for_what_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_id(str(tmp_path)) is None
    (tmp_path / "x.safetensors").write_bytes(content)
    assert weights_id(str(tmp_path)) is None
