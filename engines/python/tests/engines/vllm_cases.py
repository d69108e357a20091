"""Run cases of test_vllm_classes.py in vLLM's interpreter: vllm_cases.py CASE MODEL SOCKET FOLDER.

They need vLLM's classes and no server.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import prometheus_client
import torch
from membrane_kv import facts
from membrane_kv.client import Client
from membrane_kv.identity import Adapters, Scope, scope
from safetensors.torch import save_file
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm_mini import BLOCK, HEAD, HEADS, NAMES, SPEC, Mini, Other, membrane, multi

MODEL, SIDECAR, FOLDER = "", "", Path()
SIBLING = {"kv_connector": "Other", "kv_connector_module_path": "vllm_mini", "kv_role": "kv_both"}


def prompt(seed: int, n: int = 330) -> list[int]:
    return [(i * seed + i * i + seed) % 500 + 3 for i in range(n)]


def leases() -> int:
    client = Client.connect(SIDECAR, time.monotonic() + 5, name="test")
    try:
        return int(client.stats(time.monotonic() + 5)["cache"]["leases"])
    finally:
        client.close()


def good(request: Any) -> bool:
    """Return whether every token was made from right KV."""
    return set(request.output_token_ids) == {7}


def ran(engine: Mini, tokens: list[int], **more: Any) -> int:
    r = engine.request(tokens, **more)
    loaded: int = engine.run(r)
    assert good(r), list(r.output_token_ids)
    return loaded


def case_alone() -> None:
    engine = Mini(MODEL, membrane(SIDECAR))
    assert ran(engine, prompt(1)) == 0
    engine.forget()
    assert ran(engine, prompt(1)) == 320
    engine.stop()


def case_multi_child() -> None:
    """As the child that loads, beside one that has nothing; in either place."""
    for seed, first in ((2, True), (3, False)):
        children = [membrane(SIDECAR), SIBLING]
        engine = Mini(MODEL, multi(*(children if first else children[::-1])), **no_hybrid())
        Other.external.clear()
        assert ran(engine, prompt(seed)) == 0
        engine.forget()
        assert ran(engine, prompt(seed)) == 320
        assert Other.external and not any(Other.external)
        assert leases() == 0
        named = [s["MembraneConnector"] for s in engine.stats]
        assert sum(s.get("loads", 0) for s in named) == 1
        engine.stop()


def no_hybrid() -> dict[str, Any]:
    """Return what a sibling needs that does not support the hybrid manager."""
    return {"disable_hybrid_kv_cache_manager": True}


def case_multi_child_not_chosen() -> None:
    """Nothing wrong is stored when a sibling loads instead, in the step itself, and fails."""
    engine = Mini(MODEL, multi(SIBLING, membrane(SIDECAR)), **no_hybrid())
    tokens = prompt(4)
    engine.kv.fill_(-2.0)
    Other.offers = 160
    Other.external.clear()
    r = engine.request(tokens)
    engine.run(r)
    assert 160 in Other.external
    engine.forget()
    loaded = ran(engine, tokens)  # whatever was stored is right
    assert leases() == 0
    engine.forget()
    assert ran(engine, tokens) == 320, loaded
    engine.stop()


def case_failed_step() -> None:
    """Of a step that does not run to its end nothing is stored, though its hooks are called."""
    engine = Mini(MODEL, membrane(SIDECAR))
    engine.kv.fill_(-2.0)
    tokens = prompt(11)
    engine.scheduler.add_request(engine.request(tokens))
    while not (out := engine.scheduler.schedule()).num_scheduled_tokens:
        pass  # until the sidecar has answered
    kv_transfer_state._KV_CONNECTOR_AGENT = engine.worker
    try:
        with (
            set_forward_context(None, engine.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(out),
        ):
            raise RuntimeError("on purpose")
    except RuntimeError:
        pass
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
    count, end = engine.worker.recorder.count, time.monotonic() + 10
    while not count("stored_pages") + count("dropped_stores"):
        assert time.monotonic() < end, "the pages were neither stored nor dropped"
    assert count("dropped_stores_failed_step") == count("dropped_stores") == 4
    engine.stop()
    reader = Mini(MODEL, membrane(SIDECAR))
    assert ran(reader, tokens) == 0
    reader.stop()


def case_stats() -> None:
    engine = Mini(MODEL, multi(membrane(SIDECAR), SIBLING), **no_hybrid())
    logging = KVConnectorLogging(engine.config.kv_transfer_config)
    metrics = KVConnectorProm(engine.config, ["engine"], {0: ["0"]})
    ran(engine, prompt(5))
    engine.settle(lambda: any(s["MembraneConnector"].get("stored_pages") for s in engine.stats))
    engine.forget()
    ran(engine, prompt(5))
    engine.step()
    for s in engine.stats:
        logging.observe(s)
        metrics.observe(s)
    lines: list[str] = []
    logging.log(lambda form, *args: lines.append(form % args))
    (line,) = lines
    for part in ("'loads': 1", "'loaded_pages': 5", "'stored_pages': 5", "'load_s':", "'store_s':"):
        assert part in line, line
    text = prometheus_client.generate_latest().decode()
    assert 'vllm:membrane_loads_total{engine="0"} 1.0' in text
    assert 'vllm:membrane_misses_total{engine="0",reason=' in text
    again = MultiConnector.build_kv_connector_stats(
        {"MembraneConnector": {"loads": 2, "load_us": 4, "loaded_bytes": 8000}}
    )
    assert again is not None
    again.aggregate(again)
    assert again.reduce()["MembraneConnector"]["load_GB_per_s"] == 2.0
    assert not again.is_empty()
    engine.stop()


def case_events() -> None:
    on = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    engine = Mini(MODEL, membrane(SIDECAR), **on)
    ran(engine, prompt(6))

    def stored(medium: str) -> list[BlockStored]:
        return [e for e in engine.events if isinstance(e, BlockStored) and e.medium == medium]

    engine.settle(lambda: len(stored("CPU")) == 5)
    own = {h: e for e in stored("GPU") for h in e.block_hashes}
    parents = {}
    for e in stored("GPU"):
        for parent, h in zip([e.parent_block_hash, *e.block_hashes], e.block_hashes, strict=False):
            parents[h] = parent
    for e in stored("CPU"):
        assert e.block_size == BLOCK and len(e.token_ids) == 64 and e.group_idx == 0
        assert all(h in own for h in e.block_hashes)
        assert parents[e.block_hashes[0]] == e.parent_block_hash
    assert [t for e in stored("CPU") for t in e.token_ids] == prompt(6)[:320]
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.step()
    gone = [e for e in engine.events if isinstance(e, BlockRemoved) and e.medium == "CPU"]
    assert sorted(h for e in gone for h in e.block_hashes) == sorted(
        h for e in stored("CPU") for h in e.block_hashes
    )
    engine.stop()


def case_reset() -> None:
    engine = Mini(MODEL, membrane(SIDECAR))
    ran(engine, prompt(7))
    engine.forget()
    assert ran(engine, prompt(7)) == 320
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert ran(engine, prompt(7)) == 0
    engine.forget()
    assert ran(engine, prompt(7)) == 320
    # While a request runs, whose pages are of before.
    r = engine.request(prompt(8), n=100)
    engine.scheduler.add_request(r)
    engine.settle(lambda: r.num_output_tokens > 1)
    connector: Any = engine.scheduler.connector
    assert connector.reset_cache()
    engine.settle(lambda: r.request_id not in engine.scheduler.requests)
    engine.forget()
    assert ran(engine, prompt(8)) == 0
    engine.stop()


def case_scope() -> None:
    engine = Mini(MODEL, membrane(SIDECAR))
    tokens = prompt(9)

    def again(**more: Any) -> int:
        loaded = ran(engine, tokens, **more)
        engine.forget()
        return loaded

    assert again(sampling={"prompt_logprobs": 1}) == 0
    assert again(sampling={"prompt_logprobs": 1}) == 0
    assert again(sampling={"prompt_logprobs": 1, "skip_reading_prefix_cache": False}) == 0
    assert again() == 320  # they have stored
    assert again(cache_salt="s") == 0
    assert again(cache_salt="s") == 320
    assert again(cache_salt="t") == 0
    adapters = [adapter(n) for n in range(2)]
    for number, path in enumerate(adapters):
        lora = LoRARequest("same name", number + 1, str(path))
        connector: Any = engine.scheduler.connector
        end = time.monotonic() + 10
        while connector._adapters.identity(lora)[1] == "adapter_pending":
            assert time.monotonic() < end
        assert again(lora_request=lora) == 0
        assert again(lora_request=lora) == 320
    assert again(cache_salt="s", lora_request=LoRARequest("x", 3, str(adapters[0]))) == 0
    assert again() == 320
    engine.stop()


def adapter(seed: int) -> Path:
    folder = FOLDER / f"adapter-{seed}"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    save_file({"a": torch.full((8, 8), float(seed))}, folder / "adapter_model.safetensors")
    return folder


def case_multimodal() -> None:
    """Scopes of real feature objects."""
    engine = Mini(MODEL, membrane(SIDECAR))

    def of(*identifiers: str) -> Scope | str:
        features = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=name,
                mm_position=PlaceholderRange(offset=10 * i, length=8),
            )
            for i, name in enumerate(identifiers)
        ]
        return scope(engine.request(prompt(10), mm_features=features), Adapters())

    a, b = "ab" * 32, "cd" * 32
    found = [of(a), of(b), of(a, b), of(b, a), of()]
    assert all(isinstance(f, Scope) for f in found) and len(set(found)) == 5
    assert of(a) == found[0]
    assert of("picture") == "mm_identifier"
    engine.stop()


def case_groups() -> None:
    """Every kind of group but full attention is refused by its name."""
    sizes = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": torch.float32}
    window = SlidingWindowSpec(**sizes, sliding_window=64)
    local = ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=64)
    mamba = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
    as_full = FullAttentionSpec(**sizes, sliding_window=64)
    engine = Mini(MODEL, membrane(SIDECAR))
    for specs, words in (
        ([SPEC, window], "2 KV cache groups (FullAttentionSpec, SlidingWindowSpec)"),
        ([SPEC, mamba], "2 KV cache groups (FullAttentionSpec, MambaSpec)"),
        ([SPEC, SPEC], "2 KV cache groups"),
        ([window], "SlidingWindowSpec"),
        ([local], "ChunkedLocalAttentionSpec"),
        ([mamba], "MambaSpec"),
        ([as_full], "sliding window"),
        ([], "0 KV cache groups"),
    ):
        groups = [KVCacheGroupSpec(NAMES, s) for s in specs]
        caches = KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBHNC"
        )
        try:
            facts.read(engine.config, caches, "")
        except facts.Unsupported as e:
            assert words in str(e), (words, str(e))
        else:
            raise AssertionError(f"{words} was not refused")
    engine.stop()


if __name__ == "__main__":
    name, MODEL, SIDECAR, folder = sys.argv[1:]
    FOLDER = Path(folder)
    for case in [k for k in list(globals()) if k.startswith("case_")]:
        if name in ("all", case.removeprefix("case_")):
            globals()[case]()
            print("passed", case.removeprefix("case_"), flush=True)
