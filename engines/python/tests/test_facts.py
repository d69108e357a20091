"""Settings, canonical facts, counters and safe hooks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import eventually
from membrane_kv.facts import numeric, rope_signature
from membrane_kv.record import Recorder, hook
from membrane_kv.settings import Settings


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"rope_theta": 10000.0}, "base=10000"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "base=10000"),
        ({"rope_theta": 5e5, "rope_scaling": None}, "base=500000"),
        # Also those of TestRopeSignature in engines/embedded.
        ({"rope_theta": 1e6}, "base=1000000"),
        ({"rope_theta": 1e7}, "base=10000000"),
        ({"rope_theta": 10000.5}, "base=10000.5"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "base=10000 partial=0.5"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "b": [1, 2]}},
            "base=10000 type=yarn b=[1,2] factor=4",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0, "rope_type": "yarn"}},
            "base=10000 type=yarn factor=4",
        ),
        ({}, "none"),
    ],
)
def test_rope_signature(config: dict[str, Any], want: str) -> None:
    assert rope_signature(SimpleNamespace(**config)) == want


def test_long_rope_signature_is_a_digest() -> None:
    long = {"rope_theta": 1.0, "rope_scaling": {"type": "longrope", "long": list(range(900))}}
    got = rope_signature(SimpleNamespace(**long))
    assert got.startswith("sha256:") and len(got) == 71


def test_layers_in_the_order_of_their_numbers() -> None:
    names = [f"model.layers.{i}.self_attn.attn" for i in (10, 9, 1, 0)]
    assert sorted(names, key=numeric) == names[::-1]


def test_settings() -> None:
    s = Settings.parse({"sidecar": "/x", "match_deadline_ms": 50, "lease_ms": 1000, "inline": True})
    assert (s.places, s.match_deadline_ms, s.lease_ms, s.inline) == (("/x",), 50, 1000, True)
    assert Settings.parse({}) == Settings()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"sidecars": "/x"}, "sidecars is not a setting"),
        ({"sidecar": 1}, "sidecar is 1, not a str"),
        ({"lease_ms": True}, "lease_ms is True, not a int"),
        ({"inline": "yes"}, "inline is 'yes', not a bool"),
        ({"lease_ms": 0}, "lease_ms is 0, not between"),
        ({"load_deadline_ms": 600_001}, "load_deadline_ms is 600001, not between"),
        ({"inbox_slots": 0}, "inbox_slots is 0, not between"),
        ({"verify": "none"}, "verify is 'none', not"),
    ],
)
def test_settings_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.parse(extra)


def test_api_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMBRANE_API_KEY", "e")
    assert Settings().api_key == "e"
    assert Settings(key="k").api_key == "k"


class Hooks:
    """Something with hooks."""

    def __init__(self) -> None:
        self.recorder = Recorder("", "test")

    @hook(lambda self, n: -n)
    def double(self, n: int) -> int:
        """Return twice n, or fail."""
        if n < 0:
            raise RuntimeError("on purpose")
        return 2 * n


def test_no_exception_leaves_a_hook(caplog: pytest.LogCaptureFixture) -> None:
    h = Hooks()
    with caplog.at_level(logging.ERROR):
        assert [h.double(n) for n in (1, -2, -3)] == [2, 2, 3]
    assert h.recorder.count("hook_errors") == 2
    assert sum("double failed" in r.message for r in caplog.records) == 1
    hooks = h.recorder.snapshot()["hooks"]
    assert isinstance(hooks, dict) and hooks["double"]["n"] == 3


def test_recorder_writes_its_file(tmp_path: Path) -> None:
    r = Recorder(str(tmp_path / "stats"), "worker")
    r.add("loads", 2)
    r.sums("loaded", [1, 2**64 - 1])
    r.note(off="never")
    r.hook("wait", 0.5)
    r.stop()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("stats.worker.")
    got = json.loads(path.read_text())
    assert got["counts"] == {"loads": 2}
    assert got["sums"] == {"loaded": ["0000000000000001", "ffffffffffffffff"]}
    assert got["hooks"] == {"wait": {"n": 1, "sum_s": 0.5, "max_s": 0.5}}
    assert got["off"] == "never"


def test_recorder_writes_about_once_a_second(tmp_path: Path) -> None:
    r = Recorder(str(tmp_path / "stats"), "worker")
    r.add("loads")
    eventually(lambda: any(p.suffix == ".json" for p in tmp_path.iterdir()), timeout=3)
    r.stop()


def test_recorder_gives_what_was_counted_since() -> None:
    r = Recorder("", "worker")
    assert r.take() == {}
    r.add("loads")
    r.add("loads", 2)
    assert r.take() == {"loads": 3}
    assert r.take() == {}
    r.add("loads")
    assert r.take() == {"loads": 1} and r.count("loads") == 4
