"""A sidecar in Python, for tests: the engine socket with memfds, and ways to misbehave.

It keeps pages by content hash and shard and never evicts. The client under
test must not be able to tell it from the real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from typing import Any

from membrane_kv import wire
from membrane_kv.wire import ANSWER, Code, Reason, Store, Type, WireError

F_ADD_SEALS = 1033
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10


class Chain:
    """The hashes of a sequence's pages, and the tokens that fill none yet."""

    def __init__(self, page_tokens: int, salt: bytes | None) -> None:
        self.size = page_tokens * 4
        self.prior = hashlib.sha256(b"seed" + salt).digest() if salt is not None else b""
        self.rest = b""
        self.hashes: list[bytes] = []
        self.whole = b""

    def append(self, ids: bytes) -> None:
        self.whole += ids
        data = self.rest + ids
        whole = len(data) // self.size * self.size
        for i in range(0, whole, self.size):
            self.prior = hashlib.sha256(self.prior + data[i : i + self.size]).digest()
            self.hashes.append(self.prior)
        self.rest = data[whole:]


class Memory:
    """A sealed memfd, mapped here for writing."""

    def __init__(self, name: str, size: int, seals: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        fcntl.fcntl(self.fd, F_ADD_SEALS, seals)

    def close(self) -> None:
        os.close(self.fd)
        self.map.close()


class FakeSidecar:
    """Listens on a Unix socket (and a localhost port) until `close`.

    Attributes to set at any time: `silent`: types that are not answered;
    `hangup`: types at which the connection is closed; `delay`: seconds before
    answers, by type; `outcome`: of every release; `page_limit`: pages leased at
    most; `refuse`: the reason for which stores are refused, or 0; `refuse_type`:
    the error code with which requests are refused, by type.
    """

    def __init__(
        self, path: str, arena_bytes: int = 64 << 20, page_tokens: int = 64, node: str = "fake"
    ) -> None:
        self.path = path
        self.page_tokens = page_tokens
        self.node = node
        self.silent: set[int] = set()
        self.hangup: set[int] = set()
        self.delay: dict[int, float] = {}
        self.outcome = wire.Outcome.LIVE
        self.page_limit = 1 << 16
        self.refuse = 0
        self.refuse_type: dict[int, int] = {}
        self.lease_ms = 10_000
        self.seen: list[int] = []
        self.errors: list[str] = []
        self.pages: dict[bytes, dict[int, tuple[int, int, int]]] = {}
        self.leases: dict[int, set[int]] = {}
        self.lease_pages: dict[int, list[dict[int, tuple[int, int, int]]]] = {}
        self.chains: dict[int, Chain] = {}
        self.ranks: set[tuple[str, str, int]] = set()
        self.registered: list[dict[str, Any]] = []
        self.arena = Memory(
            "fake-arena", arena_bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE
        )
        self._top = 0
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))
        self._lock = threading.RLock()
        self._open: set[socket.socket] = set()
        self._closing = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(path)
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self._tcp.getsockname()[1]
        for listener in (self._unix, self._tcp):
            listener.listen(64)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Die: every connection ends, the memory is gone for those who map it later."""
        if self._closing:
            return
        self._closing = True
        for listener in (self._unix, self._tcp):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.disconnect()
        self.arena.close()

    def disconnect(self) -> None:
        """Close every connection."""
        with self._lock:
            for s in self._open:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                s, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(s)
            threading.Thread(target=self._serve, args=(s,), daemon=True).start()

    def _serve(self, s: socket.socket) -> None:
        connection = _Connection(self, s)
        try:
            connection.run()
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(s)
                connection.end()
            s.close()

    def number(self) -> int:
        return next(self._numbers)

    def store(self, hash_: bytes, shard: int, data: bytes) -> tuple[int, int]:
        """Keep an object; return status and checksum."""
        with self._lock:
            shards = self.pages.setdefault(hash_, {})
            if shard in shards:
                return Store.EXISTS, shards[shard][2]
            if self._top + len(data) > len(self.arena.map):
                return Store.REFUSED, 0
            checksum = zlib.crc32(data)
            self.arena.map[self._top : self._top + len(data)] = data
            shards[shard] = (self._top, len(data), checksum)
            self._top += (len(data) + 63) // 64 * 64
            return Store.STORED, checksum


class _Connection:
    def __init__(self, sidecar: FakeSidecar, s: socket.socket) -> None:
        self.sidecar = sidecar
        self.socket = s
        self.rank: tuple[str, str, int] | None = None
        self.role = ""
        self.shard = 0
        self.shards = 1
        self.object_bytes = 0
        self.inbox: Memory | None = None
        self.slots: dict[int, tuple[int, int]] = {}
        self.free: list[int] = []
        self.slot_bytes = 0
        self.leases: set[int] = set()
        self.chains: set[int] = set()

    def end(self) -> None:
        sc = self.sidecar
        for lease in self.leases:
            sc.leases.pop(lease, None)
        for handle in self.chains:
            sc.chains.pop(handle, None)
        if self.rank is not None:
            sc.ranks.discard(self.rank)
        if self.inbox is not None:
            self.inbox.close()

    def receive(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            part = self.socket.recv(n - len(data))
            if not part:
                raise ConnectionError
            data += part
        return data

    def run(self) -> None:
        sc = self.sidecar
        while True:
            header = wire.parse_header(self.receive(wire.HEADER_SIZE))
            body = self.receive(header.length)
            sc.seen.append(header.type)
            if header.type in sc.hangup:
                return
            if header.type in sc.silent:
                continue
            time.sleep(sc.delay.get(header.type, 0))
            fds: list[int] = []
            try:
                if code := sc.refuse_type.get(header.type):
                    raise WireError(code, "", "refused on purpose")
                with sc._lock:
                    answer = getattr(self, "on_" + Type(header.type).name.lower())(body, fds)
                kind = Type.PAGE if header.type == Type.READ else header.type | ANSWER
            except WireError as e:
                sc.errors.append(str(e))
                answer, kind = wire.pack_error(e.code, e.field, e.message), Type.ERROR | ANSWER
            frame = wire.frame(kind, header.id, answer)
            if fds:
                socket.send_fds(self.socket, [frame], fds)
            else:
                self.socket.sendall(frame)

    def on_hello(self, body: bytes, fds: list[int]) -> bytes:
        wire.parse_json(body)
        sc = self.sidecar
        return wire.pack_json({"node": sc.node, "server": "fake/1", "socket": sc.path})

    def on_ping(self, body: bytes, fds: list[int]) -> bytes:
        return b""

    def on_register(self, body: bytes, fds: list[int]) -> bytes:
        sc, v = self.sidecar, wire.parse_json(body)
        d = v["descriptor"]
        self.role = v["role"]
        self.shard = d["pp_rank"] * d["tp_size"] + d["tp_rank"]
        self.shards = d["tp_size"] * d["pp_size"]
        rank = (v["engine"], self.role, self.shard)
        if rank in sc.ranks:
            raise WireError(Code.RANK_TAKEN, "engine", f"{rank} is here already")
        sc.ranks.add(rank)
        self.rank = rank
        sc.registered.append(v)
        self.object_bytes = sc.page_tokens // d["block_tokens"] * d["block_bytes"]
        unix = self.socket.family == socket.AF_UNIX
        shared = unix and not v["inline"] and self.role != "scheduler"
        n = v["inbox_slots"] if shared else 0
        self.slot_bytes = (self.object_bytes + 4095) // 4096 * 4096
        if shared:
            fds.append(sc.arena.fd)
        if n:
            self.inbox = Memory("fake-inbox", n * self.slot_bytes, F_SEAL_SHRINK | F_SEAL_GROW)
            fds.append(self.inbox.fd)
            self.free = list(range(n))
        return wire.pack_json(
            {
                "namespace": "00" * 32,
                "form": "00" * 8,
                "page_tokens": sc.page_tokens,
                "object_bytes": self.object_bytes,
                "tenant": "public",
                "shared_memory": shared,
                "arena_bytes": len(sc.arena.map) if shared else 0,
                "inbox_bytes": n * self.slot_bytes,
                "inbox_slots": n,
                "slot_bytes": self.slot_bytes,
                "max_lease_ms": 60000,
            }
        )

    def chain(self, handle: int) -> Chain:
        try:
            return self.sidecar.chains[handle]
        except KeyError:
            raise WireError(Code.UNKNOWN_HANDLE, "handle", f"{handle} is not known") from None

    def leased(self, handle: int, first: int, most: int, flags: int) -> bytes:
        sc, chain = self.sidecar, self.chain(handle)
        at, reason = b"", 0
        held: list[dict[int, tuple[int, int, int]]] = []
        pages = 0
        for h in chain.hashes[first : first + most]:
            shards = sc.pages.get(h, {})
            if len(shards) < self.shards or pages >= sc.page_limit:
                reason = Reason.ABSENT
                break
            for shard in range(self.shards):
                at += struct.pack("<QQQ", *shards[shard])
            pages += 1
            held.append(shards)
        lease = 0
        if pages and not flags & wire.MATCH_PRESENCE:
            lease = sc.number()
            sc.leases[lease] = set(range(self.shards))
            sc.lease_pages[lease] = held
            self.leases.add(lease)
        head = struct.pack(
            "<QQIIIIIHBB",
            handle,
            lease,
            sc.lease_ms if lease else 0,
            first,
            pages,
            len(chain.hashes),
            0,
            self.shards,
            reason,
            0,
        )
        return head + (at if lease else b"")

    def on_match(self, body: bytes, fds: list[int]) -> bytes:
        sc = self.sidecar
        held, _, _, flags = struct.unpack_from("<IIIH", body)
        at = 14
        texts: list[bytes | None] = []
        for _ in range(2):
            (n,) = struct.unpack_from("<H", body, at)
            at += 2
            texts.append(None if n == 0xFFFF else body[at : at + n])
            at += 0 if n == 0xFFFF else n
        (n,) = struct.unpack_from("<I", body, at)
        assert len(body) == at + 4 + 4 * n
        seeds = [t for t in texts if t is not None]
        chain = Chain(sc.page_tokens, b"\0".join(seeds) if seeds else None)
        chain.append(body[at + 4 :])
        handle = sc.number()
        sc.chains[handle] = chain
        self.chains.add(handle)
        return self.leased(handle, held // sc.page_tokens, 1 << 16, flags)

    def on_extend(self, body: bytes, fds: list[int]) -> bytes:
        handle, n = struct.unpack_from("<QI", body)
        assert len(body) == 12 + 4 * n
        chain = self.chain(handle)
        chain.append(body[12:])
        return struct.pack("<I", len(chain.hashes))

    def on_lease(self, body: bytes, fds: list[int]) -> bytes:
        handle, first, pages, _, _, flags = struct.unpack("<QIIIIH", body)
        return self.leased(handle, first, pages, flags)

    def on_release(self, body: bytes, fds: list[int]) -> bytes:
        lease, _ = struct.unpack("<QB", body)
        ranks = self.sidecar.leases.get(lease)
        if ranks is None:
            raise WireError(Code.UNKNOWN_LEASE, "lease", f"{lease} is not known")
        if self.role != "worker":
            ranks.clear()
        elif self.shard in ranks:
            ranks.discard(self.shard)
        else:
            raise WireError(Code.DOUBLE_RELEASE, "lease", f"{lease} was released")
        if not ranks:
            del self.sidecar.leases[lease]
        return bytes([self.sidecar.outcome])

    def on_reserve(self, body: bytes, fds: list[int]) -> bytes:
        sc = self.sidecar
        (n,) = struct.unpack_from("<I", body)
        out = b""
        for handle, page in struct.iter_unpack("<QI", body[4:]):
            h = self.chain(handle).hashes[page]
            if self.shard in sc.pages.get(h, {}):
                out += struct.pack("<BBHI", Store.EXISTS, 0, 0, 0)
            elif sc.refuse or not self.free:
                why = sc.refuse or Reason.OVER_BUDGET
                out += struct.pack("<BBHI", Store.REFUSED, why, 0, 0)
            else:
                slot = self.free.pop()
                self.slots[slot] = (handle, page)
                out += struct.pack("<BBHI", Store.SLOT, 0, 0, slot)
        assert len(out) == 8 * n
        return out

    def put(self, handle: int, page: int, data: bytes) -> bytes:
        h = self.chain(handle).hashes[page]
        status, checksum = self.sidecar.store(h, self.shard, data)
        why = Reason.OVER_BUDGET if status == Store.REFUSED else 0
        return struct.pack("<BB6xQ", status, why, checksum)

    def on_commit(self, body: bytes, fds: list[int]) -> bytes:
        out = b""
        for handle, page, slot in struct.iter_unpack("<QII", body[4:]):
            if self.slots.get(slot) != (handle, page):
                raise WireError(Code.NOT_RESERVED, "slot", f"{slot} is not reserved")
            del self.slots[slot]
            self.free.append(slot)
            assert self.inbox is not None
            begin = slot * self.slot_bytes
            out += self.put(handle, page, self.inbox.map[begin : begin + self.object_bytes])
        return out

    def on_drop(self, body: bytes, fds: list[int]) -> bytes:
        (handle,) = struct.unpack("<Q", body)
        self.chain(handle)
        del self.sidecar.chains[handle]
        self.chains.discard(handle)
        return b""

    def on_reset(self, body: bytes, fds: list[int]) -> bytes:
        n = len(self.sidecar.pages)
        self.sidecar.pages.clear()
        return wire.pack_json({"pages": n})

    def on_stats(self, body: bytes, fds: list[int]) -> bytes:
        return wire.pack_json({"leases": len(self.sidecar.leases)})

    def on_read(self, body: bytes, fds: list[int]) -> bytes:
        lease, first, pages = struct.unpack("<QII", body)
        if lease not in self.sidecar.leases:
            raise WireError(Code.UNKNOWN_LEASE, "lease", f"{lease} is not known")
        assert pages == 1
        offset, length, checksum = self.sidecar.lease_pages[lease][first][self.shard]
        head = struct.pack("<IHHB7x8xQQ16x8x", 0, self.shard, self.shards, 0, length, checksum)
        return head + self.sidecar.arena.map[offset : offset + length]

    def on_write(self, body: bytes, fds: list[int]) -> bytes:
        handle, page, _ = struct.unpack_from("<QII", body)
        return self.put(handle, page, body[16:])
