"""Print, as JSON, what vLLM's connector would say of a model: vllm_facts.py FOLDER."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from membrane_kv import facts, wire
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

args = EngineArgs(
    model=sys.argv[1],
    dtype="float32",
    skip_tokenizer_init=True,
    block_size=32,
    max_model_len=4096,
    kv_transfer_config={
        "kv_connector": "MembraneConnector",
        "kv_connector_module_path": "membrane_kv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    },
)
config = args.create_engine_config()
model = config.model_config
spec = FullAttentionSpec(
    block_size=config.cache_config.block_size,
    num_kv_heads=model.get_total_num_kv_heads(),
    head_size=model.get_head_size(),
    dtype=torch.float32,
)
layers = [f"model.layers.{i}.self_attn.attn" for i in range(model.hf_text_config.num_hidden_layers)]
group = SimpleNamespace(kv_cache_spec=spec, layer_names=layers)
caches = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC")
found = facts.read(config, caches, "")
register = wire.Register("x", "both", found.model, found.descriptor(0))
print(json.dumps(wire.parse_json(register.pack())["model"]))
