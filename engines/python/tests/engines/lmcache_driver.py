"""LMCache's own connector classes, driven by lines of JSON. Runs where LMCache is installed.

Each line on standard input is one command, each answer is one line on what was
standard output; everything that LMCache says goes to standard error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

MODEL = "org/model"
LAYERS, CHUNK, HEADS, SIZE = 4, 256, 2, 64


class Driver:
    """Connectors by name, one event loop for all, as in LMCache's engine."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, local_cpu=False)
        shape = (LAYERS, 2, CHUNK, HEADS, SIZE)
        self.metadata = LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.bfloat16, shape)
        self.backend = LocalCPUBackend(
            self.config, self.metadata, "cpu", memory_allocator=AdHocMemoryAllocator("cpu")
        )
        self.connectors: dict[str, Any] = {}

    def run(self, coroutine: Any) -> Any:
        """Run it on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def key(self, chunk: int, dtype: str, tags: dict[str, str], layer: int | None) -> Any:
        """Return a chunk's key, or that of one of its layers."""
        requests = {f"lmcache.tag.{k}": v for k, v in tags.items()}
        key = CacheEngineKey(MODEL, 1, 0, chunk, getattr(torch, dtype), requests)
        return key if layer is None else key.split_layers(LAYERS)[layer]

    def memory(self, seed: int, tokens: int, dtype: str) -> Any:
        """Return a chunk of so many tokens, filled with numbers that follow from the seed."""
        shape = torch.Size((2, LAYERS, tokens, HEADS * SIZE))
        memory = self.backend.allocate(shape, getattr(torch, dtype), MemoryFormat.KV_2LTD)
        raw = torch.frombuffer(memory.byte_array, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
        return memory

    def connect(self, name: str, url: str) -> None:
        """Make a connector as the engine does, by its address."""
        made = CreateConnector(url, self.loop, self.backend, self.config, self.metadata)
        self.connectors[name] = made

    def do(self, q: dict[str, Any]) -> Any:
        """Run one command."""
        what, name = q.pop("do"), q.pop("name")
        if what == "connect":
            return self.connect(name, q["url"])
        c = self.connectors[name]
        keys = [
            self.key(chunk, q.get("dtype", "bfloat16"), q.get("tags", {}), q.get("layer"))
            for chunk in q["chunks"]
        ]
        if what == "put":
            digests = []
            for key, seed in zip(keys, q["seeds"], strict=True):
                memory = self.memory(seed, q.get("tokens", CHUNK), q.get("dtype", "bfloat16"))
                digests.append(describe(memory))
                self.run(c.put(key, memory))
            return digests
        if what == "batched_put":
            memories = [self.memory(s, CHUNK, "bfloat16") for s in q["seeds"]]
            self.run(c.batched_put(keys, memories))
            return [describe(m) for m in memories]
        if what == "get":
            return [describe(self.run(c.get(key))) for key in keys]
        if what == "exists":
            return [self.run(c.exists(key)) for key in keys]
        if what == "race":
            return self.race(c, self.connectors[q["other"]], keys, q["seeds"])
        if what == "keys":
            return [key.to_string() for key in keys]
        raise ValueError(what)

    def race(self, writer: Any, reader: Any, keys: list[Any], seeds: list[int]) -> dict[str, int]:
        """Put with one connector while another asks for the same keys; count what it saw."""
        seen = {"torn": 0, "whole": 0, "absent": 0}
        memories = [self.memory(s, CHUNK, "bfloat16") for s in seeds]
        wanted = [describe(m) for m in memories]

        async def read(key: Any, want: Any) -> None:
            for _ in range(200):
                there = await reader.exists(key)
                got = describe(await reader.get(key))
                if got is None:
                    # What was there a moment ago has all of its parts.
                    seen["torn" if there else "absent"] += 1
                else:
                    seen["whole" if got == want else "torn"] += 1
                    return

        async def both() -> None:
            writes = [writer.put(k, m) for k, m in zip(keys, memories, strict=True)]
            await asyncio.gather(*writes, *(read(k, w) for k, w in zip(keys, wanted, strict=True)))

        self.run(both())
        return seen


def describe(memory: Any) -> list[Any] | None:
    """Return digest, shape, type and format of a chunk, or None."""
    if memory is None:
        return None
    digest = hashlib.sha256(bytes(memory.byte_array)).hexdigest()
    kind = str(memory.get_dtype()).removeprefix("torch.")
    return [digest, list(memory.get_shape()), kind, memory.get_memory_format().name]


def main() -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver()
    for line in sys.stdin:
        try:
            answer = {"ok": driver.do(json.loads(line))}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # LMCache's threads do not end


if __name__ == "__main__":
    main()
