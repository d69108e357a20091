#!/usr/bin/env python3
"""Makes tiny Llama checkpoints and what transformers computes from them.

Usage: make_golden.py OUTPUT_FOLDER [--medium]

Writes small-f32/ (one F32 file) and small-bf16/ (two BF16 files with an index,
tied embeddings), and with --medium also medium-f32/ (2.9 MB, not committed).
Beside the checkpoint each folder holds golden.json: a prompt, the logits after
some of its prefixes, and the greedy tokens that follow the whole prompt.
Weights come from Python's Mersenne Twister, so they are the same everywhere.
Needs torch, transformers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """One checkpoint to make."""

    name: str
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    theta: float
    eps: float
    tied: bool
    dtype: torch.dtype
    prompt: int
    positions: tuple[int, ...]
    seed: int


SMALL_F32 = Shape(
    name="small-f32",
    hidden=64,
    inter=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=256,
    theta=10000.0,
    eps=1e-5,
    tied=False,
    dtype=torch.float32,
    prompt=70,
    positions=(0, 1, 63, 64, 69),
    seed=7,
)
# Heads times head size differ from the hidden size here.
SMALL_BF16 = Shape(
    name="small-bf16",
    hidden=64,
    inter=96,
    layers=2,
    heads=4,
    kv_heads=1,
    head_dim=32,
    vocab=256,
    theta=500000.0,
    eps=1e-6,
    tied=True,
    dtype=torch.bfloat16,
    prompt=70,
    positions=(0, 33, 69),
    seed=8,
)
MEDIUM_F32 = Shape(
    name="medium-f32",
    hidden=128,
    inter=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    theta=10000.0,
    eps=1e-5,
    tied=False,
    dtype=torch.float32,
    prompt=700,
    positions=(0, 64, 300, 699),
    seed=9,
)
GREEDY_TOKENS = 24


def config(shape: Shape) -> dict[str, object]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
    }


def weights(shape: Shape, rng: random.Random) -> dict[str, torch.Tensor]:
    """Every tensor, large enough that attention and greedy tokens are lively."""

    def tensor(*size: int, std: float, mean: float = 0.0) -> torch.Tensor:
        count = 1
        for n in size:
            count *= n
        values = [mean + std * 3**0.5 * (2 * rng.random() - 1) for _ in range(count)]
        return torch.tensor(values, dtype=torch.float64).reshape(*size).to(shape.dtype)

    def matrix(outputs: int, inputs: int, gain: float) -> torch.Tensor:
        return tensor(outputs, inputs, std=gain / inputs**0.5)

    hidden, q, kv = (
        shape.hidden,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    out = {
        "model.embed_tokens.weight": tensor(shape.vocab, hidden, std=1.0),
        "model.norm.weight": tensor(hidden, std=0.2, mean=1.0),
    }
    if not shape.tied:
        out["lm_head.weight"] = matrix(shape.vocab, hidden, 3.4)
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        out[prefix + "input_layernorm.weight"] = tensor(hidden, std=0.2, mean=1.0)
        out[prefix + "post_attention_layernorm.weight"] = tensor(
            hidden, std=0.2, mean=1.0
        )
        out[prefix + "self_attn.q_proj.weight"] = matrix(q, hidden, 1.7)
        out[prefix + "self_attn.k_proj.weight"] = matrix(kv, hidden, 1.7)
        out[prefix + "self_attn.v_proj.weight"] = matrix(kv, hidden, 1.7)
        out[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q, 1.7)
        out[prefix + "mlp.gate_proj.weight"] = matrix(shape.inter, hidden, 0.9)
        out[prefix + "mlp.up_proj.weight"] = matrix(shape.inter, hidden, 0.9)
        out[prefix + "mlp.down_proj.weight"] = matrix(hidden, shape.inter, 1.3)
    return out


def save(shape: Shape, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes the checkpoint: one file, or two with an index when tied."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1) + "\n")
    metadata = {"format": "pt"}
    if not shape.tied:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    weight_map: dict[str, str] = {}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, folder / file, metadata=metadata)
        weight_map.update(dict.fromkeys(members, file))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    text = json.dumps(index, indent=1, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


def golden(shape: Shape, prompt: list[int], folder: Path) -> dict[str, object]:
    """Logits and greedy tokens of transformers in float32 on the CPU."""
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
        ids = list(prompt)
        margin = float("inf")
        for _ in range(GREEDY_TOKENS):
            last = model(torch.tensor([ids])).logits[0, -1]
            best = last.topk(2).values
            margin = min(margin, float(best[0] - best[1]))
            ids.append(int(last.argmax()))
    # Closer than this and rounding alone could choose another token.
    if margin < 1e-3:
        raise SystemExit(
            f"{shape.name}: greedy margin is {margin}, choose another seed"
        )
    return {
        "prompt": prompt,
        "logits": {
            str(i): [float(f"{v:.7g}") for v in logits[i].tolist()]
            for i in shape.positions
        },
        "greedy": ids[len(prompt) :],
    }


def main() -> None:
    """Makes every folder."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--medium", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for shape in [SMALL_F32, SMALL_BF16] + ([MEDIUM_F32] if args.medium else []):
        rng = random.Random(shape.seed)
        folder = args.output / shape.name
        save(shape, weights(shape, rng), folder)
        prompt = [rng.randrange(shape.vocab) for _ in range(shape.prompt)]
        text = json.dumps(golden(shape, prompt, folder))
        (folder / "golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
