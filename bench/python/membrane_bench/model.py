"""Make the model that the benchmarks run: python -m membrane_bench.model FOLDER [LAYERS].

A Llama with random float32 weights, the same in every run: hidden 512, 8 heads,
4 KV heads of 64, twelve layers if it is not said otherwise. A token of its KV has 24 KiB. Weights
are scaled so that greedy tokens depend on every earlier token. Needs torch and
safetensors, which come with the engine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FF, VOCABULARY = 512, 8, 4, 64, 1408, 512
_SEED = 7


def make(folder: Path, layers: int = 12) -> None:
    """Write config.json and model.safetensors into `folder`, config.json last."""
    generator = torch.Generator().manual_seed(_SEED)

    def random(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN, 0.12),
    }
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": random(q, HIDDEN, 0.07),
            p + "self_attn.k_proj.weight": random(kv, HIDDEN, 0.07),
            p + "self_attn.v_proj.weight": random(kv, HIDDEN, 0.07),
            p + "self_attn.o_proj.weight": random(HIDDEN, q, 0.07),
            p + "mlp.gate_proj.weight": random(FF, HIDDEN, 0.05),
            p + "mlp.up_proj.weight": random(FF, HIDDEN, 0.05),
            p + "mlp.down_proj.weight": random(HIDDEN, FF, 0.05),
            p + "input_layernorm.weight": torch.ones(HIDDEN),
            p + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "intermediate_size": FF,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    temporary = folder / f"config.json.{os.getpid()}"
    temporary.write_text(json.dumps(config, indent=1))
    temporary.rename(folder / "config.json")


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
