"""Real processes for the engine tests: sidecars, vLLM servers, and a proxy that spoils a link."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from membrane_kv import wire
from membrane_kv.client import Client

PACKAGE = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "membrane" / "engines"
BLOCK = 32
PAGE = 64
MATCH_MS, LOAD_MS, STORE_MS = 1000, 2000, 1000
SLACK_S = 0.05

_PAUSE = threading.Event()


def eventually(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Return as soon as the condition holds; fail after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {timeout:.0f} s"
        _PAUSE.wait(0.05)


_GIVEN: set[int] = set()


def free_port(*hosts: str) -> int:
    """Return a port that is free on loopback addresses, and that was not given out before.

    Below the ports that the kernel gives to outgoing connections.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        if port in _GIVEN:
            continue
        with contextlib.ExitStack() as stack:
            try:
                for host in {"127.0.0.1", *hosts}:
                    stack.enter_context(socket.create_server((host, port)))
            except OSError:
                continue
        _GIVEN.add(port)
        return port


def prompt(n: int, seed: int) -> list[int]:
    """Return token ids of the test models' vocabulary."""
    return [(i * seed + i * i + seed) % 500 + 3 for i in range(n)]


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as f:
                for child in map(int, f.read().split()):
                    found += [child, *_children(child)]
    return found


class Process:
    """A process in a session of its own, with its output in a log."""

    def __init__(self, name: str, logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, argv: Sequence[str], env: dict[str, str]) -> None:
        """Start it; what it says is appended to the log."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        """Return whether it runs."""
        return self.process is not None and self.process.poll() is None

    def tail(self) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and wait."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(10)

    def stop(self, timeout: float = 20.0) -> list[int]:
        """End it and its children; return the ids of those that had to be killed."""
        if self.process is None:
            return []
        everybody = [self.pid, *_children(self.pid)]
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        end = time.monotonic() + 5
        left = [p for p in everybody if _running(p)]
        while left and time.monotonic() < end:
            _PAUSE.wait(0.1)
            left = [p for p in left if _running(p)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        return left


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Sidecar(Process):
    """`membrane serve`. Its data port can be reached by others through `data_host` only."""

    def __init__(self, name: str, logs: Path, folder: Path, data_host: str = "127.0.0.1") -> None:
        super().__init__(name, logs)
        self.socket = str(folder / f"{name}.sock")
        self.port = free_port()
        self.data_host = data_host
        self.data_port = free_port(data_host)
        self.gossip_port = free_port(data_host)
        self.engine_port = free_port()
        self.peers: list[str] = []
        self.flags: list[str] = []

    def start(self) -> None:
        """Start it, `flags` last, and wait until it serves."""
        argv = [
            os.environ["MEMBRANE_BIN"],
            "serve",
            f"--node-id={self.name}",
            f"--port={self.port}",
            f"--engine-socket={self.socket}",
            f"--engine-addr=127.0.0.1:{self.engine_port}",
            f"--data-addr=127.0.0.1:{self.data_port}",
            f"--gossip-addr={self.data_host}:{self.gossip_port}",
            f"--advertise-host={self.data_host}",
            "--memory=256MiB",
            f"--page-tokens={PAGE}",
            "--log-format=json",
            *(f"--peer={p}" for p in self.peers),
            *self.flags,
        ]
        self.launch(argv, dict(os.environ))
        eventually(lambda: self.stats() or not self.alive(), f"the start of {self.name}")
        assert self.alive(), self.tail()

    def stats(self) -> dict[str, Any]:
        """Return the counters, or nothing when it does not answer."""
        try:
            deadline = time.monotonic() + 2
            client = Client.connect(self.socket, deadline, name="test")
        except (OSError, wire.WireError):
            return {}
        try:
            return client.stats(deadline)
        except (OSError, wire.WireError):
            return {}
        finally:
            client.close()

    def status(self) -> dict[str, Any]:
        """Return what /statusz says, or nothing when it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/statusz", timeout=2) as r:
                return dict(json.load(r))
        except OSError:
            return {}

    def ranks(self) -> list[list[str]]:
        """Return who is attached, engine by engine: "ROLE SHARD/OF on socket" or "on ADDRESS"."""
        engines = self.status().get("engines", {}).get("engines", [])
        return [e["connections"] for e in engines]

    def level(self) -> bool:
        """Return whether no engine has a lease, a chain or an inbox slot in it."""
        s = self.status()
        if not s:
            return False
        left = [e["leases"] + e["handles"] for e in s["engines"]["engines"]]
        return not (any(left) or s["engines"]["reserved_slots"] or s["cache"]["leases"])

    def knows(self, other: Sidecar) -> bool:
        """Return whether the other is among the live peers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/peers", timeout=2) as r:
                peers = json.load(r)["peers"]
        except OSError:
            return False
        return any(p["node_id"] == other.name and p["healthy"] for p in peers)

    def metric(self, name: str) -> float:
        """Return one metric; nothing is 0."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as r:
            for line in r.read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[-1])
        return 0.0

    def arena_bytes_at(self, offset: int) -> int:
        """Return the address, in the process, of an offset in the arena."""
        with open(f"/proc/{self.pid}/maps") as maps:
            for line in maps:
                span, flags, base, *_ = line.split()
                if "membrane-arena" in line and flags == "rw-s":
                    begin, end = (int(x, 16) for x in span.split("-"))
                    if int(base, 16) <= offset < int(base, 16) + end - begin:
                        return begin + offset - int(base, 16)
        raise AssertionError(f"{self.name} has no arena mapped at {offset}")

    def flip(self, offset: int) -> None:
        """Change one bit of the arena behind the sidecar's back."""
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            at = self.arena_bytes_at(offset)
            memory.seek(at)
            byte = memory.read(1)
            memory.seek(at)
            memory.write(bytes([byte[0] ^ 1]))


@dataclass
class Answer:
    """What an engine said: tokens, their log-probabilities, tokens that it had cached, seconds."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    seconds: float


class Engine(Process):
    """A vLLM server on CPU, with or without the connector."""

    def __init__(self, name: str, logs: Path, model: Path, sidecar: Sidecar | None) -> None:
        super().__init__(name, logs)
        self.model = model
        self.sidecar = sidecar
        self.port = free_port()
        self.stats_file = logs / f"{name}.stats"

    def start(self, *flags: str, extra: dict[str, Any] | None = None) -> None:
        """Start it; `wait` waits until it serves."""
        argv = [
            os.environ["MEMBRANE_VLLM_PYTHON"],
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *([] if (self.model / "tokenizer.json").exists() else ["--skip-tokenizer-init"]),
            *("--enforce-eager", "--dtype", "float32"),
            *("--max-model-len", "4096", "--max-num-seqs", "8"),
            *("--max-num-batched-tokens", "1024", "--block-size", str(BLOCK)),
            *("--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"),
            *flags,
        ]
        if self.sidecar is None:
            argv.append("--no-enable-prefix-caching")
        else:
            config = {
                "kv_connector": "MembraneConnector",
                "kv_connector_module_path": "membrane_kv.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "engine_id": self.name,
                "kv_connector_extra_config": {
                    "sidecar": self.sidecar.socket,
                    "match_deadline_ms": MATCH_MS,
                    "load_deadline_ms": LOAD_MS,
                    "store_deadline_ms": STORE_MS,
                    "stats_file": str(self.stats_file),
                    **(extra or {}),
                },
            }
            argv += ["--kv-transfer-config", json.dumps(config)]
        self.launch(argv, engine_environment())

    def wait(self, timeout: float = 300.0) -> None:
        """Wait until it serves."""
        eventually(lambda: self.healthy() or not self.alive(), f"the start of {self.name}", timeout)
        assert self.alive(), self.tail()
        self.complete(prompt(40, 1), 2)

    def healthy(self) -> bool:
        """Return whether it serves."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (OSError, http.client.HTTPException):
            return False

    def post(self, path: str, body: dict[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        """Post JSON; fails on any status but 200."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as r:
                text = r.read()
                return dict(json.loads(text)) if text else {}
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{self.name} answered {e.code}: {e.read()[:300]!r}") from e

    def complete(self, ids: list[int], n: int = 16, salt: str | None = None) -> Answer:
        """Let it generate n tokens, greedily."""
        body = completion(ids, n)
        if salt is not None:
            body["cache_salt"] = salt
        began = time.monotonic()
        v = self.post("/v1/completions", body)
        choice, details = v["choices"][0], v["usage"].get("prompt_tokens_details") or {}
        return Answer(
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            details.get("cached_tokens") or 0,
            time.monotonic() - began,
        )

    def disconnectable(self, ids: list[int], n: int) -> socket.socket:
        """Send a request as `complete` does; closing what is returned aborts it."""
        body = json.dumps(completion(ids, n)).encode()
        client = socket.create_connection(("127.0.0.1", self.port), 5)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        return client

    def metric(self, name: str) -> float:
        """Return the sum over one of vLLM's own metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as r:
            lines = r.read().decode().splitlines()
        values = [float(x.split()[-1]) for x in lines if x.startswith((name + "{", name + " "))]
        assert values, f"{self.name} has no metric {name}"
        return sum(values)

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.post("/reset_prefix_cache", {})

    def stats(self, role: str) -> dict[str, Any]:
        """Return what the connector's side has written last."""
        files = list(self.stats_file.parent.glob(f"{self.stats_file.name}.{role}.*.json"))
        if not files:
            return {"counts": {}, "hooks": {}, "sums": {}}
        newest = max(files, key=lambda p: p.stat().st_mtime)
        return dict(json.loads(newest.read_text()))

    def count(self, role: str, name: str) -> int:
        """Return one counter."""
        return int(self.stats(role)["counts"].get(name, 0))

    def sums(self, role: str, name: str) -> list[str]:
        """Return the checksums kept under a name."""
        return list(self.stats(role)["sums"].get(name, []))


def completion(ids: list[int], n: int) -> dict[str, Any]:
    """Return the body of a request for n tokens, greedily."""
    return {
        "model": "m",
        "prompt": ids,
        "max_tokens": n,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }


def engine_environment() -> dict[str, str]:
    """Return the environment of vLLM's processes: offline, one thread, compiled files kept."""
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in ("pyc", "vllm", "hf", "tmp"):
        (CACHE / name).mkdir(parents=True, exist_ok=True)
    env.update(
        PYTHONPATH=str(PACKAGE),
        PYTHONPYCACHEPREFIX=str(CACHE / "pyc"),
        VLLM_CACHE_ROOT=str(CACHE / "vllm"),
        VLLM_CONFIG_ROOT=str(CACHE / "vllm"),
        HF_HOME=str(CACHE / "hf"),
        TMPDIR=str(CACHE / "tmp"),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_LOGGING_LEVEL="INFO",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        PYTHONHASHSEED="0",
    )
    return env


def make_model(kind: str, seed: int = 7) -> Path:
    """Make a test model, or find the one that an earlier run made."""
    folder = CACHE / "models" / (kind if seed == 7 else f"{kind}-{seed}")
    if not (folder / "model.safetensors").exists():
        script = Path(__file__).with_name("make_model.py")
        python = os.environ.get("MEMBRANE_VLLM_PYTHON") or os.environ["MEMBRANE_SGLANG_PYTHON"]
        subprocess.run(
            [python, str(script), str(folder), kind, str(seed)],
            check=True,
            env=engine_environment(),
        )
    return folder


class Proxy:
    """Forwards a TCP port and spoils what comes back, as told by its attributes.

    `flip_at`: which byte of what the server sends on each connection gets a bit
    flipped, or -1. `hold_at`: what `moved`, the bytes sent back, does not pass, or -1.
    `garble_at`: from which value of `moved` on all bytes are wrong, or -1. `rate`: how
    many bytes a second are sent back, or 0 for all that come.
    """

    def __init__(self, host: str, port: int, target: tuple[str, int]) -> None:
        self.flip_at = -1
        self.hold_at = -1
        self.garble_at = -1
        self.rate = 0.0
        self._due = 0.0
        self.moved = 0
        self.flipped = 0
        self.address = f"{host}:{port}"
        self._target = target
        self._listener = socket.create_server((host, port))
        self._open: set[socket.socket] = set()
        self._closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, 2)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._open |= {client, server}
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._end(source, sink)

    def _down(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(16384)):
                while 0 <= self.hold_at < self.moved + len(data) and source in self._open:
                    self._closing.wait(0.005)
                self._spoil(data)
                if self.rate:
                    self._pace(len(data))
                sink.sendall(data)
                self.moved += len(data)
        self._end(source, sink)

    def _pace(self, size: int) -> None:
        """Wait as long as the rate asks; what a busy machine made late is made up for."""
        now = time.monotonic()
        self._due = max(self._due, now - 0.5) + size / self.rate
        self._closing.wait(max(self._due - now, 0))

    def _spoil(self, data: bytearray) -> None:
        """Flip a bit when this much of a page comes by: small answers pass unchanged."""
        if 0 <= self.flip_at < len(data):
            data[self.flip_at] ^= 1
            self.flipped += 1
        if 0 <= self.garble_at < self.moved + len(data):
            data[:] = bytes(b ^ 0xA5 for b in data)

    def _end(self, *sockets: socket.socket) -> None:
        for s in sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
            self._open.discard(s)

    def behave(self) -> None:
        """Spoil nothing any more."""
        self.flip_at = self.hold_at = self.garble_at = -1
        self.rate = 0.0

    def disconnect(self) -> None:
        """Close every connection that is forwarded."""
        self._end(*list(self._open))

    def close(self) -> None:
        """Stop forwarding."""
        self._closing.set()
        self._listener.close()
        self.disconnect()


class Cluster:
    """A prefills, B decodes; what B fetches from A goes through `link`.

    Each has a serving port, too, in front of its engine.
    """

    def __init__(self, logs: Path, folder: Path) -> None:
        model = make_model("chat")
        self.logs = logs
        self.a = Sidecar("sidecar-a", logs, folder, data_host="127.0.0.2")
        self.b = Sidecar("sidecar-b", logs, folder)
        self.b.peers = [f"127.0.0.1:{self.a.port}"]
        self.link = Proxy("127.0.0.2", self.a.data_port, ("127.0.0.1", self.a.data_port))
        self.engine_a = Engine("vllm-a", logs, model, self.a)
        self.engine_b = Engine("vllm-b", logs, model, self.b)
        self.plain = Engine("vllm-plain", logs, model, None)
        self.serve_a = self._serve(self.a, self.engine_a, "prefill")
        self.serve_b = self._serve(self.b, self.engine_b, "decode")
        self.seed = 100

    @staticmethod
    def _serve(sidecar: Sidecar, engine: Engine, role: str) -> int:
        """Give a sidecar a role and a serving port, and return that."""
        port = free_port(sidecar.data_host)
        sidecar.flags = [
            f"--role={role}",
            f"--serve-port={port}",
            f"--engine-url=http://127.0.0.1:{engine.port}",
            "--prefill-threshold=256",
        ]
        return port

    @property
    def processes(self) -> list[Process]:
        """Everything that runs, engines first."""
        return [self.engine_a, self.engine_b, self.plain, self.a, self.b]

    def start(self) -> None:
        """Boot everything; the engines come up at the same time as the sidecars."""
        for engine in (self.engine_a, self.engine_b, self.plain):
            engine.start()
        self.a.start()
        self.b.start()
        eventually(lambda: self.b.knows(self.a), "that the sidecars meet")
        for engine in (self.engine_a, self.engine_b, self.plain):
            engine.wait()

    def fresh(self) -> int:
        """Return a seed for a prompt that nobody has seen."""
        self.seed += 2
        return self.seed
