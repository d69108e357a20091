"""Make vectors.json: what docs/protocol.md says, written a second time.

Shares no code with the Go package, so that both are wrong only if both were
written wrong in the same way. Needs the package xxhash.

    python3 kvwire/testdata/make_vectors.py kvwire/testdata/vectors.json
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import sys
from typing import Any

import xxhash

CLUSTER_KEY = b"0123456789abcdef0123456789abcdef"
ABSENT = 0xFFFF


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def chain(tokens: list[int], page: int, seed: bytes | None) -> list[str]:
    digest = seed or b""
    hashes = []
    for begin in range(0, len(tokens), page):
        body = b"".join(u32(token) for token in tokens[begin : begin + page])
        digest = hashlib.sha256(digest + body).digest()
        hashes.append(digest.hex())
    return hashes


def scope_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    if extra_key is None and cache_salt is None:
        return None
    body = b"sglang-cache-namespace-v1"
    for part in (extra_key, cache_salt):
        if part is None:
            body += b"\0"
        else:
            text = part.encode()
            body += b"\1" + struct.pack("<Q", len(text)) + text
    return hashlib.sha256(body).digest()


def digest_fields(domain: str, *fields: str) -> bytes:
    body = domain.encode() + b"\0"
    for field in fields:
        body += u32(len(field.encode())) + field.encode()
    return hashlib.sha256(body).digest()


def namespace(model: dict[str, Any], page_tokens: int) -> bytes:
    return digest_fields(
        "membrane-namespace-v1",
        model["weights_id"],
        model["dtype"],
        model["quantization"],
        model["scales"],
        model["rope"],
        str(model["layers"]),
        str(model["kv_heads"]),
        str(model["head_size"]),
        "true" if model["mla"] else "false",
        str(page_tokens),
        model["kv_epoch"],
    )


def form(descriptor: dict[str, Any]) -> bytes:
    fields = [descriptor[name] for name in ("layout", "dtype", "packing")]
    fields += [str(descriptor[name]) for name in ("block_tokens", "tp_size", "pp_size")]
    fields += axes(descriptor)
    for scales in descriptor.get("scales", []):
        fields += ["scales", scales["per"], scales["dtype"], str(scales.get("offset", 0))]
        fields += axes(scales)
    if group := descriptor.get("group"):
        fields.append("group=" + group)
    return digest_fields("membrane-form-v1", *fields)[:8]


def axes(described: dict[str, Any]) -> list[str]:
    pairs = zip(described.get("axes", []), described.get("strides", []), strict=True)
    return [field for axis, stride in pairs for field in (axis, str(stride))]


def frame(kind: int, ident: int, body: bytes) -> str:
    return (b"MBRN" + struct.pack("<BBHII", 1, kind, 0, ident, len(body)) + body).hex()


def chains() -> list[dict[str, Any]]:
    one_to_sixteen = list(range(1, 17))
    cases: list[tuple[str, list[int], int, str | None, str | None]] = [
        ("two pages", list(range(1, 33)), 16, None, None),
        ("short last page", list(range(1, 21)), 16, None, None),
        ("four-token pages", [128000, 9906, 1917, 0] * 4, 4, None, None),
        ("extra key", one_to_sixteen, 16, "tenantA", None),
        ("salt", one_to_sixteen, 16, None, "tenantA"),
        ("both", one_to_sixteen, 16, "a", "b"),
        ("empty salt is not no salt", one_to_sixteen, 16, None, ""),
        ("largest id", [4294967295], 1, None, None),
    ]
    out = []
    for name, tokens, page, extra_key, cache_salt in cases:
        seed = scope_seed(extra_key, cache_salt)
        out.append(
            {
                "name": name,
                "tokens": tokens,
                "page_tokens": page,
                "extra_key": extra_key,
                "cache_salt": cache_salt,
                "seed": seed.hex() if seed else None,
                "hashes": chain(tokens, page, seed),
            }
        )
    return out


def names() -> dict[str, Any]:
    model = {
        "weights_id": "sha256:00",
        "dtype": "float32",
        "quantization": "",
        "scales": "",
        "rope": "base=10000",
        "layers": 12,
        "kv_heads": 4,
        "head_size": 64,
        "mla": False,
        "kv_epoch": "",
    }
    quantized = model | {"mla": True, "quantization": "fp8_e4m3", "scales": "s1", "kv_epoch": "2"}
    packed = {
        "layout": "vllm-lbhnc",
        "dtype": "float32",
        "packing": "vec",
        "block_tokens": 32,
        "block_bytes": 786432,
        "axes": [],
        "strides": [],
        "tp_size": 1,
        "pp_size": 1,
        "tp_rank": 0,
        "pp_rank": 0,
        "layers": [0, 12],
        "heads": [0, 4],
    }
    canonical = packed | {
        "layout": "canonical",
        "packing": "",
        "block_tokens": 64,
        "axes": ["layer", "kv", "head", "token", "dim"],
        "strides": [131072, 65536, 16384, 256, 4],
        "tp_size": 2,
        "tp_rank": 1,
    }
    scaled = packed | {
        "dtype": "int8",
        "packing": "",
        "block_bytes": 221280,
        "scales": [
            {"per": "tensor", "dtype": "float32"},
            {
                "per": "token_head",
                "dtype": "float32",
                "offset": 196704,
                "axes": ["layer", "kv", "head", "token"],
                "strides": [2048, 512, 128, 4],
            },
        ],
    }
    opaque = packed | {"layout": "vllm-mamba", "packing": "", "group": "mamba"}
    return {
        "namespaces": [
            {"model": m, "page_tokens": p, "namespace": namespace(m, p).hex()}
            for m, p in ((model, 64), (quantized, 128))
        ],
        "forms": [
            {"descriptor": d, "form": form(d).hex()} for d in (packed, canonical, scaled, opaque)
        ],
    }


def frames(vectors: dict[str, Any], content: bytes) -> dict[str, str]:
    page_hash = bytes.fromhex(vectors["chains"][0]["hashes"][0])
    space = bytes.fromhex(vectors["namespaces"][0]["namespace"])
    layout = bytes.fromhex(vectors["forms"][0]["form"])
    auth = bytes.fromhex(vectors["authenticators"][0]["authenticator"])
    checksum = xxhash.xxh3_64_intdigest(content)
    match = struct.pack("<IIIHHH", 32, 50000, 10000, 0, ABSENT, 4) + b"salt"
    match += u32(3) + u32(1) + u32(2) + u32(4294967295)
    leased = struct.pack("<QQIIIIIHBB", 7, 9, 10000, 1, 1, 3, 1, 2, 1, 0)
    leased += struct.pack("<QQQQQQ", 4096, 100, 5, 8192, 100, 6)
    page = struct.pack("<IHHB7x", 3, 1, 2, 0) + layout
    page += struct.pack("<QQ", len(content), checksum) + auth + b"\0" * 8 + content
    asker = b"\1" * 32 + struct.pack("<H", 1) + b"a"
    answerer = b"\2" * 32 + struct.pack("<H", 1) + b"b"

    def proof(side: bytes) -> bytes:
        body = b"membrane-peer-v1\0" + side + b"\0" + asker + answerer
        return hmac.new(CLUSTER_KEY, body, hashlib.sha256).digest()

    batch = u32(50000) + layout + space + struct.pack("<H", 4) + b"acme" + u32(1) + page_hash
    model = b"m"
    manifest = space + layout + struct.pack("<qqIHHII", 1000, 2000, 16, len(model), 3, 20, 5)
    manifest += model + b"n-1" + b"".join(u32(t) for t in range(1, 21)) + b"state"
    manifest_auth = hmac.new(CLUSTER_KEY, b"membrane-manifest-v1\0acme\0" + manifest, hashlib.sha256).digest()
    reserved = struct.pack("<BBHI", 0, 0, 0, 5) + struct.pack("<BBHI", 2, 32, 0, 0)
    return {
        "ping": frame(0x03, 1, b""),
        "match": frame(0x04, 2, match),
        "match_hashes": frame(
            0x0F, 11, struct.pack("<IIHHI", 50000, 10000, 1, 0, 2) + page_hash + b"\0" * 32
        ),
        "leased": frame(0x84, 2, leased),
        "error": frame(0xFF, 2, struct.pack("<HHH", 5, 6, 4) + b"tokens" + b"oops"),
        "extend": frame(0x05, 3, struct.pack("<QIII", 7, 2, 8, 9)),
        "lease": frame(0x06, 4, struct.pack("<QIIIIH", 7, 1, 2, 50000, 10000, 1)),
        "release": frame(0x07, 5, struct.pack("<QB", 9, 1)),
        "reserve": frame(0x08, 6, u32(2) + struct.pack("<QI", 7, 0) + struct.pack("<QI", 7, 1)),
        "reserve_answer": frame(0x88, 6, reserved),
        "commit": frame(0x09, 7, u32(1) + struct.pack("<QII", 7, 0, 5)),
        "commit_answer": frame(0x89, 7, struct.pack("<BB6xQ", 3, 0, checksum)),
        "drop": frame(0x0A, 8, struct.pack("<Q", 7)),
        "read": frame(0x0D, 9, struct.pack("<QII", 9, 0, 1)),
        "write": frame(0x0E, 10, struct.pack("<QII", 7, 2, 0) + b"object"),
        "page": frame(0x40, 9, page),
        "challenge": frame(0x20, 1, asker),
        "challenge_answer": frame(0xA0, 1, proof(b"answerer") + answerer),
        "proof": frame(0x21, 2, proof(b"asker")),
        "batch_read": frame(0x22, 3, batch),
        "check": frame(0x24, 3, batch),
        "forms": frame(0x28, 5, space),
        "manifest_request": frame(0x25, 4, b"\1" + page_hash + struct.pack("<H", 4) + b"acme"),
        "manifest_answer": frame(0xA5, 4, manifest_auth + manifest),
        "manifest_wait": frame(0x25, 5, b"\2" + page_hash + struct.pack("<H", 4) + b"acme" + u32(50000)),
        "await": frame(0x26, 6, batch),
        "await_answer": frame(0xA6, 6, u32(1) + struct.pack("<Q", 9)),
        "queues_answer": frame(0xA7, 7, u32(3) + u32(4)),
    }


def handle(space: bytes, model: str, tokens: list[int], page: int) -> str:
    last = bytes.fromhex(chain(tokens, page, None)[-1])
    body = b"membrane-handle-v1\0" + space + u32(page) + u32(len(tokens)) + model.encode() + b"\0"
    return hashlib.sha256(body + last).hexdigest()


def authenticator(vectors: dict[str, Any], content: bytes) -> dict[str, Any]:
    page_hash = vectors["chains"][0]["hashes"][0]
    space = vectors["namespaces"][0]["namespace"]
    layout = vectors["forms"][0]["form"]
    checksum = xxhash.xxh3_64_intdigest(content)
    tenant = b"acme"
    body = b"membrane-object-v1\0" + struct.pack("<Q", len(tenant)) + tenant
    body += bytes.fromhex(space) + bytes.fromhex(page_hash) + struct.pack("<HH", 1, 2)
    body += bytes.fromhex(layout) + struct.pack("<QQ", len(content), checksum)
    return {
        "cluster_key_hex": CLUSTER_KEY.hex(),
        "tenant": tenant.decode(),
        "namespace": space,
        "hash": page_hash,
        "shard_index": 1,
        "shard_count": 2,
        "form": layout,
        "length": len(content),
        "checksum": f"{checksum:016x}",
        "authenticator": hmac.new(CLUSTER_KEY, body, hashlib.sha256).digest()[:16].hex(),
    }


def main() -> None:
    content = bytes(range(256)) * 4
    vectors: dict[str, Any] = {"chains": chains(), **names()}
    vectors["checksums"] = [
        {"object_hex": b.hex(), "checksum": f"{xxhash.xxh3_64_intdigest(b):016x}"}
        for b in (b"", content)
    ]
    vectors["authenticators"] = [authenticator(vectors, content)]
    space = bytes.fromhex(vectors["namespaces"][0]["namespace"])
    vectors["handles"] = [handle(space, "m", list(range(1, n + 1)), 16) for n in (32, 20)]
    vectors["frames"] = frames(vectors, content)
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(vectors, out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main()
