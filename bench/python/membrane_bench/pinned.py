"""Copies between the sidecar's memory and a GPU, plain and registered with the driver.

    PYTHONPATH=engines/python:bench/python python3 -m membrane_bench.pinned bin/membrane

Starts a sidecar, stores pages of 2 MiB, leases them, and copies them to the device out
of the arena's read-only mapping, and back into the inbox: as they are, and registered
with the CUDA driver (cuMemHostRegister). Beside both stands memory that torch itself has
pinned, in the same round. Every byte is compared once in each way. A minute and 3 GiB
of memory. Needs torch, numpy and a GPU; `--device cpu` goes through the motions without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from membrane_kv import wire
from membrane_kv.client import Client
from membrane_kv.device import DevicePool, TorchQueue
from membrane_kv.pinned import CudaDriver, Driver, PinError
from membrane_kv.pool import Pool
from membrane_kv.shared import Shared

LAYERS, LAYER_BYTES, BLOCK = 32, 64 << 10, 64
PAGE_BYTES = LAYERS * LAYER_BYTES
SLOTS = 32
_PATIENCE_S = 30.0

MODEL = wire.Model("benchmark", "float16", "base=10000", LAYERS, 2, 128)
DESCRIPTOR = wire.Descriptor("vllm-lbhnc", "float16", BLOCK, PAGE_BYTES, (0, LAYERS), (0, 2))

Bytes = npt.NDArray[np.uint8]


@dataclass
class Row:
    """One way to copy: GB/s, and the share of the time in which the thread was held up."""

    name: str
    speed: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)


def soon() -> float:
    """Return a deadline."""
    return time.monotonic() + _PATIENCE_S


@contextlib.contextmanager
def sidecar(binary: str, memory: int) -> Iterator[Client]:
    """Run a sidecar; yield a registered connection. Raises OSError when it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        args = [binary, "serve", "--port", "0", "--engine-addr", "off", "--log-level", "warn"]
        args += ["--engine-socket", path, "--memory", str(memory)]
        process = subprocess.Popen(args)
        try:
            client = None
            end = soon()
            while client is None:
                try:
                    client = Client.connect(path, soon(), name="pinned")
                except OSError:
                    if process.poll() is not None or time.monotonic() > end:
                        raise
                    time.sleep(0.01)
            client.register(wire.Register("bench", "worker", MODEL, DESCRIPTOR, SLOTS), soon())
            try:
                yield client
            finally:
                client.close()
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)


def store(client: Client, pages: int) -> tuple[bytes, Bytes]:
    """Store a chain of random pages; return its token ids and content [pages, page bytes]."""
    assert client.registered is not None
    assert client.shared is not None
    rng = np.random.default_rng(1)
    content = np.frombuffer(rng.bytes(pages * PAGE_BYTES), np.uint8).reshape(pages, PAGE_BYTES)
    ids = wire.tokens(rng.integers(0, 1000, pages * client.registered.page_tokens))
    handle = client.match(ids, soon()).handle
    for first in range(0, pages, SLOTS):
        batch = list(range(first, min(first + SLOTS, pages)))
        slots = client.reserve(handle, batch, soon())["slot"]
        with client.shared.use() as m:
            for page, slot in zip(batch, slots.tolist(), strict=True):
                m.slot(slot, PAGE_BYTES)[:] = content[page]
        done = client.commit(handle, batch, slots, soon())["status"].tolist()
        if set(done) != {wire.Store.STORED}:
            raise RuntimeError(f"pages {first} to {batch[-1]} were not stored: {done}")
    return ids, content


class Bench:
    """Times copies between `pages` places in host memory and as many blocks on a device."""

    def __init__(self, device: torch.device, content: Bytes) -> None:
        self._content = content
        pages = len(content)
        layers = [
            torch.zeros(pages, LAYER_BYTES, dtype=torch.uint8, device=device) for _ in range(LAYERS)
        ]
        self._layers = layers
        self._pool: Pool = (
            Pool([layer.numpy() for layer in layers])
            if device.type == "cpu"
            else DevicePool(layers, TorchQueue(device))
        )

    def upload(self, row: Row, places: list[Bytes]) -> None:
        """Copy every place into its block. Raises RuntimeError when a byte differs."""
        for layer in self._layers:
            layer.zero_()
        self._time(row, lambda i: self._pool.write(i, places[i]))
        for i, layer in enumerate(self._layers):
            sent = self._content[:, i * LAYER_BYTES : (i + 1) * LAYER_BYTES]
            if not np.array_equal(layer.cpu().numpy(), sent):
                raise RuntimeError(f"{row.name}: layer {i} is not what was sent")

    def download(self, row: Row, places: list[Bytes]) -> None:
        """Copy every block into one of the places in turn; the last ones are compared."""
        for place in places:
            place[...] = 0
        self._time(row, lambda i: self._pool.read(i, places[i % len(places)]))
        pages = len(self._content)
        for i in range(max(pages - len(places), 0), pages):
            got = places[i % len(places)].reshape(-1)
            if not np.array_equal(got, self._content[i]):
                raise RuntimeError(f"{row.name}: page {i} is not what was sent")

    def _time(self, row: Row, copy: Callable[[int], None]) -> None:
        self._pool.after(self._pool.mark())
        self._pool.drain()
        began = time.perf_counter()
        for i in range(len(self._content)):
            copy(i)
        asked = time.perf_counter() - began
        self._pool.drain()
        took = time.perf_counter() - began
        row.speed.append(self._content.nbytes / took / 1e9)
        row.held.append(asked / took)


def own(device: torch.device, pages: int) -> list[Bytes]:
    """Return host memory of torch's own for so many pages, pinned where there is a GPU."""
    t = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return [page.reshape(LAYERS, LAYER_BYTES) for page in t.numpy()]


@contextlib.contextmanager
def registered(driver: Driver, shared: Shared) -> Iterator[float]:
    """Keep arena and inbox registered while the body runs; yield the seconds for a GiB."""
    began = time.perf_counter()
    try:
        size = shared.pin(driver)
        yield (time.perf_counter() - began) / size * (1 << 30)
    finally:
        shared.unpin()


def cuda(device: torch.device) -> Driver:
    """Return the driver of a device. Raises PinError where there is none."""
    if device.type != "cuda":
        raise PinError(f"nothing registers memory with the device {device}")
    return CudaDriver(device.index or 0)


def measure(binary: str, device: torch.device, pages: int, rounds: int) -> dict[str, Any]:
    """Run everything; return the rows and the seconds that a GiB took to register."""
    up = [Row("own memory, pinned"), Row("arena, plain"), Row("arena, registered")]
    down = [Row("own memory, pinned"), Row("inbox, plain"), Row("inbox, registered")]
    register: list[float] = []
    missing = ""
    with sidecar(binary, 2 * pages * PAGE_BYTES + (256 << 20)) as client:
        assert client.shared is not None
        ids, content = store(client, pages)
        leased = client.match(ids, soon(), lease_ms=600_000)
        if leased.pages != pages:
            raise RuntimeError(f"{leased.pages} of {pages} pages are held")
        bench = Bench(device, content)
        pinned, few = own(device, pages), own(device, SLOTS)
        for page, sent in zip(pinned, content, strict=True):
            page[...] = sent.reshape(page.shape)
        client.shared.populate()
        with client.shared.use() as m:
            places = [m.object(int(at["offset"]), PAGE_BYTES) for at in leased.locations[:, 0]]
            arena = [place.reshape(LAYERS, LAYER_BYTES) for place in places]
            inbox = [m.slot(i, PAGE_BYTES).reshape(LAYERS, LAYER_BYTES) for i in range(SLOTS)]
            for i in range(rounds):
                say(f"round {i + 1} of {rounds}")
                bench.upload(up[0], pinned)
                bench.upload(up[1], arena)
                bench.download(down[0], few)
                bench.download(down[1], inbox)
                try:
                    with registered(cuda(device), m) as seconds:
                        register.append(seconds)
                        bench.upload(up[2], arena)
                        bench.download(down[2], inbox)
                except PinError as e:
                    missing = str(e)
            del places, arena, inbox
        client.release(leased.lease, soon())
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "pages": pages,
        "page_bytes": PAGE_BYTES,
        "register_s_per_gib": register,
        "not_registered": missing,
        "to the device": [vars(row) for row in up],
        "from the device": [vars(row) for row in down],
    }


def say(sentence: str) -> None:
    """Say how far it is."""
    print(f"· {sentence}", file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown. Ratios are medians of those round by round."""
    lines = [
        f"{result['device']}, torch {result['torch']}, {result['pages']} pages of 2 MiB, GB/s.",
        "",
        "| copies | from or to | median | min | max | to pinned | thread held up |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for way in ("to the device", "from the device"):
        rows = result[way]
        for row in rows:
            if not row["speed"]:
                why = result["not_registered"] or "not run"
                lines.append(f"| {way} | {row['name']} | | | | | {why} |")
                continue
            speed = row["speed"]
            pairs = zip(speed, rows[0]["speed"], strict=False)
            ratio = statistics.median(a / b for a, b in pairs)
            lines.append(
                f"| {way} | {row['name']} | {statistics.median(speed):.2f} | {min(speed):.2f} |"
                f" {max(speed):.2f} | {ratio:.2f} | {statistics.median(row['held']):.0%} |"
            )
    if seconds := result["register_s_per_gib"]:
        lines += ["", f"To register took {statistics.median(seconds):.2f} s a GiB."]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the benchmark and print its table; 1 when a byte was wrong, 2 when it cannot run."""
    parser = argparse.ArgumentParser(
        prog="membrane_bench.pinned",
        description="Measure copies between the sidecar's memory and a GPU.",
    )
    parser.add_argument("membrane", help="the binary")
    parser.add_argument("--device", default="cuda:0", help="torch's name of it (%(default)s)")
    parser.add_argument("--pages", type=int, default=512, help="of 2 MiB (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args(argv)
    if not 1 <= args.pages <= 8192 or not 1 <= args.rounds <= 1000:
        parser.error("--pages is between 1 and 8192, --rounds between 1 and 1000")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device for torch here; see --help", file=sys.stderr)
        return 2
    try:
        result = measure(args.membrane, device, args.pages, args.rounds)
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    except OSError as e:
        print(f"the sidecar does not run: {e}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
