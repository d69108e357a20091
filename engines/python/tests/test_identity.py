"""What seeds a request's chain, and which requests pass by."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import eventually
from membrane_kv.identity import PASSED_BY, Adapters, Scope, scope
from membrane_kv.weights import adapter_id

HASH = "ab" * 32


def request(**changes: Any) -> SimpleNamespace:
    plain = {
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "resumable": False,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
    }
    return SimpleNamespace(**(plain | changes))


def item(identifier: str = HASH, offset: int = 4, length: int = 9, modality: str = "image") -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(modality=modality, identifier=identifier, mm_position=place)


def safetensors(path: Path, fill: int) -> None:
    header = b'{"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([fill]) * 64)


def adapter(folder: Path, fill: int = 1) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    safetensors(folder / "adapter_model.safetensors", fill)
    return folder


def lora(path: Path | str, name: str = "x", number: int = 1, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **changes)


def settled(adapters: Adapters, of: Any) -> tuple[str, str]:
    eventually(lambda: adapters.identity(of)[1] != "adapter_pending")
    return adapters.identity(of)


def test_plain_request_has_no_seed() -> None:
    assert scope(request(), Adapters()) == Scope(None, None, True)
    assert scope(request(cache_salt="s"), Adapters()) == Scope("s", None, True)
    assert scope(request(cache_salt=""), Adapters()) == Scope(None, None, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"skip_reading_prefix_cache": True},
        {"sampling_params": SimpleNamespace(prompt_logprobs=0)},
    ],
)
def test_request_that_needs_the_logits_of_its_prompt_stores_only(changes: dict[str, Any]) -> None:
    assert scope(request(**changes), Adapters()) == Scope(None, None, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_token_ids": None}, "embeddings"),
        ({"prompt_embeds": [0.0]}, "embeddings"),
        ({"resumable": True}, "resumable"),
        ({"cache_salt": "é" * 2049}, "salt"),
        ({"mm_features": [item("picture-1")]}, "mm_identifier"),
        ({"mm_features": [item(), item("0b7e6c1e-58a4-4d27-8b0e-3f9f9a3f8f11")]}, "mm_identifier"),
        ({"mm_features": [item("ab" * 31)]}, "mm_identifier"),
    ],
)
def test_what_cannot_be_named_passes_by(changes: dict[str, Any], reason: str) -> None:
    assert reason in PASSED_BY
    assert scope(request(**changes), Adapters()) == reason


def test_every_item_and_its_place_is_in_the_seed() -> None:
    cases = [
        [item()],
        [item("cd" * 32)],
        [item("x:" + HASH)],  # with an adapter of the tower
        [item(offset=5)],
        [item(length=8)],
        [item(modality="video")],
        [item(), item(offset=20)],
        [item(offset=20), item()],
        [item("ab" * 64)],
    ]
    seeds = [scope(request(mm_features=c), Adapters()) for c in cases]
    assert all(isinstance(s, Scope) and s.extra and s.extra.startswith("mm=") for s in seeds)
    assert len(set(seeds)) == len(cases)
    assert scope(request(mm_features=[item()]), Adapters()) == seeds[0]


def test_adapter_is_named_by_its_weights(tmp_path: Path) -> None:
    a, same = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    other = adapter(tmp_path / "c", fill=2)
    adapters = Adapters()
    first = settled(adapters, lora(a))
    assert first[0].startswith("sha256:") and first[1] == ""
    assert settled(adapters, lora(same, "another name", 2)) == first
    assert settled(adapters, lora(other, "x", 3))[0] not in ("", first[0])
    found = scope(request(lora_request=lora(a)), adapters)
    assert found == Scope(None, f"lora={first[0]}/2d", True)
    both = scope(request(lora_request=lora(a), mm_features=[item()]), adapters)
    assert isinstance(both, Scope) and both.extra is not None
    assert both.extra.startswith(f"lora={first[0]}/2d;mm=")


def test_adapter_passes_by_while_its_files_are_read(tmp_path: Path) -> None:
    adapters = Adapters(find=lambda _: "id")
    got = adapters.identity(lora(adapter(tmp_path / "a")))
    assert got in (("", "adapter_pending"), ("id", ""))
    assert settled(adapters, lora(tmp_path / "a")) == ("id", "")


def test_adapter_whose_files_change_is_not_named_any_more(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    adapters = Adapters()
    assert settled(adapters, lora(folder))[1] == ""
    before = (folder / "adapter_model.safetensors").stat().st_mtime_ns
    safetensors(folder / "adapter_model.safetensors", 9)
    os.utime(folder / "adapter_model.safetensors", ns=(before + 1, before + 1))
    assert adapters.identity(lora(folder)) == ("", "adapter_changed")
    os.utime(folder / "adapter_model.safetensors", ns=(before, before))
    assert adapters.identity(lora(folder)) == ("", "adapter_changed")
    assert settled(adapters, lora(folder, number=2))[1] == ""


def test_adapter_that_is_loaded_in_place_passes_by(tmp_path: Path) -> None:
    adapters = Adapters()
    got = settled(adapters, lora(adapter(tmp_path / "a"), load_inplace=True))
    assert got == ("", "adapter_changed")


def test_adapter_without_weights_passes_by(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert settled(Adapters(), lora(tmp_path / "a")) == ("", "adapter")
    assert settled(Adapters(), lora("nobody/nothing")) == ("", "adapter")

    def fails(_: str) -> str:
        raise OSError

    assert settled(Adapters(find=fails), lora(tmp_path / "a")) == ("", "adapter")


def test_adapter_from_a_hub_snapshot(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    (tmp_path / "snapshots").mkdir()
    folder = adapter(tmp_path / "snapshots" / commit)
    assert adapter_id(str(folder)) == commit
