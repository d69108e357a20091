"""LMCache's connector classes, `redis://` and `lm://`, with a real sidecar in place of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from harness import PACKAGE, Process, Sidecar, engine_environment, eventually, free_port

SCHEMES = ["redis", "lm"]
CHUNK_BYTES = 2 * 4 * 256 * 2 * 64 * 2
SMALL_MIB = 16


class LMCache(Process):
    """LMCache in a process of its own."""

    def start(self) -> None:
        """Start it."""
        python = os.environ.get("MEMBRANE_LMCACHE_PYTHON")
        assert python, "MEMBRANE_LMCACHE_PYTHON is not set: start the engine tests with run.sh"
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [python, str(Path(__file__).with_name("lmcache_driver.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=engine_environment(),
                start_new_session=True,
            )

    def do(self, what: str, name: str, chunks: list[int] | None = None, **more: Any) -> Any:
        """Run a command; fails with LMCache's own exception."""
        assert self.process is not None and self.process.stdin and self.process.stdout
        command = {"do": what, "name": name, "chunks": chunks or [], **more}
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.tail()
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["ok"]


class Store(Sidecar):
    """A sidecar with both listeners."""

    def __init__(self, name: str, logs: Path, folder: Path, memory: str) -> None:
        super().__init__(name, logs, folder)
        self.ports = {"redis": free_port(), "lm": free_port()}
        self.flags = [
            f"--memory={memory}",
            f"--resp-addr=127.0.0.1:{self.ports['redis']}",
            f"--lm-addr=127.0.0.1:{self.ports['lm']}",
        ]

    def url(self, scheme: str) -> str:
        return f"{scheme}://127.0.0.1:{self.ports[scheme]}"

    def metric(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as r:
            lines = r.read().decode().splitlines()
        return sum(
            int(float(x.split()[-1])) for x in lines if x.startswith((name + " ", name + "{"))
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lmcache")


@pytest.fixture(scope="module")
def store(logs: Path, folder: Path) -> Iterator[Store]:
    s = Store("store", logs, folder, "256MiB")
    s.start()
    yield s
    assert s.stop() == []


@pytest.fixture(scope="module")
def small(logs: Path, folder: Path) -> Iterator[Store]:
    s = Store("small", logs, folder, f"{SMALL_MIB}MiB")
    s.start()
    yield s
    assert s.stop() == []


@pytest.fixture(scope="module")
def lmcache(logs: Path, store: Store, small: Store) -> Iterator[LMCache]:
    c = LMCache("lmcache", logs)
    c.start()
    for scheme in SCHEMES:
        for name, at in ((scheme, store), (scheme + "-2", store), (scheme + "-small", small)):
            c.do("connect", name, url=at.url(scheme))
    yield c
    c.kill()


def chunk(scheme: str, n: int) -> int:
    """Return a chunk hash; one that no other scheme uses."""
    return (SCHEMES.index(scheme) + 1 << 56) + n


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_come_back_to_another_client(lmcache: LMCache, scheme: str, dtype: str) -> None:
    keys = [chunk(scheme, 100 + i) for i in range(3)]
    assert lmcache.do("exists", scheme, keys, dtype=dtype) == [False] * 3
    assert lmcache.do("get", scheme, keys, dtype=dtype) == [None] * 3
    want = lmcache.do("put", scheme, keys, seeds=[1, 2, 3], dtype=dtype)
    for name in (scheme, scheme + "-2"):
        eventually(lambda name=name: all(lmcache.do("exists", name, keys, dtype=dtype)), "the put")
        assert lmcache.do("get", name, keys, dtype=dtype) == want
    other = SCHEMES[1 - SCHEMES.index(scheme)]
    assert lmcache.do("exists", other, keys, dtype=dtype) == [False] * 3


@pytest.mark.parametrize("tokens", [1, 100, 255])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_short_chunks_keep_their_shape(lmcache: LMCache, scheme: str, tokens: int) -> None:
    keys = [chunk(scheme, 1000 + tokens)]
    want = lmcache.do("put", scheme, keys, seeds=[tokens], tokens=tokens)
    assert want[0][1] == [2, 4, tokens, 128]
    assert lmcache.do("get", scheme, keys) == want


@pytest.mark.parametrize("scheme", SCHEMES)
def test_first_chunk_of_a_key_stays(lmcache: LMCache, store: Store, scheme: str) -> None:
    metric = f"membrane_{'resp' if scheme == 'redis' else 'lm'}_conflicts_total"
    keys = [chunk(scheme, 2000)]
    before = store.metric(metric)
    want = lmcache.do("put", scheme, keys, seeds=[1])
    assert lmcache.do("put", scheme + "-2", keys, seeds=[1]) == want
    assert lmcache.do("get", scheme + "-2", keys) == want
    assert store.metric(metric) == before
    assert lmcache.do("put", scheme + "-2", keys, seeds=[2]) != want
    for name in (scheme + "-2", scheme):
        assert lmcache.do("get", name, keys) == want
    assert store.metric(metric) == before + 1


@pytest.mark.parametrize("more", [{"tags": {"user": "a"}}, {"layer": 0}, {"layer": 3}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tags_and_layers_are_other_keys(
    lmcache: LMCache, scheme: str, more: dict[str, Any]
) -> None:
    keys = [chunk(scheme, 3000 + len(str(more)))]
    assert lmcache.do("exists", scheme, keys, **more) == [False]
    want = lmcache.do("put", scheme, keys, seeds=[5], **more)
    assert lmcache.do("get", scheme, keys, **more) == want
    assert lmcache.do("exists", scheme, keys) == [False]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_readers_beside_a_writer_see_whole_chunks(lmcache: LMCache, scheme: str) -> None:
    keys = [chunk(scheme, 4000 + i) for i in range(20)]
    seeds = list(range(20))
    seen = lmcache.do("race", scheme, keys, seeds=seeds, other=scheme + "-2")
    assert seen["torn"] == 0 and seen["whole"] > 0, seen
    assert all(lmcache.do("exists", scheme, keys))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_full_cache_loses_whole_chunks_only(lmcache: LMCache, small: Store, scheme: str) -> None:
    """Of chunks that left, nothing is left; of the others everything is there."""
    name = scheme + "-small"
    keys = [chunk(scheme, 5000 + i) for i in range(3 * SMALL_MIB * (1 << 20) // CHUNK_BYTES)]
    want = lmcache.do("put", name, keys, seeds=list(range(len(keys))))
    there = lmcache.do("exists", name, keys)
    got = lmcache.do("get", name, keys)
    assert [g is not None for g in got] == there
    assert all(g in (None, w) for g, w in zip(got, want, strict=True))
    assert 10 < sum(there) < len(keys) and there[-1]
    if scheme == "redis":
        r = redis.Redis(port=small.ports["redis"])
        for text, held in zip(lmcache.do("keys", name, keys), there, strict=True):
            halves = [r.exists(text + half) for half in ("kv_bytes", "metadata")]
            assert halves == [held, held], text


def test_halves_of_a_pair_are_one_object(lmcache: LMCache, store: Store) -> None:
    """Neither half is there alone; one deletion removes both; two reads are one hit."""
    r = redis.Redis(port=store.ports["redis"])
    keys = [chunk("redis", 6000), chunk("redis", 6001)]
    want = lmcache.do("put", "redis", keys, seeds=[1, 2])
    names = lmcache.do("keys", "redis", keys)
    other = lmcache.do("keys", "redis", [chunk("redis", 6002)])[0]
    value, metadata = r.get(names[0] + "kv_bytes"), r.get(names[0] + "metadata")
    assert value is not None and metadata is not None

    assert r.set(other + "kv_bytes", value)
    assert r.exists(other + "kv_bytes") == 0 and r.get(other + "kv_bytes") is None
    assert lmcache.do("exists", "redis", [chunk("redis", 6002)]) == [False]
    assert r.set(other + "metadata", metadata)
    assert lmcache.do("get", "redis", [chunk("redis", 6002)]) == [want[0]]

    hits, pages = store.metric("membrane_resp_hits_total"), store.metric("membrane_cache_pages")
    assert lmcache.do("get", "redis", keys) == want
    assert store.metric("membrane_resp_hits_total") == hits + 2
    assert r.delete(names[0] + "metadata") == 1
    assert store.metric("membrane_cache_pages") == pages - 1
    assert r.exists(names[0] + "kv_bytes") == 0
    assert lmcache.do("get", "redis", keys) == [None, want[1]]


def test_batches(lmcache: LMCache) -> None:
    keys = [chunk("redis", 7000 + i) for i in range(40)]
    want = lmcache.do("batched_put", "redis", keys, seeds=list(range(40)))
    assert lmcache.do("get", "redis-2", keys) == want


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_are_checked_when_they_are_read(
    lmcache: LMCache, store: Store, scheme: str, tmp_path: Path
) -> None:
    """A bit that was flipped in memory is a miss, and the key can be stored again."""
    keys = [chunk(scheme, 8000)]
    want = lmcache.do("put", scheme, keys, seeds=[1], tokens=16)
    assert lmcache.do("get", scheme, keys) == want
    name = lmcache.do("keys", scheme, keys)[0].encode()
    offsets = [at for at in _find(store, name) if at >= 0]
    assert offsets
    for at in offsets:
        store.flip(at + 4096)
    assert lmcache.do("get", scheme, keys) == [None]
    assert lmcache.do("put", scheme, keys, seeds=[1], tokens=16) == want
    assert lmcache.do("get", scheme, keys) == want


def _find(store: Store, name: bytes) -> list[int]:
    """Return the offsets in the arena where a key's text lies."""
    found = []
    with open(f"/proc/{store.pid}/maps") as maps, open(f"/proc/{store.pid}/mem", "rb") as memory:
        for line in maps:
            span, flags, base, *_ = line.split()
            if "membrane-arena" in line and flags == "rw-s":
                begin, end = (int(x, 16) for x in span.split("-"))
                memory.seek(begin)
                data = memory.read(end - begin)
                at = data.find(name)
                while at >= 0:
                    found.append(int(base, 16) + at)
                    at = data.find(name, at + 1)
    return found


def test_the_connector_of_tensorrt_llm_takes_torch_tensors() -> None:
    """Run its tests once more where torch is installed: pools of every kind."""
    python = os.environ["MEMBRANE_LMCACHE_PYTHON"]
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_trtllm.py"]
    subprocess.run([python, *argv, "-k", "every_kind"], cwd=PACKAGE, check=True)
