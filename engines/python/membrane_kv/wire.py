"""Frames and messages of the engine socket, byte by byte.

The other side of this module is the sidecar's package kvwire; docs/protocol.md
is the text that both follow. Nothing here touches a socket. Integers are
little endian. Token ids travel as four bytes each and are passed around in
that form, as `bytes`, so that no token is ever looped over.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

VERSION: Final = 1
HEADER_SIZE: Final = 16
PAGE_HEADER_SIZE: Final = 64
ANSWER: Final = 0x80

MAX_TOKENS: Final = 1 << 20
MAX_SHARDS: Final = 512
MAX_OBJECT: Final = 256 << 20
MAX_BATCH: Final = 1 << 16
MAX_CONTROL: Final = 8 << 20
MAX_JSON: Final = 64 << 10
MAX_SALT: Final = 4096
HASH_SIZE: Final = 32

_MAGIC: Final = b"MBRN"
_ABSENT: Final = 0xFFFF
_HEADER: Final = struct.Struct("<4sBBHII")
_MATCH: Final = struct.Struct("<IIIH")
_MATCH_HASHES: Final = struct.Struct("<IIHHI")
_LEASED: Final = struct.Struct("<QQIIIIIHBB")
_LEASE: Final = struct.Struct("<QIIIIH")
_EXTEND: Final = struct.Struct("<QI")
_RELEASE: Final = struct.Struct("<QB")
_READ: Final = struct.Struct("<QII")
_WRITE: Final = struct.Struct("<QII")
_ERROR: Final = struct.Struct("<HHH")
_PAGE: Final = struct.Struct("<IHHB7s8sQQ16s8s")

_MAX_ERROR_FIELD: Final = 256
_MAX_ERROR_MESSAGE: Final = 4096

LOCATION: Final = np.dtype([("offset", "<u8"), ("length", "<u8"), ("sum", "<u8")])
"""One object in the arena: offset and length in bytes, XXH3-64 checksum."""

_REF: Final = np.dtype([("handle", "<u8"), ("page", "<u4")])
_COMMIT: Final = np.dtype([("handle", "<u8"), ("page", "<u4"), ("slot", "<u4")])
_RESERVATION: Final = np.dtype(
    [("status", "u1"), ("reason", "u1"), ("zero", "<u2"), ("slot", "<u4")]
)
_COMMITTED: Final = np.dtype([("status", "u1"), ("reason", "u1"), ("zero", "V6"), ("sum", "<u8")])

Records = npt.NDArray[np.void]
"""A one-dimensional array of one of the records above."""


class Type(enum.IntEnum):
    """What a frame's body is; an answer has the same number with bit 0x80."""

    HELLO = 0x01
    REGISTER = 0x02
    PING = 0x03
    MATCH = 0x04
    EXTEND = 0x05
    LEASE = 0x06
    RELEASE = 0x07
    RESERVE = 0x08
    COMMIT = 0x09
    DROP = 0x0A
    RESET = 0x0B
    STATS = 0x0C
    READ = 0x0D
    WRITE = 0x0E
    MATCH_HASHES = 0x0F
    PAGE = 0x40
    ERROR = 0x7F


_JSON_TYPES: Final = frozenset(
    (
        Type.HELLO,
        Type.REGISTER,
        Type.RESET,
        Type.ERROR,
        Type.HELLO | ANSWER,
        Type.REGISTER | ANSWER,
        Type.STATS | ANSWER,
        Type.ERROR | ANSWER,
    )
)


class Code(enum.IntEnum):
    """The class of an error."""

    INTERNAL = 1
    BAD_FRAME = 2
    VERSION = 3
    TOO_LARGE = 4
    BAD_FIELD = 5
    UNAUTHORIZED = 6
    NOT_REGISTERED = 7
    RANK_TAKEN = 8
    UNKNOWN_HANDLE = 9
    UNKNOWN_LEASE = 10
    DOUBLE_RELEASE = 11
    NOT_RESERVED = 12
    DRAINING = 13
    UNKNOWN_NAMESPACE = 14
    BUSY = 15


class Reason(enum.IntEnum):
    """Why a page was not served, not stored or left the cache. A closed list."""

    NONE = 0
    ABSENT = 1
    LAYOUT = 2
    INCOMPLETE = 3
    NAMESPACE = 4
    CORRUPT = 5
    DEADLINE = 6
    PEER = 7
    PINNED = 8
    EXPIRED = 9
    UNREACHABLE = 10
    DRAINING = 11
    OVER_BUDGET = 32
    TOO_LARGE = 33
    RESET = 34
    QUARANTINED = 35
    REJECTED = 64
    CAPACITY = 65
    DROPPED = 66


def reason_name(number: int) -> str:
    """Return the stable name of a reason, also of one that is not known here."""
    try:
        return Reason(number).name.lower()
    except ValueError:
        return f"reason({number})"


class Store(enum.IntEnum):
    """What became of a page in a reserve or commit."""

    SLOT = 0
    EXISTS = 1
    REFUSED = 2
    STORED = 3


class Outcome(enum.IntEnum):
    """What a release says of the lease."""

    LIVE = 0
    EXPIRED = 1
    CORRUPT = 2


MATCH_LOCAL: Final = 1
MATCH_PRESENCE: Final = 2


class WireError(Exception):
    """What an error frame carries, or what is wrong with bytes that came.

    `code` is a number of `Code` (or one that a later sidecar made up), `field`
    the field at fault or "", `fatal` true where the connection cannot go on.
    """

    def __init__(self, code: int, field: str, message: str, fatal: bool = False) -> None:
        self.code = code
        self.field = field
        self.message = message
        self.fatal = fatal or code in (Code.BAD_FRAME, Code.VERSION)
        where = f"{field}: " if field else ""
        super().__init__(f"{self.name}: {where}{message}")

    @property
    def name(self) -> str:
        """The stable name of the code."""
        try:
            return Code(self.code).name.lower()
        except ValueError:
            return f"code({self.code})"


def _bad(field: str, message: str) -> WireError:
    return WireError(Code.BAD_FRAME, field, message, fatal=True)


class Header(NamedTuple):
    """The fixed part in front of a frame's body; `length` is the body's, in bytes."""

    type: int
    id: int
    length: int


def limit(frame_type: int) -> int:
    """Return the longest body of a frame type, in bytes."""
    if frame_type in (Type.PAGE, Type.WRITE):
        return MAX_OBJECT + PAGE_HEADER_SIZE
    if frame_type in _JSON_TYPES:
        return MAX_JSON
    if frame_type in (Type.PING, Type.STATS):
        return 0
    return MAX_CONTROL


def frame(frame_type: int, frame_id: int, *parts: bytes) -> bytes:
    """Return a whole frame. Raises WireError when the body is above its limit."""
    length = sum(map(len, parts))
    if length > limit(frame_type):
        raise WireError(
            Code.TOO_LARGE,
            "length",
            f"a body of {length} bytes is above {limit(frame_type)} for type {frame_type:#04x}",
        )
    return b"".join((_HEADER.pack(_MAGIC, VERSION, frame_type, 0, frame_id, length), *parts))


def parse_header(b: bytes | bytearray | memoryview) -> Header:
    """Decode the first HEADER_SIZE bytes of `b` and check magic, version, flags and limit."""
    if len(b) < HEADER_SIZE:
        raise _bad("header", f"{len(b)} bytes instead of {HEADER_SIZE}")
    magic, version, frame_type, flags, frame_id, length = _HEADER.unpack_from(b)
    if magic != _MAGIC:
        raise _bad("magic", f"{magic!r} is not {_MAGIC!r}")
    if version != VERSION:
        raise WireError(
            Code.VERSION, "version", f"{version} is not spoken here, {VERSION} is", True
        )
    if flags:
        raise _bad("flags", f"{flags:#06x} are not defined")
    if length > limit(frame_type):
        raise WireError(
            Code.TOO_LARGE,
            "length",
            f"a frame of type {frame_type:#04x} and {length} bytes is above {limit(frame_type)}",
            fatal=True,
        )
    return Header(frame_type, frame_id, length)


def pack_error(code: int, field: str, message: str) -> bytes:
    """Return the body of an error frame."""
    f = field.encode()[:_MAX_ERROR_FIELD]
    m = message.encode()[:_MAX_ERROR_MESSAGE]
    return _ERROR.pack(code, len(f), len(m)) + f + m


def parse_error(body: bytes) -> WireError:
    """Decode the body of an error frame."""
    if len(body) < _ERROR.size:
        raise _bad("error", "the message ends too early")
    code, nf, nm = _ERROR.unpack_from(body)
    if nf > _MAX_ERROR_FIELD or nm > _MAX_ERROR_MESSAGE:
        raise WireError(
            Code.TOO_LARGE, "error", f"a field of {nf} and a message of {nm} bytes", True
        )
    if len(body) != _ERROR.size + nf + nm:
        raise _bad("error", f"{len(body)} bytes do not hold {nf} and {nm}")
    text = bytes(body[_ERROR.size :])
    return WireError(code, text[:nf].decode(errors="replace"), text[nf:].decode(errors="replace"))


def pack_json(value: object) -> bytes:
    """Return a JSON body without blanks, keys in the order given."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def parse_json(body: bytes) -> dict[str, Any]:
    """Decode a JSON body, which must be one object."""
    try:
        value = json.loads(bytes(body)) if len(body) else {}
    except (ValueError, RecursionError) as e:
        raise _bad("json", str(e)) from e
    if not isinstance(value, dict):
        raise _bad("json", f"a {type(value).__name__} instead of an object")
    return value


def tokens(ids: npt.ArrayLike) -> bytes:
    """Return token ids in wire form: four bytes each.

    Raises OverflowError for an id below 0 or above 2**32 - 1.
    """
    return np.asarray(ids, dtype="<u4").tobytes()


def _text(value: str | None, name: str) -> bytes:
    if value is None:
        return _ABSENT.to_bytes(2, "little")
    b = value.encode()
    if len(b) > MAX_SALT:
        raise WireError(Code.TOO_LARGE, name, f"{len(b)} bytes are more than {MAX_SALT}")
    return len(b).to_bytes(2, "little") + b


def _count(ids: bytes) -> bytes:
    n, rest = divmod(len(ids), 4)
    if rest:
        raise WireError(Code.BAD_FIELD, "tokens", f"{len(ids)} bytes are not a whole number of ids")
    if n > MAX_TOKENS:
        raise WireError(Code.TOO_LARGE, "tokens", f"{n} tokens are more than {MAX_TOKENS}")
    return n.to_bytes(4, "little")


def pack_match(
    held: int,
    deadline_us: int,
    lease_ms: int,
    ids: bytes,
    extra_key: str | None = None,
    salt: str | None = None,
    flags: int = 0,
) -> bytes:
    """Return the body of a match.

    `held` counts tokens that the engine already has, `deadline_us` runs from
    arrival, `ids` are tokens in wire form.
    """
    head = _MATCH.pack(held, deadline_us, lease_ms, flags)
    return b"".join(
        (head, _text(extra_key, "extra_key"), _text(salt, "cache_salt"), _count(ids), ids)
    )


def pack_match_hashes(deadline_us: int, lease_ms: int, hashes: bytes, flags: int = 0) -> bytes:
    """Return the body of a match of pages that are named by `hashes`, 32 bytes each."""
    n, rest = divmod(len(hashes), HASH_SIZE)
    if rest:
        raise WireError(
            Code.BAD_FIELD, "hashes", f"{len(hashes)} bytes are not a whole number of hashes"
        )
    if n > MAX_BATCH:
        raise WireError(Code.TOO_LARGE, "hashes", f"{n} hashes are more than {MAX_BATCH}")
    return _MATCH_HASHES.pack(deadline_us, lease_ms, flags, 0, n) + hashes


@dataclass
class Leased:
    """The answer to a match or a lease.

    `locations` has shape [pages, shards] of LOCATION, or [0, shards] when
    nothing is leased. `reason` says why the page after the last is missing.
    """

    handle: int
    lease: int
    lease_ms: int
    first: int
    pages: int
    chain_pages: int
    from_peers: int
    shards: int
    reason: int
    locations: Records = field(repr=False)


def parse_leased(body: bytes) -> Leased:
    """Decode the answer to a match or a lease; the locations are a copy."""
    if len(body) < _LEASED.size:
        raise _bad("leased", "the message ends too early")
    handle, lease, ms, first, pages, chain, peers, shards, reason, _ = _LEASED.unpack_from(body)
    n = pages * shards if lease else 0
    if pages > MAX_BATCH or shards > MAX_SHARDS:
        raise WireError(Code.TOO_LARGE, "pages", f"{pages} pages of {shards} shards", fatal=True)
    if len(body) != _LEASED.size + n * LOCATION.itemsize:
        raise _bad("locations", f"{len(body)} bytes do not hold {pages} pages of {shards} shards")
    at = np.frombuffer(body, LOCATION, n, _LEASED.size).copy()
    at = at.reshape(pages if lease else 0, shards)
    return Leased(handle, lease, ms, first, pages, chain, peers, shards, reason, at)


def pack_extend(handle: int, ids: bytes) -> bytes:
    """Return the body of an extend; `ids` are tokens in wire form."""
    _count(ids)
    return _EXTEND.pack(handle, len(ids) // 4) + ids


def parse_u32(body: bytes) -> int:
    """Decode an answer of four bytes."""
    if len(body) != 4:
        raise _bad("answer", f"{len(body)} bytes instead of 4")
    return int.from_bytes(body, "little")


def pack_lease(
    handle: int, first: int, pages: int, deadline_us: int, lease_ms: int, flags: int = 0
) -> bytes:
    """Return the body of a lease: at most `pages` pages of a chain, from `first` on."""
    return _LEASE.pack(handle, first, pages, deadline_us, lease_ms, flags)


def pack_release(lease: int, verify: bool = False) -> bytes:
    """Return the body of a release; `verify` asks for one more check of the bytes."""
    return _RELEASE.pack(lease, verify)


def parse_outcome(body: bytes) -> Outcome:
    """Decode the answer to a release."""
    if len(body) != 1 or body[0] > Outcome.CORRUPT:
        raise _bad("release", f"{bytes(body[:8])!r} is not an outcome")
    return Outcome(body[0])


def _check_batch(n: int, name: str) -> bytes:
    if n > MAX_BATCH:
        raise WireError(Code.TOO_LARGE, name, f"{n} pages are more than {MAX_BATCH}")
    return n.to_bytes(4, "little")


def pack_reserve(handle: int, pages: npt.ArrayLike) -> bytes:
    """Return the body of a reserve of pages of one chain."""
    index = np.asarray(pages, dtype="<u4")
    refs = np.empty(len(index), _REF)
    refs["handle"], refs["page"] = handle, index
    return _check_batch(len(refs), "pages") + refs.tobytes()


def parse_reservations(body: bytes) -> Records:
    """Decode the answer to a reserve: records with status, reason and slot."""
    if len(body) % _RESERVATION.itemsize:
        raise _bad("reservations", f"{len(body)} bytes are not a whole number of eight")
    return np.frombuffer(bytes(body), _RESERVATION)


def pack_commit(handle: int, pages: npt.ArrayLike, slots: npt.ArrayLike) -> bytes:
    """Return the body of a commit of pages of one chain, written to `slots`."""
    index = np.asarray(pages, dtype="<u4")
    commits = np.empty(len(index), _COMMIT)
    commits["handle"], commits["page"], commits["slot"] = handle, index, np.asarray(slots, "<u4")
    return _check_batch(len(commits), "commits") + commits.tobytes()


def parse_committed(body: bytes) -> Records:
    """Decode the answer to a commit or write: records with status, reason and sum."""
    if len(body) % _COMMITTED.itemsize:
        raise _bad("committed", f"{len(body)} bytes are not a whole number of sixteen")
    return np.frombuffer(bytes(body), _COMMITTED)


def pack_handle(handle: int) -> bytes:
    """Return the body of a drop."""
    return handle.to_bytes(8, "little")


def pack_read(lease: int, first: int, pages: int) -> bytes:
    """Return the body of a read; `first` counts from the lease's first page."""
    return _READ.pack(lease, first, pages)


def pack_write_header(handle: int, page: int) -> bytes:
    """Return the fixed part of a write's body; the object follows it."""
    return _WRITE.pack(handle, page, 0)


@dataclass(frozen=True)
class Page:
    """One page frame: its place in the request, its shard, and its bytes."""

    index: int
    shard: int
    shards: int
    reason: int
    sum: int
    object: memoryview


def parse_page(body: bytes) -> Page:
    """Decode the body of a page frame; the object is a view of `body`."""
    if len(body) < PAGE_HEADER_SIZE:
        raise _bad("page", "the message ends too early")
    index, shard, shards, reason, zero, _, length, checksum, _, tail = _PAGE.unpack_from(body)
    if any(zero) or any(tail):
        raise _bad("page", "a reserved byte is not zero")
    if length != len(body) - PAGE_HEADER_SIZE:
        raise _bad("length", f"a body of {len(body)} bytes cannot hold an object of {length}")
    if not 0 < shards <= MAX_SHARDS or shard >= shards:
        raise WireError(Code.BAD_FIELD, "shard", f"{shard} of {shards} is not a shard", fatal=True)
    if reason and length:
        raise WireError(
            Code.BAD_FIELD, "reason", f"a missed page carries {length} bytes", fatal=True
        )
    return Page(index, shard, shards, reason, checksum, memoryview(body)[PAGE_HEADER_SIZE:])


@dataclass(frozen=True)
class Model:
    """Everything per engine that changes what the numbers in a page mean.

    `layers`, `kv_heads` and `head_size` are those of the whole model.
    """

    weights_id: str
    dtype: str
    rope: str
    layers: int
    kv_heads: int
    head_size: int
    quantization: str = ""
    scales: str = ""
    mla: bool = False
    kv_epoch: str = ""


@dataclass(frozen=True)
class Descriptor:
    """How the bytes of one rank's shard are laid out.

    `block_tokens` is the engine's block; `block_bytes` one block of this
    shard, all its layers. `layer_window` and `head_window` are half open.
    """

    layout: str
    dtype: str
    block_tokens: int
    block_bytes: int
    layer_window: tuple[int, int]
    head_window: tuple[int, int]
    packing: str = ""
    axes: tuple[str, ...] = ()
    strides: tuple[int, ...] = ()
    tp_size: int = 1
    pp_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0

    @property
    def shard(self) -> int:
        """The rank's place among the shards of a page."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def shards(self) -> int:
        """How many shards a page has."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True)
class Register:
    """What an engine's process says of itself. `role`: scheduler, worker or both.

    `page_tokens` is what an engine that hashes its pages itself has in one; 0
    leaves it to the sidecar.
    """

    engine: str
    role: str
    model: Model
    descriptor: Descriptor
    inbox_slots: int = 0
    inline: bool = False
    page_tokens: int = 0

    def pack(self) -> bytes:
        """Return the body of a register."""
        m, d = self.model, self.descriptor
        return pack_json(
            {
                "engine": self.engine,
                "role": self.role,
                "model": {
                    "weights_id": m.weights_id,
                    "dtype": m.dtype,
                    "quantization": m.quantization,
                    "scales": m.scales,
                    "rope": m.rope,
                    "layers": m.layers,
                    "kv_heads": m.kv_heads,
                    "head_size": m.head_size,
                    "mla": m.mla,
                    "kv_epoch": m.kv_epoch,
                },
                "descriptor": {
                    "layout": d.layout,
                    "dtype": d.dtype,
                    "packing": d.packing,
                    "block_tokens": d.block_tokens,
                    "block_bytes": d.block_bytes,
                    "axes": list(d.axes),
                    "strides": list(d.strides),
                    "tp_size": d.tp_size,
                    "pp_size": d.pp_size,
                    "tp_rank": d.tp_rank,
                    "pp_rank": d.pp_rank,
                    "layers": list(d.layer_window),
                    "heads": list(d.head_window),
                },
                "inbox_slots": self.inbox_slots,
                "inline": self.inline,
                **({"page_tokens": self.page_tokens} if self.page_tokens else {}),
            }
        )


@dataclass(frozen=True)
class Registered:
    """The sidecar's answer to a register; sizes in bytes, `page_tokens` in tokens."""

    namespace: str
    form: str
    page_tokens: int
    object_bytes: int
    tenant: str
    shared_memory: bool
    arena_bytes: int
    inbox_bytes: int
    inbox_slots: int
    slot_bytes: int
    max_lease_ms: int


def parse_registered(body: bytes) -> Registered:
    """Decode and check the answer to a register."""
    v = parse_json(body)
    try:
        r = Registered(
            namespace=str(v["namespace"]),
            form=str(v["form"]),
            page_tokens=int(v["page_tokens"]),
            object_bytes=int(v["object_bytes"]),
            tenant=str(v.get("tenant", "")),
            shared_memory=bool(v.get("shared_memory", False)),
            arena_bytes=int(v.get("arena_bytes", 0)),
            inbox_bytes=int(v.get("inbox_bytes", 0)),
            inbox_slots=int(v.get("inbox_slots", 0)),
            slot_bytes=int(v.get("slot_bytes", 0)),
            max_lease_ms=int(v.get("max_lease_ms", 0)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise _bad("registered", f"{type(e).__name__}: {e}") from e
    if r.page_tokens < 1 or not 0 < r.object_bytes <= MAX_OBJECT:
        raise _bad("registered", f"{r.page_tokens} tokens in {r.object_bytes} bytes")
    if min(r.arena_bytes, r.inbox_bytes, r.inbox_slots, r.slot_bytes) < 0:
        raise _bad("registered", "a negative size")
    return r
