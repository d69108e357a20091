"""Drive the systems whose only client is a Python one, for membrane bench peers.

Usage: helper.py mooncake-server MASTER_ADDR BYTES
       helper.py mooncake MASTER_ADDR
       helper.py lmcache RPC_ADDR

Both print a line when they are ready and end with their standard input. A
client reads one JSON command a line and prints one JSON answer a line: "load"
stores the payloads of a file, "get" reads uniformly random ones for some
seconds and checks every one against the checksum of what its key stands for,
as the loop in Go does.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

BATCHES = (1, 8)  # chunks of one LMCache request
MIN_SIZE = 64 << 10  # that sizes of values are multiples of
MAX_KEYS = 1 << 13  # of one size
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
LAYERS = 4


class Payloads:
    """The values that the run stores and reads, in one file."""

    def __init__(self, path: str, count: int, size: int) -> None:
        import xxhash

        self.size = size
        self.count = count
        with open(path, "rb") as f:
            self.data = memoryview(mmap.mmap(f.fileno(), count * size, prot=mmap.PROT_READ))
        self.sums = [xxhash.xxh3_64_intdigest(self.value(i)) for i in range(count)]

    def value(self, key: int) -> memoryview:
        """Return what a key stands for."""
        return self.data[key * self.size : (key + 1) * self.size]

    def check(self, key: int, parts: Iterator[Any]) -> None:
        """Raise unless the parts, one after the other, are what the key stands for."""
        import xxhash

        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        if digest.intdigest() != self.sums[key]:
            raise ValueError(
                f"key {key} has checksum {digest.intdigest():016x} instead of {self.sums[key]:016x}"
            )


class Reader(Protocol):
    """One stream's connection."""

    def get(self, key: int, batch: int) -> None:
        """Read and check a run of values."""


class Client(Protocol):
    """A system's client."""

    def load(self, payloads: Payloads) -> None:
        """Store the payloads."""

    def reader(self, stream: int) -> Reader:
        """Connect a stream."""


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def mooncake_store(master: str, segment: int, buffer: int) -> Any:
    """Connect to a master and lend it memory."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    name = f"127.0.0.1:{free_port()}"
    code = store.setup(name, "P2PHANDSHAKE", segment, buffer, "tcp", "", master)
    if code != 0:
        raise RuntimeError(f"cannot connect to the Mooncake master at {master}: code {code}")
    return store


class MooncakeClient:
    """Mooncake over TCP; another process owns the memory."""

    def __init__(self, master: str) -> None:
        self.store = mooncake_store(master, 0, 256 << 20)
        self.payloads: Payloads | None = None
        self.readers: dict[tuple[int, int], MooncakeReader] = {}

    def load(self, payloads: Payloads) -> None:
        """Store the payloads."""
        self.payloads = payloads
        for key in range(payloads.count):
            code = self.store.put(f"bench-{payloads.size}-{key}", bytes(payloads.value(key)))
            if code != 0:
                raise RuntimeError(f"cannot put key {key}: code {code}")

    def reader(self, stream: int) -> Reader:
        """Give a stream a registered buffer."""
        if self.payloads is None:
            raise RuntimeError("nothing is loaded")
        name = (stream, self.payloads.size)
        if name not in self.readers:
            self.readers[name] = MooncakeReader(self.store, self.payloads.size)
        reader = self.readers[name]
        reader.payloads = self.payloads
        return reader


class MooncakeReader:
    """One stream of a Mooncake client."""

    payloads: Payloads

    def __init__(self, store: Any, size: int) -> None:
        import ctypes

        self.store = store
        self.buffer = (ctypes.c_char * size)()
        self.address = ctypes.addressof(self.buffer)
        code = store.register_buffer(self.address, size)
        if code != 0:
            raise RuntimeError(f"cannot register a buffer: code {code}")

    def get(self, key: int, batch: int) -> None:
        """Read one value into the buffer."""
        if batch != 1:
            raise ValueError("this client reads one value at a time")
        got = self.store.get_into(
            f"bench-{self.payloads.size}-{key}", self.address, self.payloads.size
        )
        if got != self.payloads.size:
            raise RuntimeError(f"key {key}: get_into returns {got}")
        self.payloads.check(key, iter((self.buffer,)))


class LMCacheClient:
    """LMCache's multiprocess server over shared memory, as one engine."""

    def __init__(self, addr: str) -> None:
        self.addr = addr
        self.bench: Any = None
        self.payloads: Payloads | None = None
        self.requests = 0

    def start(self, payloads: Payloads) -> None:
        """Attach with KV caches whose chunks are as large as a payload."""
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        # Two bytes an element, keys and values, heads of 128.
        heads = payloads.size // (CHUNK_TOKENS * LAYERS * 2 * 2 * 128)
        if heads * CHUNK_TOKENS * LAYERS * 2 * 2 * 128 != payloads.size:
            raise ValueError(f"a chunk of {payloads.size} bytes has no such shape")
        blocks = payloads.count * CHUNK_TOKENS // BLOCK_TOKENS + 1
        config = BenchConfig(
            rpc_url=f"tcp://{self.addr}",
            http_url="",
            mode="cpu",
            transfer_mode="lmcache_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=CHUNK_TOKENS,
            kvcache_shape_spec=f"(2,{blocks},{BLOCK_TOKENS},{heads},128):float16:{LAYERS}",
            num_blocks=blocks,
            block_size=BLOCK_TOKENS,
        )
        if self.bench is not None:  # one engine has one number, and one pool
            self.bench.close()
        self.bench = ServerBenchClient(config, lambda line: print(line, file=sys.stderr))
        self.bench.start()

    def request(self, key: int, batch: int, kind: str) -> Any:
        """Return a request for a run of chunks whose blocks are the keys'."""
        self.requests += 1
        self.bench._config = dataclasses.replace(
            self.bench._config, num_tokens=batch * CHUNK_TOKENS
        )
        if batch not in BATCHES:
            raise ValueError(f"this client reads {BATCHES} values at a time, not {batch}")
        # What was loaded of other sizes stays in the server, under other names.
        size = self.payloads.size if self.payloads else 0
        sequence = (size // MIN_SIZE * MAX_KEYS + key) * len(BATCHES) + BATCHES.index(batch)
        request = self.bench.create_request(sequence, f"{kind}-{self.requests}", kind)
        return dataclasses.replace(request, block_offset=key * CHUNK_TOKENS // BLOCK_TOKENS)

    def parts(self, key: int) -> Iterator[Any]:
        """Yield the memory of the key's chunk: keys, then values, layer by layer."""
        first = key * CHUNK_TOKENS // BLOCK_TOKENS
        last = first + CHUNK_TOKENS // BLOCK_TOKENS
        for tensor in self.bench._workers[0].kv_caches.values():
            array = tensor.view(dtype=_torch_uint8()).numpy()
            for half in range(2):
                yield array[half, first:last].reshape(-1)

    def load(self, payloads: Payloads) -> None:
        """Write each payload into its blocks and store them."""
        self.payloads = payloads
        self.start(payloads)
        for key in range(payloads.count):
            at, value = 0, payloads.value(key)
            for part in self.parts(key):
                part[:] = memoryview(value[at : at + part.nbytes])
                at += part.nbytes
        for batch in BATCHES:
            for key in range(0, payloads.count - batch + 1, batch):
                request = self.request(key, batch, "store")
                result = self.bench.store(request, 0, batch * CHUNK_TOKENS)
                if result is None or not result.succeeded:
                    raise RuntimeError(f"cannot store key {key}: {result}")
                self.bench.end_session(request)

    def reader(self, stream: int) -> Reader:
        """Return the one stream that an engine has."""
        if stream > 0:
            raise RuntimeError("one engine has one stream")
        return self

    def get(self, key: int, batch: int) -> None:
        """Look the chunks up, retrieve them into their blocks and check them."""
        if self.payloads is None:
            raise RuntimeError("nothing is loaded")
        for k in range(key, key + batch):
            for part in self.parts(k):
                part[:8] = 0  # what is there from before must not pass
        request = self.request(key, batch, "get")
        found = self.bench.lookup(request)
        if not found.is_full_hit:
            raise RuntimeError(f"key {key} is gone: {found}")
        result = self.bench.retrieve(request, 0, batch * CHUNK_TOKENS)
        if result is None or not result.succeeded:
            raise RuntimeError(f"cannot retrieve key {key}: {result}")
        self.bench.end_session(request)
        for k in range(key, key + batch):
            self.payloads.check(k, self.parts(k))


def _torch_uint8() -> Any:
    import torch

    return torch.uint8


@dataclasses.dataclass
class Stream:
    """What one stream did."""

    latencies: list[float] = dataclasses.field(default_factory=list)
    error: str = ""


def read(client: Client, payloads: Payloads, command: dict[str, Any]) -> dict[str, Any]:
    """Read with all streams until the time is over."""
    batch: int = command["batch"]
    streams = [Stream() for _ in range(command["streams"])]
    readers = [client.reader(i) for i in range(len(streams))]
    begin = time.monotonic()
    end = begin + command["seconds"]

    def work(i: int) -> None:
        rng = random.Random(command["seed"] * 1000 + i)
        try:
            now = time.monotonic()
            while now < end:
                readers[i].get(rng.randrange(payloads.count // batch) * batch, batch)
                then, now = now, time.monotonic()
                streams[i].latencies.append(now - then)
        except Exception as e:
            streams[i].error = f"{type(e).__name__}: {e}"

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(streams))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    elapsed = time.monotonic() - begin
    for s in streams:
        if s.error:
            raise RuntimeError(s.error)
    latencies = [latency for s in streams for latency in s.latencies]
    ops = len(latencies)
    return {
        "bytes": ops * batch * payloads.size,
        "ops": ops,
        "hits": ops * batch,
        "elapsed": elapsed,
        "latencies": latencies,
    }


def serve(client: Client, answers: int) -> None:
    """Say that the client is there and answer commands until standard input ends."""
    payloads: Payloads | None = None
    os.write(answers, b"ready\n")
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if command["do"] == "load":
                payloads = Payloads(command["path"], command["count"], command["size"])
                client.load(payloads)
            elif payloads is None:
                raise RuntimeError("nothing is loaded")
            else:
                answer = read(client, payloads, command)
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def mooncake_server(master: str, memory: int, answers: int) -> None:
    """Run a master and lend it memory until standard input ends."""
    port = master.rpartition(":")[2]
    program = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
    command = [program, f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    command.append("--client_ttl=86400")  # everybody is stopped now and then
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) as child:
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(0.05)
        store = mooncake_store(master, memory, 64 << 20)
        os.write(answers, b"ready\n")
        sys.stdin.read()
        del store
        child.terminate()


def main() -> None:
    """Be what the arguments say."""
    # Libraries print what they like: only answers go to standard output.
    answers = os.dup(1)
    os.dup2(2, 1)
    kind, addr = sys.argv[1], sys.argv[2]
    if kind == "mooncake-server":
        mooncake_server(addr, int(sys.argv[3]), answers)
    elif kind == "mooncake":
        serve(MooncakeClient(addr), answers)
    else:
        serve(LMCacheClient(addr), answers)


if __name__ == "__main__":
    main()
