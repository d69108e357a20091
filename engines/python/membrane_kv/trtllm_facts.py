"""What TensorRT-LLM's arguments and the model's files say of the model, its KV and its blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .facts import Facts, Unsupported, rope_signature
from .weights import weights_id
from .wire import Model

_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
_STORED = {"fp8": "float8_e4m3fn"}
# The attention backend decides the order of heads and tokens inside a block.
_LAYOUTS = {"TRTLLM": "trtllm-hnd", "FLASHINFER": "trtllm-nhd"}


def _get(of: Any, name: str, default: Any = None) -> Any:
    """Return a field of an object or of a mapping, `default` where it is not set."""
    value = of.get(name) if isinstance(of, dict) else getattr(of, name, None)
    return default if value is None else value


def _refuse(args: Any) -> None:
    """Raise Unsupported for what this connector leaves alone."""
    cache = _get(args, "kv_cache_config")
    for name in ("pipeline_parallel_size", "context_parallel_size", "max_beam_width"):
        if int(_get(args, name, 1)) > 1:
            raise Unsupported(f"{name} is {_get(args, name)}, 1 is supported")
    for name in ("enable_attention_dp", "speculative_config"):
        if _get(args, name):
            raise Unsupported(f"{name} is set")
    if int(_get(cache, "host_cache_size", 0)):
        raise Unsupported(
            "host_cache_size is set: blocks that move between two pools cannot be followed"
        )
    if _get(cache, "max_attention_window"):
        raise Unsupported("max_attention_window is set: all layers must keep the whole prompt")
    if _get(cache, "enable_block_reuse", True) is False:
        raise Unsupported("enable_block_reuse is off, with which no connector is asked")


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint, of a multimodal model the text part."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise Unsupported(f"cannot read {folder / 'config.json'}: {e}") from e
    if not isinstance(config, dict):
        raise Unsupported(f"{folder / 'config.json'} is no JSON object")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _positive(config: dict[str, Any], name: str, otherwise: Any = None) -> int:
    value = config.get(name)
    value = otherwise if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Unsupported(f"{name} of the model's config.json is {value!r}")
    return value


def _whole_prompt(config: dict[str, Any]) -> None:
    """Refuse models whose layers do not all attend to the whole prompt."""
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise Unsupported("the model attends to a sliding window")
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    other = {str(kind) for kind in kinds} - {"full_attention", "attention"}
    if other:
        raise Unsupported(f"the model has layers of the kind {', '.join(sorted(other))}")
    if config.get("index_topk"):
        raise Unsupported("the model keeps an index beside its KV")


def _cache_dtype(args: Any, logical: str) -> str:
    given = str(_get(_get(args, "kv_cache_config"), "dtype", "auto"))
    return logical if given == "auto" else given.removeprefix("torch.")


def read(args: Any, explicit_weights_id: str) -> Facts:
    """Return the facts of an engine from its `llm_args`. Raises Unsupported."""
    _refuse(args)
    folder = Path(str(_get(args, "model", "")))
    if not folder.is_dir():
        raise Unsupported(f"the model {str(folder)!r} is not a folder: give its files' path")
    weights = weights_id(str(folder), explicit_weights_id)
    if weights is None:
        raise Unsupported(f"the weights of {folder} have no name: set weights_id")
    config = _config(folder)
    _whole_prompt(config)
    heads = _positive(config, "num_attention_heads")
    mla = bool(config.get("kv_lora_rank"))
    if mla:
        kv_heads = 1
        size = _positive(config, "kv_lora_rank") + _positive(config, "qk_rope_head_dim")
    else:
        kv_heads = _positive(config, "num_key_value_heads", heads)
        size = _positive(config, "head_dim", _positive(config, "hidden_size") // heads)
    backend = str(_get(args, "attn_backend", "TRTLLM")).upper()
    layout = "trtllm-mla" if mla and backend == "TRTLLM" else "" if mla else _LAYOUTS.get(backend)
    if not layout:
        raise Unsupported(
            f"attn_backend is {backend}: nobody knows how its {'MLA ' if mla else ''}blocks lie"
        )
    logical = str(_get(args, "dtype", "auto")).removeprefix("torch.")
    if logical == "auto":
        logical = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    stored = _cache_dtype(args, logical)
    if logical not in _DTYPES or stored not in _DTYPES:
        raise Unsupported(f"its KV cache is {stored} of a {logical} model")
    tp = int(_get(args, "tensor_parallel_size", 1))
    rank_heads = max(kv_heads // tp, 1)
    if not mla and kv_heads % tp and tp % kv_heads:
        raise Unsupported(f"{kv_heads} KV heads are not shared evenly by {tp} ranks")
    block = int(_get(_get(args, "kv_cache_config"), "tokens_per_block", 32))
    layers = _positive(config, "num_hidden_layers")
    numbers = layers * (1 if mla else 2) * rank_heads * block * size
    quantized = "" if stored == logical else stored
    return Facts(
        model=Model(
            weights_id=weights,
            dtype=logical,
            quantization=quantized,
            scales="checkpoint" if quantized else "",
            rope=rope_signature(SimpleNamespace(**config)),
            layers=layers,
            kv_heads=kv_heads,
            head_size=size,
            mla=mla,
        ),
        layout=layout,
        dtype=_STORED.get(stored, stored),
        packing="",
        block=block,
        block_bytes=numbers * _DTYPES[stored],
        layers=tuple(f"layers.{i}" for i in range(layers)),
        rank_heads=rank_heads,
        tp_size=tp,
    )


def check_shape(facts: Facts, shape: Iterable[int], itemsize: int) -> None:
    """Refuse a pool whose blocks are not what the model's facts say.

    `shape` is [blocks, layers, 2 or 1, numbers of one layer's K or V in a block].
    """
    got = tuple(int(n) for n in shape)
    per_layer = facts.block_bytes // len(facts.layers)
    sides = 1 if facts.model.mla else 2
    want = (len(facts.layers), sides, per_layer // sides)
    if len(got) != 4 or (*got[1:3], got[3] * itemsize) != want:
        raise Unsupported(
            f"the KV pool has the shape {list(got)} of {itemsize} bytes each,"
            f" not [blocks, {want[0]}, {want[1]}, {want[2]} bytes], {math.prod(want)} bytes a block"
        )
