"""Frames and messages against bytes written out by hand from docs/protocol.md."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers import registration
from membrane_kv import wire
from membrane_kv.wire import Code, Reason, Type, WireError


def hexed(text: str) -> bytes:
    return bytes.fromhex("".join(text.split()))


PACKED = {
    "ping": (
        wire.frame(Type.PING, 7),
        "4d42524e 01 03 0000 07000000 00000000",
    ),
    "hello": (
        wire.frame(Type.HELLO, 1, wire.pack_json({"key": "k", "client": "c"})),
        "4d42524e 01 01 0000 01000000 18000000" + b'{"key":"k","client":"c"}'.hex(),
    ),
    "match without scope": (
        wire.pack_match(64, 500_000, 10_000, wire.tokens([1, 2, 0xFFFFFFFF])),
        "40000000 20a10700 10270000 0000 ffff ffff 03000000 01000000 02000000 ffffffff",
    ),
    "match with scope": (
        wire.pack_match(
            0, 1, 2, wire.tokens([9]), "ad", "", wire.MATCH_LOCAL | wire.MATCH_PRESENCE
        ),
        "00000000 01000000 02000000 0300 0200 6164 0000 01000000 09000000",
    ),
    "match by hashes": (
        wire.pack_match_hashes(500_000, 10_000, b"\1" * 32 + b"\2" * 32, wire.MATCH_LOCAL),
        "20a10700 10270000 0100 0000 02000000" + "01" * 32 + "02" * 32,
    ),
    "extend": (
        wire.pack_extend(0x0102030405060708, wire.tokens([5, 6])),
        "0807060504030201 02000000 05000000 06000000",
    ),
    "lease": (
        wire.pack_lease(3, 4, 5, 6, 7, wire.MATCH_LOCAL),
        "0300000000000000 04000000 05000000 06000000 07000000 0100",
    ),
    "release": (wire.pack_release(0xAB, True), "ab00000000000000 01"),
    "reserve": (
        wire.pack_reserve(2, [0, 7]),
        "02000000 0200000000000000 00000000 0200000000000000 07000000",
    ),
    "commit": (
        wire.pack_commit(2, [1], [9]),
        "01000000 0200000000000000 01000000 09000000",
    ),
    "drop": (wire.pack_handle(1), "0100000000000000"),
    "read": (wire.pack_read(1, 2, 3), "0100000000000000 02000000 03000000"),
    "write": (wire.pack_write_header(1, 2), "0100000000000000 02000000 00000000"),
    "error": (
        wire.pack_error(Code.BAD_FIELD, "held", "no"),
        "0500 0400 0200 68656c64 6e6f",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    packed, want = PACKED[name]
    assert packed == hexed(want)


def test_register_has_every_field_of_the_protocol() -> None:
    assert json.loads(registration().pack()) == {
        "engine": "e",
        "role": "worker",
        "model": {
            "weights_id": "w1",
            "dtype": "float32",
            "quantization": "",
            "scales": "",
            "rope": "base=10000",
            "layers": 2,
            "kv_heads": 2,
            "head_size": 32,
            "mla": False,
            "kv_epoch": "",
        },
        "descriptor": {
            "layout": "vllm-lbhnc",
            "dtype": "float32",
            "packing": "vec",
            "block_tokens": 32,
            "block_bytes": 1024,
            "axes": [],
            "strides": [],
            "tp_size": 1,
            "pp_size": 1,
            "tp_rank": 0,
            "pp_rank": 0,
            "layers": [0, 2],
            "heads": [0, 2],
        },
        "inbox_slots": 4,
        "inline": False,
    }


LEASED = """0900000000000000 0800000000000000 10270000 01000000
    02000000 05000000 01000000 0200 01 00
    0000000000000000 0004000000000000 0100000000000000
    0010000000000000 0004000000000000 0200000000000000
    0020000000000000 0004000000000000 0300000000000000
    0030000000000000 0004000000000000 ffffffffffffffff"""


def test_leased() -> None:
    got = wire.parse_leased(hexed(LEASED))
    assert (got.handle, got.lease, got.lease_ms, got.first) == (9, 8, 10_000, 1)
    assert (got.pages, got.chain_pages, got.from_peers, got.shards) == (2, 5, 1, 2)
    assert got.reason == Reason.ABSENT
    assert got.locations.shape == (2, 2)
    assert got.locations["offset"].tolist() == [[0, 0x1000], [0x2000, 0x3000]]
    assert got.locations["length"].tolist() == [[1024, 1024], [1024, 1024]]
    assert got.locations["sum"].tolist() == [[1, 2], [3, 2**64 - 1]]


def test_leased_without_lease_has_no_locations() -> None:
    head = hexed(LEASED)[:40]
    got = wire.parse_leased(head[:8] + bytes(8) + head[16:])
    assert (got.lease, got.pages, got.locations.shape) == (0, 2, (0, 2))


def test_reservations_and_committed() -> None:
    got = wire.parse_reservations(hexed("00 00 0000 05000000 02 20 0000 00000000"))
    assert got["status"].tolist() == [wire.Store.SLOT, wire.Store.REFUSED]
    assert got["reason"].tolist() == [0, Reason.OVER_BUDGET]
    assert got["slot"].tolist() == [5, 0]
    done = wire.parse_committed(hexed("03 00 000000000000 efcdab8967452301"))
    assert done["status"].tolist() == [wire.Store.STORED]
    assert done["sum"].tolist() == [0x0123456789ABCDEF]


PAGE = """02000000 0100 0200 00 00000000000000 1112131415161718 0300000000000000 0400000000000000
    00000000000000000000000000000000 0000000000000000 616263"""


def test_page() -> None:
    got = wire.parse_page(hexed(PAGE))
    assert (got.index, got.shard, got.shards, got.reason, got.sum) == (2, 1, 2, 0, 4)
    assert bytes(got.object) == b"abc"


def test_error_frame_keeps_unknown_codes() -> None:
    e = wire.parse_error(hexed("6300 0000 0200 6e6f"))
    assert (e.code, e.field, e.message, e.name, e.fatal) == (99, "", "no", "code(99)", False)
    assert str(wire.parse_error(wire.pack_error(5, "held", "no"))) == "bad_field: held: no"
    assert wire.parse_error(wire.pack_error(3, "version", "2")).fatal


HEADER = "4d42524e 01 03 0000 07000000 00000000"
BROKEN_HEADERS = {
    "short": (HEADER[:-2], Code.BAD_FRAME, "header"),
    "magic": (HEADER.replace("4d", "4e", 1), Code.BAD_FRAME, "magic"),
    "version": (HEADER.replace(" 01 03", " 02 03"), Code.VERSION, "version"),
    "flags": (HEADER.replace(" 0000 ", " 0001 "), Code.BAD_FRAME, "flags"),
    "length": (
        HEADER.replace(" 07000000 00000000", " 07000000 01000000"),
        Code.TOO_LARGE,
        "length",
    ),
}


@pytest.mark.parametrize("name", BROKEN_HEADERS)
def test_broken_header(name: str) -> None:
    text, code, field = BROKEN_HEADERS[name]
    with pytest.raises(WireError) as e:
        wire.parse_header(hexed(text))
    assert (e.value.code, e.value.field, e.value.fatal) == (code, field, True)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (Type.PING, 0),
        (Type.HELLO, 64 << 10),
        (Type.STATS | 0x80, 64 << 10),
        (Type.ERROR | 0x80, 64 << 10),
        (Type.MATCH, 8 << 20),
        (Type.MATCH | 0x80, 8 << 20),
        (Type.PAGE, (256 << 20) + 64),
        (Type.WRITE, (256 << 20) + 64),
    ],
)
def test_frame_limits(kind: int, limit: int) -> None:
    at_limit = hexed("4d42524e 01") + bytes([kind]) + bytes(6) + limit.to_bytes(4, "little")
    assert wire.parse_header(at_limit) == (kind, 0, limit)
    above = at_limit[:12] + (limit + 1).to_bytes(4, "little")
    with pytest.raises(WireError, match="too_large: length"):
        wire.parse_header(above)


def test_packing_refuses_what_is_above_a_limit() -> None:
    wire.pack_match(0, 0, 0, bytes(4 * wire.MAX_TOKENS), "e" * wire.MAX_SALT)
    with pytest.raises(WireError, match="too_large: tokens"):
        wire.pack_match(0, 0, 0, bytes(4 * wire.MAX_TOKENS + 4))
    with pytest.raises(WireError, match="too_large: cache_salt"):
        wire.pack_match(0, 0, 0, b"", None, "s" * (wire.MAX_SALT + 1))
    with pytest.raises(WireError, match="bad_field: tokens"):
        wire.pack_extend(0, b"abc")
    assert len(wire.pack_reserve(0, range(wire.MAX_BATCH))) == 4 + 12 * wire.MAX_BATCH
    with pytest.raises(WireError, match="too_large: pages"):
        wire.pack_reserve(0, range(wire.MAX_BATCH + 1))
    assert len(wire.pack_match_hashes(0, 0, bytes(32 * wire.MAX_BATCH))) == 16 + 32 * wire.MAX_BATCH
    with pytest.raises(WireError, match="too_large: hashes"):
        wire.pack_match_hashes(0, 0, bytes(32 * (wire.MAX_BATCH + 1)))
    with pytest.raises(WireError, match="bad_field: hashes"):
        wire.pack_match_hashes(0, 0, bytes(33))
    with pytest.raises(WireError, match="too_large: length"):
        wire.frame(Type.HELLO, 0, bytes(wire.MAX_JSON + 1))


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_token_ids_out_of_range(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        wire.tokens(ids)


PARSERS = {
    "header": (wire.parse_header, hexed(HEADER)),
    "error": (wire.parse_error, wire.pack_error(5, "held", "no")),
    "leased": (wire.parse_leased, hexed(LEASED)),
    "reservations": (wire.parse_reservations, bytes(16)),
    "committed": (wire.parse_committed, bytes(32)),
    "page": (wire.parse_page, hexed(PAGE)),
    "outcome": (wire.parse_outcome, b"\0"),
    "u32": (wire.parse_u32, bytes(4)),
    "json": (wire.parse_json, b'{"a":1}'),
    "registered": (
        wire.parse_registered,
        b'{"namespace":"","form":"","page_tokens":1,"object_bytes":1}',
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_parsers_refuse_noise_with_a_wire_error(name: str) -> None:
    """Cut, lengthen and change good bytes: every parser returns or raises WireError."""
    parse, good = PARSERS[name]
    parse(good)
    rng = np.random.default_rng(1)
    for i in range(3000):
        b = bytearray(good)
        for at in rng.integers(0, len(b), 1 + i % 3):
            b[at] = rng.integers(256)
        b = b[: rng.integers(len(b) + 1)] if i % 2 else b + bytes(int(rng.integers(3)))
        try:
            parse(bytes(b))
        except WireError as e:
            assert e.code and e.name


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity", "NaN"])
def test_sizes_that_are_no_whole_numbers_are_refused(number: str) -> None:
    body = f'{{"namespace":"","form":"","page_tokens":1,"object_bytes":1,"arena_bytes":{number}}}'
    with pytest.raises(WireError, match="bad_frame: registered"):
        wire.parse_registered(body.encode())
