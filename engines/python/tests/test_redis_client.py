"""The sidecar's listener for Redis clients, with redis-py."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

_BIN = os.environ.get("MEMBRANE_BIN", "")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    if not _BIN:
        pytest.skip("MEMBRANE_BIN names no binary")
    port = _free_port()
    args = [_BIN, "serve", "--port", "0", "--engine-addr", "off", "--log-level", "warn"]
    args += ["--engine-socket", str(tmp_path / "s"), "--memory", "64MiB"]
    args += ["--resp-addr", f"127.0.0.1:{port}"]
    process = subprocess.Popen(args)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the sidecar does not start"
                assert time.monotonic() < deadline, "the sidecar does not listen"
                time.sleep(0.01)
        yield port
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("protocol", [2, 3])
def test_values(port: int, protocol: int) -> None:
    r = redis.Redis(port=port, protocol=protocol)
    assert r.ping()
    value = os.urandom(3 << 20)
    assert r.set("a", value)
    assert r.get("a") == value
    assert r.get("none") is None
    assert r.set("b", b"x", ex=100)
    assert r.ttl("b") == 100
    assert r.set("b", b"y", nx=True) is None
    assert r.mget("a", "none", "b") == [value, None, b"x"]
    assert sorted(r.scan_iter("*")) == [b"a", b"b"]
    pipe = r.pipeline(transaction=False)
    for i in range(1000):
        pipe.set(f"k{i}", str(i))
        pipe.get(f"k{i}")
    assert pipe.execute() == [x for i in range(1000) for x in (True, str(i).encode())]
    assert r.delete("a", "b") == 2
    assert r.exists("a") == 0
    assert r.dbsize() == 1000
    with pytest.raises(redis.ResponseError, match="unknown command"):
        r.hset("h", "a", "b")
    assert r.flushdb()
    r.close()


def test_pair_of_lmcache_is_one_object(port: int) -> None:
    r = redis.Redis(port=port)
    key = "meta-llama/Llama-3.1-8B@1@0@f4a1b2c3d4e5f607@bfloat16"
    value, metadata = os.urandom(1 << 20), os.urandom(28)
    assert r.set(key + "kv_bytes", value)
    assert r.exists(key + "kv_bytes") == 0
    assert r.set(key + "metadata", metadata)
    assert r.exists(key + "metadata") == 1
    assert r.get(key + "metadata") == metadata
    assert r.get(key + "kv_bytes") == value
    assert r.delete(key + "metadata") == 1
    assert r.get(key + "kv_bytes") is None
    r.close()
