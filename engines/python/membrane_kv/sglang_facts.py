"""What SGLang's configuration and host pool say of the model, its KV and its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .facts import Unsupported, rope_signature
from .hostpool import LAYOUTS
from .weights import weights_id
from .wire import Descriptor, Model

MIN_PAGE = 16

_POOLS = {"MHATokenToKVPoolHost": False, "MLATokenToKVPoolHost": True}
_PLAIN = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the model apart from the pool.

    `config` is its Hugging Face text config; `weights` names its exact weights.
    """

    config: Any
    weights: str
    kv_heads: int
    layers: int


def read_model(explicit_weights_id: str) -> ModelFacts:
    """Return what this process's server runs. Raises Unsupported."""
    try:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        model = ModelConfig.from_server_args(args)
    except (ImportError, AttributeError) as e:
        raise Unsupported(f"this SGLang does not say what model it runs ({e})") from e
    if getattr(args, "speculative_algorithm", None):
        raise Unsupported("speculative decoding is on: its pages are not those of the model")
    if str(getattr(args, "kv_cache_dtype", "auto")) not in ("auto", *_PLAIN, "bf16"):
        raise Unsupported(f"KV in {args.kv_cache_dtype} is not supported yet")
    if str(getattr(args, "load_format", "auto")).endswith("dummy") and not explicit_weights_id:
        raise Unsupported("its weights are made up and weights_id is not set")
    weights = weights_id(str(args.model_path), explicit_weights_id, args.revision)
    if weights is None:
        raise Unsupported(f"the weights of {args.model_path} have no name: set weights_id")
    quantization = getattr(args, "quantization", None)
    if quantization and getattr(model.hf_config, "quantization_config", None) is None:
        weights += "+" + str(quantization)  # the engine changes them as it loads them
    text = model.hf_text_config
    return ModelFacts(
        config=text,
        weights=weights,
        kv_heads=int(model.get_total_num_kv_heads()),
        layers=int(text.num_hidden_layers),
    )


@dataclass(frozen=True)
class PoolFacts:
    """The host pool of this rank: pages of `page_tokens` tokens and `page_bytes` bytes."""

    layout: str
    dtype: str
    page_tokens: int
    page_bytes: int
    layers: tuple[int, int]
    heads: int
    head_size: int
    mla: bool


def read_pool(pool: Any) -> PoolFacts:
    """Return what a host pool says of itself. Raises Unsupported."""
    kind = type(pool).__name__
    if kind not in _POOLS:
        raise Unsupported(f"its host pool is a {kind}; {' and '.join(_POOLS)} are supported")
    mla = _POOLS[kind]
    if pool.layout not in LAYOUTS:
        raise Unsupported(
            f"--hicache-mem-layout is {pool.layout}; {', '.join(LAYOUTS)} are supported"
        )
    page = int(pool.page_size)
    if page < MIN_PAGE:
        raise Unsupported(f"--page-size is {page}: set it to {MIN_PAGE} or more")
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in _PLAIN:
        raise Unsupported(f"KV in {dtype} is not supported yet")
    layers = int(pool.layer_num)
    first, last = int(pool.start_layer), int(pool.end_layer)
    if last - first != layers or getattr(pool, "target_layer_num", layers) != layers:
        raise Unsupported(
            f"its host pool has {layers} layers for layers {first} to {last}:"
            " those of a draft model are not supported"
        )
    if mla:
        heads, head_size, both = 1, int(pool.kv_cache_dim), 1
    else:
        heads, head_size, both = int(pool.head_num), int(pool.head_dim), 2
        if int(getattr(pool, "v_head_dim", head_size)) != head_size:
            raise Unsupported(f"values of {pool.v_head_dim} and keys of {head_size} numbers")
    element = 4 if dtype == "float32" else 2
    return PoolFacts(
        # Read page by page the two lie in the same order, so they share pages.
        layout="page_first_direct" if pool.layout == "layer_first" else str(pool.layout),
        dtype=dtype,
        page_tokens=page,
        page_bytes=both * layers * page * heads * head_size * element,
        layers=(first, last),
        heads=heads,
        head_size=head_size,
        mla=mla,
    )


def describe(model: ModelFacts, pool: PoolFacts, config: Any) -> tuple[Model, Descriptor]:
    """Return the registration's model and descriptor; `config` is a HiCacheStorageConfig.

    With MLA every rank has all of a page, and it is one shard. Raises Unsupported.
    """
    for name in ("attn_cp_size", "dcp_size"):
        if int(getattr(config, name, 1) or 1) > 1:
            raise Unsupported(f"{name} is {getattr(config, name)}, 1 is supported")
    tp = 1 if pool.mla else int(config.tp_size)
    tp_rank = 0 if pool.mla else int(config.tp_rank)
    total = 1 if pool.mla else model.kv_heads
    if not pool.mla and pool.heads != max(total // tp, 1):
        raise Unsupported(f"{pool.heads} KV heads on each of {tp} ranks, of {total} in all")
    if pool.layers[1] > model.layers or (
        int(config.pp_size) == 1 and pool.layers != (0, model.layers)
    ):
        raise Unsupported(
            f"layers {pool.layers[0]} to {pool.layers[1]} keep KV, of {model.layers}:"
            " models with several kinds of KV are not supported"
        )
    first = tp_rank * total // tp
    return (
        Model(
            weights_id=model.weights,
            dtype=pool.dtype,
            rope=rope_signature(model.config),
            layers=model.layers,
            kv_heads=total,
            head_size=pool.head_size,
            mla=pool.mla,
        ),
        Descriptor(
            layout="sglang-" + pool.layout,
            dtype=pool.dtype,
            block_tokens=pool.page_tokens,
            block_bytes=pool.page_bytes,
            layer_window=pool.layers,
            head_window=(first, first + pool.heads),
            tp_size=tp,
            tp_rank=tp_rank,
            pp_size=int(config.pp_size),
            pp_rank=int(config.pp_rank),
        ),
    )
