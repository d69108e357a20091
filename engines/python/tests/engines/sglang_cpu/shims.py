"""What SGLang 0.5.23 has no CPU version of, so that it runs here with its hierarchical cache.

Three things, and nothing else of SGLang is changed:

* the rotary embedding, which SGLang imports from vLLM where it runs without its
  own kernels;
* the copies between device pool and host pool, which come with its CUDA kernels.
  Its pools look their names up when they copy, so they are made builtins;
* pinning of the host pool, and the 10 GiB of host memory that it leaves free.

Streams and events of torch's CPU device do nothing, so every copy has ended when
it returns: a copy that is read too early cannot show here.
"""

from __future__ import annotations

import builtins
import ctypes
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

HOST_MEMORY_RESERVE = 1 << 30


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    *_: Any,
) -> None:
    """Rotate queries and keys in place; `cos_sin_cache` has shape [positions, 2, dim / 2]."""
    tokens = positions.numel()
    table = cos_sin_cache[positions.reshape(-1)].float().unsqueeze(1)
    cos, sin = table.chunk(2, -1)
    width = table.shape[-1]
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(tokens, -1, head_size)[..., :width]
        halves = heads.float().unflatten(-1, (2, -1) if is_neox else (-1, 2))
        axis = -2 if is_neox else -1
        a, b = halves.select(axis, 0), halves.select(axis, 1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis)
        heads.copy_(turned.flatten(-2))


def _rows(pointer: int, rows: int, size: int) -> torch.Tensor:
    """Return `rows` rows of `size` bytes that begin at an address."""
    memory = (ctypes.c_uint8 * (rows * size)).from_address(pointer)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, size)


def _picked(pointers: torch.Tensor, index: torch.Tensor, size: int) -> Iterable[torch.Tensor]:
    """Yield the rows that `index` names of each layer's buffer, as bytes [rows, size]."""
    most = int(index.max()) + 1
    for pointer in pointers.tolist():
        yield _rows(pointer, most, size)[index]


def _as_bytes(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    return tensor.view(torch.uint8).view(*shape)


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Between two pools by layers, tokens first."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
) -> None:
    """One layer, tokens first on both sides."""
    transfer_kv_direct((src_k, src_v), (dst_k, dst_v), src_indices, dst_indices, 1)


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """Every layer by the addresses of its buffers."""
    most = int(dst_indices.max()) + 1
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        picked = _picked(sources, src_indices, item_size)
        for rows, pointer in zip(picked, targets.tolist(), strict=True):
            _rows(pointer, most, item_size)[dst_indices] = rows


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """From layers to [token, layer, head, dim]."""
    assert dst_layout_dim == num_layers * item_size
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        into = _as_bytes(target, -1, num_layers, item_size)
        for layer, rows in enumerate(_picked(sources, src_indices, item_size)):
            into[dst_indices, layer] = rows


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """From [token, layer, head, dim] to one layer."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[src_indices, layer_id]


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    """From layers to [page, head, token, layer, dim]."""
    page, token = dst_indices // page_size, dst_indices % page_size
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        into = _as_bytes(target, -1, head_num, page_size, num_layers, item_size // head_num)
        for layer, rows in enumerate(_picked(sources, src_indices, item_size)):
            into[page, :, token, layer] = rows.view(len(rows), head_num, -1)


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    """From [page, head, token, layer, dim] to one layer."""
    page, token = src_indices // page_size, src_indices % page_size
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[:, :, :, layer_id][page, :, token]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """From layers, K's before V's, to [page, layer, token, head, dim]."""
    page, token = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        dst_ptrs[i // layers][page, i % layers, token] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """From [page, layer, token, head, dim] to one layer."""
    page, token = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[page, layer_id, token]


def install() -> None:
    """Give SGLang what it lacks, in this process."""
    vllm, ops = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    vars(ops)["rotary_embedding"] = rotary_embedding
    vars(vllm)["_custom_ops"] = ops
    sys.modules |= {"vllm": vllm, "vllm._custom_ops": ops}
    for name, value in list(globals().items()):
        if name.startswith("transfer_kv_"):
            setattr(builtins, name, value)

    from sglang.srt.mem_cache.pool_host import base, common

    common._cuda_host_register = lambda *_: None
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_MEMORY_RESERVE
