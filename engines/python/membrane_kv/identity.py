"""What a vLLM request's KV depends on besides its tokens, as text that seeds its chain.

Two requests share pages only where these texts are equal, so everything that
changes KV must be in them, and what cannot be named makes a request pass by.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .weights import adapter_id

_DIGEST = re.compile(r"(?:.*:)?[0-9a-f]{64,128}", re.DOTALL)
_MAX_ADAPTERS = 4096

PASSED_BY = (
    "embeddings",
    "resumable",
    "salt",
    "adapter",
    "adapter_changed",
    "adapter_pending",
    "mm_identifier",
)


@dataclass(frozen=True)
class Scope:
    """What seeds a request's chain. `reads`: pages may answer it; else it stores only."""

    salt: str | None
    extra: str | None
    reads: bool


@dataclass
class _Adapter:
    files: object
    id: str | None = None
    done: bool = False
    changed: bool = False


class Adapters:
    """Names LoRA adapters by their weights: the name a user gave one says nothing elsewhere.

    The files are read in a thread of their own; until that is done requests
    with the adapter pass by. An adapter whose files change after it was first
    seen is not named any more: nobody knows which of them the engine holds.
    """

    def __init__(self, find: Callable[[str], str | None] = adapter_id) -> None:
        self._find = find
        self._seen: dict[tuple[str, int, str], _Adapter] = {}

    def identity(self, lora: Any) -> tuple[str, str]:
        """Return the adapter's id, or "" and why it has none."""
        path = str(lora.lora_path)
        key = (str(lora.lora_name), int(lora.lora_int_id), path)
        files = _signature(path)
        a = self._seen.get(key)
        if a is None:
            if len(self._seen) >= _MAX_ADAPTERS:
                return "", "adapter"
            a = self._seen[key] = _Adapter(files)
            work = threading.Thread(
                target=self._read, args=(a, path), name="membrane-adapter", daemon=True
            )
            work.start()
        if a.changed or files != a.files or getattr(lora, "load_inplace", False):
            a.changed = True
            return "", "adapter_changed"
        if not a.done:
            return "", "adapter_pending"
        return (a.id, "") if a.id else ("", "adapter")

    def _read(self, a: _Adapter, path: str) -> None:
        try:
            a.id = self._find(path)
        except (OSError, ValueError):
            a.id = None
        finally:
            a.changed |= _signature(path) != a.files
            a.done = True


def _signature(path: str) -> object:
    """Return what changes when a file of the folder is written, or None without a folder."""
    found = []
    try:
        for p in sorted(Path(path).iterdir()):
            s = p.stat()
            found.append((p.name, s.st_ino, s.st_size, s.st_mtime_ns))
    except OSError:
        return None
    return found


def scope(request: Any, adapters: Adapters) -> Scope | str:
    """Return what seeds the request's chain, or one of PASSED_BY."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "embeddings"
    if getattr(request, "resumable", False):
        return "resumable"  # its prompt is changed while it runs
    salt = request.cache_salt
    if salt is not None and len(salt.encode()) > 4096:
        return "salt"
    parts = []
    if request.lora_request is not None:
        adapter, reason = adapters.identity(request.lora_request)
        if reason:
            return reason
        layout = "3d" if getattr(request.lora_request, "is_3d_lora_weight", False) else "2d"
        parts.append(f"lora={adapter}/{layout}")
    if features := getattr(request, "mm_features", None):
        images = _features(features)
        if images is None:
            return "mm_identifier"
        parts.append(f"mm={images}")
    return Scope(salt or None, ";".join(parts) or None, not _needs_prompt_logits(request))


def _features(features: Any) -> str | None:
    """Return a digest over every item's content and place, or None where one is not a hash.

    A user may name an item instead of letting vLLM hash it. Such a name says
    what it is only within its engine.
    """
    h = hashlib.sha256(b"membrane-mm-v1\0")
    for f in features:
        name, place = f.identifier, f.mm_position
        if not isinstance(name, str) or not _DIGEST.fullmatch(name):
            return None
        for text in (str(f.modality), name):
            raw = text.encode()
            h.update(len(raw).to_bytes(8, "little") + raw)
        for n in (place.offset, place.length):
            h.update(int(n).to_bytes(8, "little"))
    return h.hexdigest()


def _needs_prompt_logits(request: Any) -> bool:
    """Return whether every token of the prompt must be computed: its log-probabilities."""
    if getattr(request, "skip_reading_prefix_cache", False):
        return True
    sampling = getattr(request, "sampling_params", None)
    return getattr(sampling, "prompt_logprobs", None) is not None
