"""What vLLM's configuration says of the model, its KV and its blocks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from .weights import weights_id
from .wire import Descriptor, Model

_MAX_FACT = 1024
_ACCELERATORS = ("cuda", "xpu")


class Unsupported(Exception):
    """The engine cannot use the cache; the text is a sentence for its log."""


@dataclass(frozen=True)
class Facts:
    """The model's facts and the layout of this engine's blocks.

    `layers` are the names of the KV layers in the model's order; `block` is the
    engine's block, in tokens.
    """

    model: Model
    layout: str
    dtype: str
    packing: str
    block: int
    block_bytes: int
    layers: tuple[str, ...]
    rank_heads: int
    tp_size: int

    def descriptor(self, tp_rank: int) -> Descriptor:
        """Return the descriptor of one rank's shard."""
        first = tp_rank * self.model.kv_heads // self.tp_size
        return Descriptor(
            layout=self.layout,
            dtype=self.dtype,
            packing=self.packing,
            block_tokens=self.block,
            block_bytes=self.block_bytes,
            tp_size=self.tp_size,
            tp_rank=tp_rank,
            layer_window=(0, len(self.layers)),
            head_window=(first, first + self.rank_heads),
        )


def rope_signature(config: Any) -> str:
    """Return the rotary embedding of a Hugging Face config as canonical text.

    "base=10000" for the plain kind; scaling parameters follow as sorted
    "name=value". Text above 1,024 bytes becomes its digest.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    scaling = {k: v for k, v in dict(given).items() if v is not None}
    base = scaling.pop("rope_theta", None) or getattr(config, "rope_theta", None)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None)
    scaling.pop("type", None)
    partial = scaling.pop("partial_rotary_factor", None)
    partial = partial or getattr(config, "partial_rotary_factor", None)
    if base is None and not scaling:
        return "none"
    parts = [f"base={_number(base)}"]
    if kind not in (None, "default"):
        parts.append(f"type={kind}")
    if partial not in (None, 1, 1.0):
        parts.append(f"partial={_number(partial)}")
    parts += [f"{k}={_number(v)}" for k, v in sorted(scaling.items())]
    text = " ".join(parts)
    if len(text.encode()) > _MAX_FACT:
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    return text


def _number(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def numeric(name: str) -> list[tuple[int, int, str]]:
    """Return a key that orders layer names by the numbers in them."""
    return [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in name.split(".")]


def _refuse(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise Unsupported for what this connector leaves alone."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(g.kv_cache_spec).__name__ for g in groups)
        raise Unsupported(
            f"the model has {len(groups)} KV cache groups ({kinds}), one is supported"
        )
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise Unsupported(f"its KV cache is a {kind}, full attention is supported")
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        raise Unsupported("the model attends to a sliding window")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise Unsupported("speculative decoding is on")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Unsupported(f"{name} is {getattr(parallel, name)}, 1 is supported")
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("pipeline parallelism is not supported yet")
    dtype = str(cache.cache_dtype)
    if getattr(cache, "calculate_kv_scales", False) or "per_token" in dtype:
        raise Unsupported(f"the scales of its {dtype} KV are made at run time")
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if vllm_config.kv_transfer_config.is_kv_consumer and policy != "recompute":
        raise Unsupported(
            f'kv_load_failure_policy is "{policy}", with which a lost page fails a request:'
            ' set it to "recompute"'
        )


def _packing(spec: Any, block: int, cache_dtype: str, device: str) -> str:
    """Return how numbers are packed inside a block: in plain order on accelerators."""
    if device in _ACCELERATORS:
        return ""
    if device != "cpu":
        raise Unsupported(f"device {device} is not supported")
    try:
        from vllm.v1.attention.backends import cpu_attn

        find = cpu_attn._get_attn_isa
    except (ImportError, AttributeError) as e:
        raise Unsupported(f"this vLLM does not say how its CPU blocks are packed ({e})") from e
    try:
        return str(find(spec.dtype, block, spec.head_size, cache_dtype))
    except TypeError:
        return str(find(spec.dtype, block, spec.head_size))


def check_shape(facts: Facts, device: str, shape: tuple[int, ...]) -> None:
    """Refuse an accelerator's KV tensor of one layer whose shape is not what its layout says.

    Raises Unsupported. Each backend makes its own tensors there; a block that
    is laid out in another way would be read as numbers of other tokens.
    """
    m = facts.model
    if device == "cpu" or m.mla:
        return
    layout = facts.layout.removeprefix("vllm-")
    heads = (facts.rank_heads, facts.block)
    want = heads if layout.endswith("hnc") else heads[::-1]
    if layout not in ("lbhnc", "lbnhc") or shape[1:] != (*want, 2 * m.head_size):
        raise Unsupported(
            f"its KV tensors have the shape {list(shape)} in the layout {layout},"
            f" [blocks, {want[0]}, {want[1]}, {2 * m.head_size}] was expected"
        )


def read(vllm_config: Any, kv_cache_config: Any, explicit_weights_id: str) -> Facts:
    """Return the facts of an engine. Raises Unsupported."""
    _refuse(vllm_config, kv_cache_config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if str(vllm_config.load_config.load_format) == "dummy" and not explicit_weights_id:
        raise Unsupported("its weights are made up and weights_id is not set")
    weights = weights_id(model.model, explicit_weights_id, model.revision)
    if weights is None:
        raise Unsupported(f"the weights of {model.model} have no name: set weights_id")
    text = model.hf_text_config
    if model.quantization and getattr(model.hf_config, "quantization_config", None) is None:
        weights += "+" + str(model.quantization)  # the engine changes them as it loads them
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    if not layout:
        raise Unsupported("this vLLM does not say how its KV cache is laid out")
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    block = int(spec.block_size)
    if block != cache.block_size:
        raise Unsupported(f"KV blocks of {block} and {cache.block_size} tokens differ")
    layers = tuple(sorted(group.layer_names, key=numeric))
    kv_dtype = "" if str(cache.cache_dtype) == "auto" else str(cache.cache_dtype)
    stored = str(spec.dtype).removeprefix("torch.")
    quantized = kv_dtype if kv_dtype.startswith(("fp8", "int8", "nvfp4", "turboquant")) else ""
    device = str(vllm_config.device_config.device_type)
    return Facts(
        model=Model(
            weights_id=weights,
            dtype=str(model.dtype).removeprefix("torch.") if quantized else stored,
            quantization=quantized,
            scales="checkpoint" if quantized else "",
            rope=rope_signature(text),
            layers=len(layers),
            kv_heads=int(model.get_total_num_kv_heads()),
            head_size=int(model.get_head_size()),
            mla=bool(model.use_mla),
        ),
        layout="vllm-" + str(layout).lower(),
        dtype=stored,
        packing=_packing(spec, block, str(cache.cache_dtype), device),
        block=block,
        block_bytes=int(spec.page_size_bytes) * len(layers),
        layers=layers,
        rank_heads=int(spec.num_kv_heads),
        tp_size=int(vllm_config.parallel_config.tensor_parallel_size),
    )
