"""Which exact weights an engine has loaded: two checkpoints of equal shape never share KV."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAMPLES = 64
_SAMPLE = 4096
_MAX_HEADER = 100 << 20


def weights_id(model: str, explicit: str = "", revision: str | None = None) -> str | None:
    """Return the weights id of a model, or None when none can be had.

    In this order: `explicit`; the commit of the hub snapshot that `model` (a
    folder, or a hub name with `revision`) resolves to; a digest over the
    folder's config.json and, sorted by name, its safetensors files, see
    docs/protocol.md.
    """
    if explicit:
        return explicit
    folder = Path(model)
    if not folder.is_dir():
        return _hub_commit(model, revision)
    for path in (folder.absolute(), folder.resolve()):
        if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
            return path.name
    return digest(folder)


def _hub_commit(name: str, revision: str | None) -> str | None:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    repo = cache / ("models--" + name.replace("/", "--"))
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repo / "refs" / commit).read_text().strip()
        except (OSError, ValueError):
            return None
    if _COMMIT.fullmatch(commit) and (repo / "snapshots" / commit).is_dir():
        return commit
    return None


def digest(folder: Path, about: str = "config.json") -> str | None:
    """Return "sha256:" and the digest over a checkpoint's files, or None without weights.

    Reads `about`, and of every weights file the header and 64 samples of
    4 KiB, so that a file of any size takes milliseconds.
    """
    config = folder / about
    weights = [p for p in folder.iterdir() if p.name.endswith(".safetensors") and p.is_file()]
    if not weights or not config.is_file():
        return None
    h = hashlib.sha256(b"membrane-weights-v1\0")
    for path in [config, *sorted(weights, key=lambda p: p.name.encode())]:
        name = path.name.encode()
        size = path.stat().st_size
        h.update(len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little"))
        if path == config:
            h.update(path.read_bytes())
        elif not _sample(path, size, h):
            return None
    return "sha256:" + h.hexdigest()


def adapter_id(path: str) -> str | None:
    """Return the id of a LoRA adapter (a folder, or a hub name), or None when none can be had.

    The commit of its hub snapshot, else a digest as `digest` makes it over
    adapter_config.json and the safetensors files.
    """
    folder = Path(path)
    if not folder.is_dir():
        return _hub_commit(path, None)
    for at in (folder.absolute(), folder.resolve()):
        if at.parent.name == "snapshots" and _COMMIT.fullmatch(at.name):
            return at.name
    return digest(folder, "adapter_config.json")


def _sample(path: Path, size: int, h: hashlib._Hash) -> bool:
    with path.open("rb") as f:
        prefix = f.read(8)
        header = int.from_bytes(prefix, "little")
        if size < 8 or header > min(size - 8, _MAX_HEADER):
            return False  # not a safetensors file
        h.update(prefix + f.read(header))
        if size <= _SAMPLE:
            f.seek(0)
            h.update(f.read(size))
            return True
        for i in range(_SAMPLES):
            f.seek(i * (size - _SAMPLE) // (_SAMPLES - 1))
            h.update(f.read(_SAMPLE))
    return True
