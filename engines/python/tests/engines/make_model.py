"""Make a small Llama checkpoint with random weights: make_model.py FOLDER tiny|chat|big [SEED].

Needs torch and safetensors, which come with the engine. Weights are scaled so
that greedy tokens depend on every earlier token. "chat" is "tiny" with a tokenizer
of bytes and a chat template.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and the standard deviations of its projections."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocabulary: int
    attention_std: float
    ff_std: float
    output_std: float


TINY = Shape(4, 128, 4, 2, 32, 256, 512, 0.15, 0.08, 0.3)
SHAPES = {
    "tiny": TINY,
    "chat": TINY,
    "big": Shape(12, 512, 8, 4, 64, 1408, 512, 0.07, 0.05, 0.12),
}


def make(folder: Path, shape: Shape, seed: int) -> None:
    """Write config.json and model.safetensors (float32) into `folder`."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    s = shape
    weights = {
        "model.embed_tokens.weight": random(s.vocabulary, s.hidden, 1.0),
        "model.norm.weight": torch.ones(s.hidden),
        "lm_head.weight": random(s.vocabulary, s.hidden, s.output_std),
    }
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for i in range(s.layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": random(q, s.hidden, s.attention_std),
            p + "self_attn.k_proj.weight": random(kv, s.hidden, s.attention_std),
            p + "self_attn.v_proj.weight": random(kv, s.hidden, s.attention_std),
            p + "self_attn.o_proj.weight": random(s.hidden, q, s.attention_std),
            p + "mlp.gate_proj.weight": random(s.ff, s.hidden, s.ff_std),
            p + "mlp.up_proj.weight": random(s.ff, s.hidden, s.ff_std),
            p + "mlp.down_proj.weight": random(s.hidden, s.ff, s.ff_std),
            p + "input_layernorm.weight": torch.ones(s.hidden),
            p + "post_attention_layernorm.weight": torch.ones(s.hidden),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.hidden,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "num_hidden_layers": s.layers,
        "intermediate_size": s.ff,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": 4096,
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
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with an entry for each byte, and marks up to the vocabulary's size."""
    # Only "chat" needs it.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    entries = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<|begin|>", "<|end|>"]
    entries += [f"<|{i}|>" for i in range(len(entries), vocabulary)]
    tokenizer = Tokenizer(models.BPE({e: i for i, e in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(e, special=True) for e in special])
    tokenizer.add_tokens([AddedToken(e, special=False) for e in entries if e.startswith("<|")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    where, kind = Path(sys.argv[1]), sys.argv[2]
    if kind == "chat":
        where.mkdir(parents=True, exist_ok=True)
        make_tokenizer(where, SHAPES[kind].vocabulary)
    make(where, SHAPES[kind], int(sys.argv[3]) if len(sys.argv) > 3 else 7)
